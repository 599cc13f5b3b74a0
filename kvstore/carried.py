"""A block outside of any arena: what goes to Redis or to another node, and what comes from there, to be checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from kvstore.core.layout import CHECKSUM
from shared.blocks import HASH_BYTES, BlockHash


class Shape(NamedTuple):
    """How large the blocks of a layout are: all that a tier need know of it beside its fingerprint."""

    cells: int
    cell_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.cells * self.cell_bytes


class CarriedBlock(NamedTuple):
    hash: BlockHash
    parent: bytes
    tokens: int
    checksums: bytes
    """8 bytes for each cell, as in a slot's header."""
    payload: bytes | bytearray | memoryview


def is_sound(block: CarriedBlock, shape: Shape) -> bool:
    """Whether sizes and checksums are what they must be. Whatever is not, is a miss."""
    if len(block.payload) != shape.payload_bytes or len(block.checksums) != shape.cells * CHECKSUM.size:
        return False
    expected = (value for (value,) in CHECKSUM.iter_unpack(block.checksums))
    return all(checksum(cell) == value for cell, value in zip(_cells(block.payload, shape), expected, strict=True))


def checksum(cell: bytes | bytearray | memoryview) -> int:
    """xxh3-64, and 1 where that is 0: a slot's header says by 0 that a cell is not written yet."""
    return xxhash.xxh3_64_intdigest(cell) or 1


def _cells(payload: bytes | bytearray | memoryview, shape: Shape) -> Iterator[memoryview]:
    view = memoryview(payload)
    for start in range(0, shape.payload_bytes, shape.cell_bytes):
        yield view[start : start + shape.cell_bytes]


ENVELOPE = struct.Struct("<8s16s16sII")
"""MAGIC, hash, parent, tokens, length of the checksums; then the checksums, then the payload."""
MAGIC = b"BATONBL2"


def packed(block: CarriedBlock) -> bytes:
    """The block as one value. Copies the payload: the slot that it lies in may be taken right after."""
    head = ENVELOPE.pack(MAGIC, block.hash, block.parent, block.tokens, len(block.checksums))
    return b"".join((head, block.checksums, block.payload))


def unpacked(value: bytes) -> CarriedBlock | None:
    """What `packed` packed; None where it is something else. The payload is a view of `value`."""
    if len(value) < ENVELOPE.size:
        return None
    magic, name, parent, tokens, length = ENVELOPE.unpack_from(value)
    if magic != MAGIC or len(value) < ENVELOPE.size + length:
        return None
    payload_at = ENVELOPE.size + length
    return CarriedBlock(
        BlockHash(name), parent, tokens, value[ENVELOPE.size : payload_at], memoryview(value)[payload_at:]
    )


NO_PARENT = bytes(HASH_BYTES)
