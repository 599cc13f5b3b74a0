"""KV memory of a simulated rank: the store's whole protocol, blocks without contents, and the time that copies take.

A slot of the arena is thin (one cell, a number for each token), so that a node without a GPU's worth of memory holds as
many blocks as a model's own store would. Leases, generations, checksums and late copies are real. Rank 0 writes the
cell, and all read it: so engines of any tensor-parallel size share blocks, as real ones do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from services.worker.kv.copier import Copied, HostLayerCache, RankKvCache, TransferChunk
from services.worker.sim.shape import ModelShape
from shared.messages.kvstore import KvLayout

if TYPE_CHECKING:
    from services.worker.kv.rank_heads import RankHeads

THIN_DTYPE = "float16"


class SimKvCopier:
    """The `KvCopier` of a simulated rank."""

    def __init__(self, seconds_per_block: float, block_bytes: int) -> None:
        """`seconds_per_block`: what the rank's share of one block takes, in either direction; `block_bytes`: of a whole
        block of the model, all ranks together."""
        self.seconds_per_block = seconds_per_block
        self.block_bytes = block_bytes

    @property
    def runs(self) -> tuple[HostLayerCache, ...]:
        """There is no memory."""
        return ()

    def bind(self, heads: RankHeads) -> BoundSimKvCopier:
        """See `KvCopier.bind`."""
        return BoundSimKvCopier(heads, self.seconds_per_block)


class BoundSimKvCopier:
    """The `BoundCopier` of a simulated rank."""

    def __init__(self, heads: RankHeads, seconds_per_block: float) -> None:
        self._heads = heads
        self._seconds_per_block = seconds_per_block

    def save(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.save`."""
        slots = chunk.slots.tolist()
        self._heads.touch(slots)
        return self._heads.save(slots, chunk.generations.tolist(), self._copying(chunk))

    def load(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.load`."""
        return self._heads.load(chunk.slots.tolist(), chunk.generations.tolist(), self._copying(chunk))

    def close(self) -> None:
        """Lets go of the arena."""
        self._heads.close()

    def _copying(self, chunk: TransferChunk) -> Callable[[int], None]:
        """What takes the chunk's time, all of it at its last block: one by one they are too short to sleep for."""
        ends = time.perf_counter() + len(chunk.blocks) * self._seconds_per_block

        def copy(number: int) -> None:
            if number + 1 == len(chunk.blocks):
                time.sleep(max(0.0, ends - time.perf_counter()))

        return copy


def simulated_kv(
    shape: ModelShape,
    *,
    num_blocks: int,
    block_size: int,
    rank: int,
    world_size: int,
    bandwidth: float,
    time_scale: float,
) -> RankKvCache:
    """The KV memory of one of `world_size` ranks, which copies its heads' share of a block at `bandwidth` bytes per
    second to and from the store. Ranks beyond the number of KV heads hold those of others, too."""
    heads = max(1, shape.kv_heads // world_size)
    block_bytes = shape.kv_bytes_per_token * block_size
    seconds = time_scale * block_bytes * heads / shape.kv_heads / bandwidth
    return RankKvCache(
        layout=KvLayout(
            model=blake2b(b"simulated" + msgspec.msgpack.encode(shape), digest_size=16).hexdigest(),
            dtype=THIN_DTYPE,
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_size=block_size,
        ),
        first_head=0,
        num_heads=1,
        writes=rank == 0,
        num_blocks=num_blocks,
        copier=SimKvCopier(seconds, block_bytes),
        first_layer=0,
        num_layers=1,
    )
