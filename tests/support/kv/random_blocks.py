"""Blocks of KV cache with random contents and right checksums, for tests of what carries them."""

from __future__ import annotations

import random

from kvstore.arena.in_flight_block import NO_PARENT, BlockShape, InFlightBlock, checksum
from kvstore.core.layout import CHECKSUM
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import HASH_BYTES, BlockHash

SHAPE = BlockShape(cells=2, cell_bytes=3000)


def chain(length: int, shape: BlockShape = SHAPE, *, seed: int = 0) -> list[InFlightBlock]:
    """One after the other in a chain; equal for equal seeds."""
    chance = random.Random(seed)
    blocks: list[InFlightBlock] = []
    for _ in range(length):
        parent = blocks[-1].hash if blocks else NO_PARENT
        blocks.append(
            carried(BlockHash(chance.randbytes(HASH_BYTES)), parent, chance.randbytes(shape.payload_bytes), shape)
        )
    return blocks


def carried(name: BlockHash, parent: bytes, payload: bytes, shape: BlockShape) -> InFlightBlock:
    size = shape.cell_bytes
    sums = b"".join(CHECKSUM.pack(checksum(payload[at : at + size])) for at in range(0, len(payload), size))
    return InFlightBlock(name, parent, BLOCK_SIZE, sums, payload)


def hashes(blocks: list[InFlightBlock]) -> list[BlockHash]:
    return [block.hash for block in blocks]
