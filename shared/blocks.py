"""Block hashes: the name under which scheduler, coordinator and KV store know 16 tokens and all before them.

A full block's hash is BLAKE2b-128 over (hash of the block before, its token ids, extra keys). The extra keys (cache
salt, LoRA id, media hash) go into the first block only; every later block inherits them through the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NewType

from shared.packing import TOKEN_BYTES

BlockHash = NewType("BlockHash", bytes)

BLOCK_SIZE = 16
"""Tokens in a block of KV cache."""

HASH_BYTES = 16
_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens`, the last one full or not."""
    return -(-tokens // BLOCK_SIZE)


def root_hash(cache_salt: str | None) -> BlockHash:
    """What the first block's hash chains from: equal salts, and only those, share cached blocks."""
    return BlockHash(blake2b(b"baton" + (cache_salt or "").encode(), digest_size=HASH_BYTES).digest())


def next_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """The hash of one full block of packed `tokens` (64 bytes) behind `parent`."""
    if len(tokens) != _BLOCK_BYTES:
        raise ValueError(f"a full block is {_BLOCK_BYTES} bytes of packed tokens, not {len(tokens)}")
    return BlockHash(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())


def hash_chain(tokens: bytes, cache_salt: str | None) -> list[BlockHash]:
    """The hash of every full block of packed `tokens`; a partial last block has none."""
    chain: list[BlockHash] = []
    parent = root_hash(cache_salt)
    for start in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        parent = next_hash(parent, tokens[start : start + _BLOCK_BYTES])
        chain.append(parent)
    return chain


def split_hashes(packed: bytes) -> Iterator[BlockHash]:
    """The hashes of a chain that travelled as one byte string."""
    for start in range(0, len(packed), HASH_BYTES):
        yield BlockHash(packed[start : start + HASH_BYTES])
