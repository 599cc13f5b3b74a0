"""Block hashes: the name under which scheduler, coordinator and KV store know a block of tokens and all before them.

A block has 16, 32 or 64 tokens, the same number in all of a stack. Names of blocks of different sizes never meet: they
are digests of different lengths.

A full block's hash is BLAKE2b-128 over (hash of the block before, its token ids, what stands in their place). Cache
salt and LoRA id go into the first block only; every later block inherits them through the chain. Where the client gave
rows in place of tokens' embeddings, each block has the bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal, NewType, Protocol

from shared.ids import LoraId
from shared.packing import TOKEN_BYTES

BlockHash = NewType("BlockHash", bytes)

BlockSize = Literal[16, 32, 64]
"""How many tokens a block of KV cache may hold."""

DEFAULT_BLOCK_SIZE: BlockSize = 16
"""Where nothing else is configured; and what every release before the setting had."""

HASH_BYTES = 16


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `tokens`, the last one full or not."""
    return -(-tokens // block_size)


def root_hash(cache_salt: str | None, lora: LoraId | None = None) -> BlockHash:
    """What the first block's hash chains from: equal salts and adapters, and only those, share cached blocks."""
    salted = b"baton" + (cache_salt or "").encode()
    return BlockHash(blake2b(salted, digest_size=HASH_BYTES, key=lora or b"").digest())


class InPlaceOfTokens(Protocol):
    """What a prompt has in place of the embeddings of its tokens."""

    def of_tokens(self, first: int, end: int) -> bytes:
        """What tokens from `first` up to `end` have in their place; empty where none of them has anything."""


def next_hash(parent: BlockHash, tokens: bytes, in_place: bytes = b"") -> BlockHash:
    """The hash of one full block of packed `tokens` behind `parent`; `in_place`: see `InPlaceOfTokens`."""
    return BlockHash(blake2b(parent + tokens + in_place, digest_size=HASH_BYTES).digest())


def hash_chain(
    tokens: bytes,
    cache_salt: str | None,
    block_size: int,
    lora: LoraId | None = None,
    in_place: InPlaceOfTokens | None = None,
) -> list[BlockHash]:
    """The hash of every full block of packed `tokens`; a partial last block has none."""
    chain: list[BlockHash] = []
    parent, size = root_hash(cache_salt, lora), block_size * TOKEN_BYTES
    for start in range(0, len(tokens) - size + 1, size):
        first = start // TOKEN_BYTES
        instead = b"" if in_place is None else in_place.of_tokens(first, first + block_size)
        parent = next_hash(parent, tokens[start : start + size], instead)
        chain.append(parent)
    return chain


def split_hashes(packed: bytes) -> Iterator[BlockHash]:
    """The hashes of a chain that travelled as one byte string."""
    for start in range(0, len(packed), HASH_BYTES):
        yield BlockHash(packed[start : start + HASH_BYTES])
