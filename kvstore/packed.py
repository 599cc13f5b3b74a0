"""What questions and answers pack into bytes, as the core takes it and gives it."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.store import Slot, Wanted
from shared.blocks import BLOCK_SIZE, HASH_BYTES, BlockHash, split_hashes
from shared.messages.kvstore import NO_SLOT, Reserve
from shared.slots import pack_generations
from shared.tokens import pack


def wanted_by(question: Reserve) -> list[Wanted] | None:
    """None where its parts do not fit together."""
    names, parents, tokens = whole_hashes(question.hashes), whole_hashes(question.parents), question.tokens
    if not len(names) == len(parents) == len(tokens) or not all(0 < count <= BLOCK_SIZE for count in tokens):
        return None
    return [Wanted(*each) for each in zip(names, parents, tokens, strict=True)]


def whole_hashes(packed: bytes) -> list[BlockHash]:
    """Without what may hang behind the last one."""
    return list(split_hashes(packed[: len(packed) // HASH_BYTES * HASH_BYTES]))


def numbers(slots: Iterable[Slot | None]) -> bytes:
    """Packed uint32; NO_SLOT for None."""
    return pack(NO_SLOT if slot is None else slot.number for slot in slots)


def generations(slots: Iterable[Slot | None]) -> bytes:
    """Packed uint64."""
    return pack_generations(0 if slot is None else slot.generation for slot in slots)
