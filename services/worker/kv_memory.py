"""Decides how many blocks of KV memory a rank has. Pure: what memory there is has been measured before."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from services.worker.memory import gib
from services.worker.model.config import ModelError
from shared.blocks import BLOCK_SIZE, blocks_for

_DEFAULT_MOST_ON_CPU = 4 << 30
"""Main memory belongs to others too; whoever wants more says so."""
_DEFAULT_SHARE_ON_CPU = 0.25
_MEAN_FILL_ON_CPU = 0.25
"""Of the context: sequences seldom fill it, and a block once written stays resident."""
_MOST_FILLS_ON_GPU = 4
"""A GPU's memory is taken whole, as what sequences leave caches prefixes. But a tiny model's millions of blocks would
only be work for its scheduler: so many times what all sequences can fill is enough."""


class KvDemand(Struct, frozen=True, kw_only=True):
    block_bytes: int
    """Of one block over all layers of this rank."""
    max_num_seqs: int
    max_model_len: int
    explicit_model_len: bool
    """Whether the user asked for that length: then it must fit."""
    given: int | None
    """Bytes that the user gave; None: a sane share of what there is."""
    gpu_share: float = 0.9
    """Of all of a GPU's memory, what this worker may take for everything; no matter where bytes are given."""

    @property
    def sequence_bytes(self) -> int:
        """Of one that fills its context."""
        return blocks_for(self.max_model_len) * self.block_bytes


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """A device's bytes once the weights are loaded and the largest batch was tried."""

    kind: Literal["cpu", "gpu"]
    total: int
    free: int
    held: int
    """By this worker: weights, and what libraries keep to work in."""
    activations: int
    """What a step of the largest batch takes besides, and has given back."""
    graphs: int = 0
    """What captured decodes will take."""

    @property
    def usable(self) -> int:
        """What keys and values could take beside steps."""
        return self.free - self.activations - self.graphs

    @property
    def others(self) -> int:
        """Taken, and not known to be this worker's; on a GPU also what the driver takes for each process."""
        return self.total - self.free - self.held

    def told(self) -> str:
        if self.kind == "cpu":
            return f"a step of the largest batch takes {gib(self.activations)}, {gib(self.free)} are free"
        graphs = f", captured decodes {gib(self.graphs)}" if self.graphs else ""
        return (
            f"weights take {gib(self.held)}, a step of the largest batch {gib(self.activations)}{graphs}, "
            f"others {gib(self.others)} of {gib(self.total)}"
        )


class KvSize(Struct, frozen=True):
    num_blocks: int
    max_model_len: int
    """What was asked for, or what fits where nothing was."""


def size_kv(demand: KvDemand, memory: DeviceMemory) -> KvSize:
    """Blocks that `memory` allows. Raises ModelError for too few."""
    num_blocks = _bytes(demand, memory) // demand.block_bytes
    per_sequence = blocks_for(demand.max_model_len)
    if num_blocks < 1 or (demand.explicit_model_len and num_blocks < per_sequence):
        raise ModelError(
            f"one sequence of {demand.max_model_len} tokens needs {gib(demand.sequence_bytes)} of KV "
            f"memory and there are {gib(num_blocks * demand.block_bytes)}: give more KV memory"
            + (f", or lower the maximum model length to {num_blocks * BLOCK_SIZE}" if num_blocks else "")
        )
    return KvSize(num_blocks, min(demand.max_model_len, num_blocks * BLOCK_SIZE))


def _bytes(demand: KvDemand, memory: DeviceMemory) -> int:
    if demand.given is not None:
        return _given(demand.given, memory)
    return _of_cpu(demand, memory) if memory.kind == "cpu" else _of_gpu(demand, memory)


def _given(given: int, memory: DeviceMemory) -> int:
    if given > memory.usable:
        raise ModelError(
            f"{gib(given)} of KV memory do not fit: {gib(memory.free)} are free, of which a step of the largest "
            f"batch takes {gib(memory.activations + memory.graphs)}"
        )
    return given


def _of_gpu(demand: KvDemand, memory: DeviceMemory) -> int:
    """What is left of this worker's share, as far as others have left it."""
    share = int(memory.total * demand.gpu_share)
    left = min(share - memory.held - memory.activations - memory.graphs, memory.usable)
    if left < demand.block_bytes:
        raise ModelError(
            f"nothing is left for keys and values of the {gib(share)} that gpu_memory_utilization = "
            f"{demand.gpu_share:g} allows: {memory.told()}. Raise gpu_memory_utilization, end what else is on the "
            "GPU, lower max_batch_tokens, or use more ranks"
        )
    return min(left, _MOST_FILLS_ON_GPU * demand.max_num_seqs * demand.sequence_bytes)


def _of_cpu(demand: KvDemand, memory: DeviceMemory) -> int:
    needed = demand.max_num_seqs * demand.sequence_bytes
    expected = max(demand.sequence_bytes, int(needed * _MEAN_FILL_ON_CPU))
    return max(0, min(expected, int(memory.usable * _DEFAULT_SHARE_ON_CPU), _DEFAULT_MOST_ON_CPU))
