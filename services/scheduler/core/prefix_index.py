"""Which block holds the keys and values of which 16 tokens (and all before them). Knows no sequences."""

from __future__ import annotations

from collections.abc import Mapping

from shared.blocks import BlockHash
from shared.kv_journal import KvChanges


class PrefixIndex:
    """Owns the two-way map between block hashes and blocks, and what changed in it since somebody was told."""

    def __init__(self) -> None:
        self.changes = KvChanges()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def find(self, hash_: BlockHash) -> int | None:
        return self._block_of.get(hash_)

    def holds(self, block: int) -> bool:
        return block in self._hash_of

    def add(self, hash_: BlockHash, block: int) -> bool:
        """Names `block`; whether that is its name now. Where the hash is known already the first block keeps it: two
        sequences computed the same tokens side by side, and one copy is enough to share. Raises ValueError for a block
        that has a name."""
        if block in self._hash_of:
            raise ValueError(f"block {block} is indexed already")
        if hash_ in self._block_of:
            return False
        self._block_of[hash_] = block
        self._hash_of[block] = hash_
        self.changes.stored(hash_)
        return True

    def forget(self, block: int) -> None:
        """The block's slot is taken again: its contents are about to be overwritten."""
        hash_ = self._hash_of.pop(block)
        del self._block_of[hash_]
        self.changes.removed(hash_)

    @property
    def hash_of(self) -> Mapping[int, BlockHash]:
        return self._hash_of

    @property
    def block_of(self) -> Mapping[BlockHash, int]:
        return self._block_of
