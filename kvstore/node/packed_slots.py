"""Packs what requests and replies hold as bytes, and unpacks it for the core."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.store import BlockToWrite, SlotRef
from shared.blocks import HASH_BYTES, BlockHash, split_hashes
from shared.messages.kvstore import NO_SLOT, Reserve
from shared.packing import pack, pack_generations


def blocks_to_write(request: Reserve, block_size: int) -> list[BlockToWrite] | None:
    """The blocks of a `Reserve`, of `block_size` tokens or fewer; None where its parts do not fit together."""
    names, parents, tokens = split_whole_hashes(request.hashes), split_whole_hashes(request.parents), request.tokens
    if not len(names) == len(parents) == len(tokens) or not all(0 < count <= block_size for count in tokens):
        return None
    return [BlockToWrite(*each) for each in zip(names, parents, tokens, strict=True)]


def split_whole_hashes(packed: bytes) -> list[BlockHash]:
    """The hashes of a chain; bytes behind the last whole one are ignored."""
    return list(split_hashes(packed[: len(packed) // HASH_BYTES * HASH_BYTES]))


def slot_numbers(slots: Iterable[SlotRef | None]) -> bytes:
    """The slots' numbers as packed uint32; NO_SLOT for None."""
    return pack(NO_SLOT if slot is None else slot.number for slot in slots)


def slot_generations(slots: Iterable[SlotRef | None]) -> bytes:
    """The slots' generations as packed uint64; 0 for None."""
    return pack_generations(0 if slot is None else slot.generation for slot in slots)
