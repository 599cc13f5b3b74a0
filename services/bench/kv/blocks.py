"""The blocks that `bench kv` moves: of a given layout, with contents that no memory can compress or share."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from kvstore.arena.in_flight_block import NO_PARENT, BlockShape, InFlightBlock, checksum
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import CHECKSUM, geometry
from services.bench.errors import BenchError
from services.bench.report import OutputOptions
from shared.blocks import DEFAULT_BLOCK_SIZE, HASH_BYTES, BlockHash
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout

SHARED_MEMORY = Path("/dev/shm")


Way = Literal["save-load", "store-to-store", "ssd", "redis"]


class KvShape(NamedTuple):
    """Layout and number of the blocks."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    blocks: int

    @property
    def layout(self) -> KvLayout:
        """The layout of the arena that holds such blocks."""
        return KvLayout(
            model="bench", dtype=self.dtype, layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim
        )

    @property
    def block(self) -> BlockShape:
        """The cells of one block, and their bytes."""
        size = geometry(self.layout, 1)
        return BlockShape(size.cells, size.cell_bytes)

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all blocks together."""
        return self.blocks * self.block.payload_bytes


class KvOptions(NamedTuple):
    """The flags of `bench kv`."""

    shape: KvShape
    rounds: int
    only: list[Way]
    device: str
    redis_url: str | None
    ssd: Path | None
    """Folder on the disk to be measured; None: where temporary files go."""
    output: OutputOptions


def names(shape: KvShape) -> list[BlockHash]:
    """The blocks' hashes, the same in every process."""
    random = Random(0)
    return [BlockHash(random.randbytes(HASH_BYTES)) for _ in range(shape.blocks)]


def make_blocks(shape: KvShape) -> list[InFlightBlock]:
    """Blocks of different contents, with their checksums."""
    random, chain = Random(1), names(shape)
    parents = [NO_PARENT, *chain[:-1]]
    return [_block(name, parent, shape.block, random) for name, parent in zip(chain, parents, strict=True)]


def _block(name: BlockHash, parent: bytes, shape: BlockShape, random: Random) -> InFlightBlock:
    payload = random.randbytes(shape.payload_bytes)
    cells = [payload[at : at + shape.cell_bytes] for at in range(0, len(payload), shape.cell_bytes)]
    return InFlightBlock(
        name, parent, DEFAULT_BLOCK_SIZE, b"".join(CHECKSUM.pack(checksum(cell)) for cell in cells), payload
    )


@contextlib.contextmanager
def arena(shape: KvShape) -> Iterator[OwnedArena]:
    """One with room for all blocks, its memory taken, in shared memory where there is some. Raises BenchError."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=parent) as folder:
        made = OwnedArena.create(Path(folder) / "arena", ArenaId(1), shape.layout, shape.blocks)
        try:
            for slot in range(shape.blocks):
                if not made.take_memory(slot):
                    raise BenchError(
                        f"{folder} has no room for {shape.total_bytes / 2**20:.0f} MiB; ask for fewer --blocks"
                    )
            yield made
        finally:
            made.close()


def fill(made: OwnedArena, blocks: Sequence[InFlightBlock]) -> None:
    """Writes blocks to the arena as a store writes blocks from elsewhere."""
    for slot, block in enumerate(blocks):
        made.reserve(slot, slot + 1, block.hash, block.parent, block.tokens)
        made.fill(slot, block)
        made.commit(slot, slot + 1)
