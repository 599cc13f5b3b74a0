"""KV memory of models whose tokens attend to rows of an encoder's beside their prompt (cross-attention, as Whisper's).

Keys and values of those rows are a group of their own: as many blocks of the pool for a sequence as its rows fill, from
its first step to its last, whatever it generates. They are named by the rows, the adapter and the cache salt, so
sequences of the same sound share them, and one that was preempted finds them again while their memory is nobody else's.
The names are not published, as no other engine can have those blocks: whoever is handed a request makes them of its
rows, which come with it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from hashlib import blake2b

from services.scheduler.core.hybrid_memory import GroupedPrefixIndex
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.sequence import Sequence
from shared.blocks import HASH_BYTES, BlockHash
from shared.kv_groups import KvCacheGroup, longest_sequence
from shared.media.seen_rows import blocks_of_prompt, places_of_rows
from shared.messages.generation import Generation, PromptEmbeds

_GROUP = 1
"""Of the blocks of rows, in the index."""


class EncodedBlockAllocator(BlockAllocator):
    """Owns the blocks of rows beside those of tokens, of which alone a KV store knows. It works without a connector."""

    def __init__(
        self, num_blocks: int, block_size: int, groups: tuple[KvCacheGroup, ...], *, for_store: bool = False
    ) -> None:
        """`groups`: that of the tokens, then that of the rows."""
        self._rows_index = GroupedPrefixIndex()
        super().__init__(num_blocks, block_size, for_store=for_store, index=self._rows_index)
        self._groups = groups

    @property
    def max_tokens(self) -> int:
        """See `BlockAllocator.max_tokens`."""
        return longest_sequence(self._groups, self.pool.total, self.block_size, 1)

    @property
    def step_rows(self) -> int:
        """See `BlockAllocator.step_rows`."""
        return self._groups[_GROUP].step_rows

    def blocks_in_use(self, sequences: Iterable[Sequence]) -> list[int]:
        """See `BlockAllocator.blocks_in_use`."""
        held = list(sequences)
        return [*super().blocks_in_use(held), *(block for each in held for block in each.blocks.encoded)]

    def fits(self, sequence: Sequence, cached: list[int], coming: Iterable[Sequence], spare: int) -> bool:
        """See `BlockAllocator.fits`. Those that are `coming` have the blocks of their rows already."""
        names, references = self._names(sequence), self.pool.references
        found = self._found(names)
        needed = len(names) - sum(1 for block in found if references[block])
        return super().fits(sequence, cached, coming, spare + needed)

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """See `BlockAllocator.adopt`; and with the blocks of its rows."""
        super().adopt(sequence, cached)
        names = self._names(sequence)
        found = self._found(names)
        for block in found:
            self.pool.share(block)
        sequence.blocks.encoded = found or [self.pool.allocate() for _ in names]

    def take_encoded(self, sequence: Sequence) -> tuple[list[int], bool]:
        """See `BlockAllocator.take_encoded`. Whoever comes from here on finds what the sequence's first step writes."""
        names, blocks = self._names(sequence), sequence.blocks.encoded
        if not names or self.index.hash_of.get(blocks[0]) == names[0]:
            return blocks, bool(names)
        if sequence.generation.prefix_caching:
            for name, block in zip(names, blocks, strict=True):
                self._rows_index.add_to(_GROUP, name, block)
        return blocks, False

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """See `BlockAllocator.release`. Blocks of rows are of use only together, so they go first."""
        blocks, sequence.blocks.encoded = sequence.blocks.encoded, []
        self.pool.release(reversed(blocks))
        super().release(sequence, last)

    def forget_names(self, sequence: Sequence) -> None:
        """See `BlockAllocator.forget_names`."""
        super().forget_names(sequence)
        for block in sequence.blocks.encoded:
            if block in self.index.hash_of and self.pool.references[block] == 1:
                self.index.remove(block)

    def _found(self, names: list[BlockHash]) -> list[int]:
        """The blocks of these names, where all are there; else none."""
        found = [block for name in names if (block := self._rows_index.find(name)) is not None]
        return found if len(found) == len(names) else []

    def _names(self, sequence: Sequence) -> list[BlockHash]:
        """Of each block that its rows fill."""
        embeds = sequence.generation.prompt_embeds
        if embeds is None or not embeds.encoded:
            return []
        table = sequence.blocks
        if table.encoded_name is None:
            table.encoded_name = _name_of(embeds, sequence.generation, self.block_size)
        return [
            BlockHash(blake2b(number.to_bytes(4, "little"), digest_size=HASH_BYTES, key=table.encoded_name).digest())
            for number in range(blocks_of_prompt(embeds, self.block_size, self._groups))
        ]


def _name_of(embeds: PromptEmbeds, generation: Generation, block_size: int) -> bytes:
    """The same rows lie otherwise where others of them are seen together, and an adapter makes other keys of them."""
    salt, lora = generation.cache_salt, generation.lora or b""
    key = lora if salt is None else blake2b(salt.encode(), digest_size=HASH_BYTES, key=lora).digest()
    places = b"".join(place.to_bytes(4, "little") for place, _ in places_of_rows(embeds, block_size)[1:])
    return blake2b(embeds.of_tokens(0, sys.maxsize) + places, digest_size=HASH_BYTES, key=key).digest()
