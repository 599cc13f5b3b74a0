"""A block outside of any arena: on its way to or from Redis or another node; its checksums can be verified."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from kvstore.core.layout import CHECKSUM
from shared.blocks import HASH_BYTES, BlockHash


class BlockShape(NamedTuple):
    """How large the blocks of a layout are: all that a tier needs to know beside the fingerprint."""

    cells: int
    cell_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block's keys and values."""
        return self.cells * self.cell_bytes


class InFlightBlock(NamedTuple):
    """One block outside of any arena: its names, its checksums, and its bytes in the layout's order."""

    hash: BlockHash
    parent: bytes
    tokens: int
    checksums: bytes
    """8 bytes for each cell, as in a slot's header."""
    payload: bytes | bytearray | memoryview


def is_sound(block: InFlightBlock, shape: BlockShape) -> bool:
    """Whether the block has the size of `shape` and every checksum matches."""
    if len(block.payload) != shape.payload_bytes or len(block.checksums) != shape.cells * CHECKSUM.size:
        return False
    expected = (value for (value,) in CHECKSUM.iter_unpack(block.checksums))
    return all(checksum(cell) == value for cell, value in zip(_cells(block.payload, shape), expected, strict=True))


def checksum(cell: bytes | bytearray | memoryview) -> int:
    """The xxh3-64 of a cell's bytes; 1 where that is 0, as 0 in a slot's header marks a cell that is not written."""
    return xxhash.xxh3_64_intdigest(cell) or 1


def _cells(payload: bytes | bytearray | memoryview, shape: BlockShape) -> Iterator[memoryview]:
    view = memoryview(payload)
    for start in range(0, shape.payload_bytes, shape.cell_bytes):
        yield view[start : start + shape.cell_bytes]


ENVELOPE = struct.Struct("<8s16s16sII")
"""MAGIC, hash, parent, tokens, length of the checksums; then the checksums, then the payload."""
BLOCK_MAGIC = b"BATONBL2"


def pack_block(block: InFlightBlock) -> bytes:
    """The block as one value. Copies the payload: its slot may be reused right after."""
    head = ENVELOPE.pack(BLOCK_MAGIC, block.hash, block.parent, block.tokens, len(block.checksums))
    return b"".join((head, block.checksums, block.payload))


def unpack_block(value: bytes) -> InFlightBlock | None:
    """The block that `pack_block` packed; None where `value` is something else. The payload is a view of `value`."""
    if len(value) < ENVELOPE.size:
        return None
    magic, name, parent, tokens, length = ENVELOPE.unpack_from(value)
    if magic != BLOCK_MAGIC or len(value) < ENVELOPE.size + length:
        return None
    payload_at = ENVELOPE.size + length
    return InFlightBlock(
        BlockHash(name), parent, tokens, value[ENVELOPE.size : payload_at], memoryview(value)[payload_at:]
    )


NO_PARENT = bytes(HASH_BYTES)
