"""Finds out what memory there is for keys and values: tries the largest batch, and captures the largest decodes."""

from __future__ import annotations

from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace

from services.worker.executor.runner_parts import RunnerParts
from services.worker.executor.warm_up import warm_up
from services.worker.graphs.capture import CudaCapture, MeasuredCapture
from services.worker.graphs.choice import DecodeGraphs, RankGraphs
from services.worker.kv.kept_peaks import kept_peak
from services.worker.models.config import ModelError
from services.worker.platforms.interface import MemoryReading, Platform
from services.worker.platforms.main_memory import gib
from shared.blocks import blocks_for
from shared.kv_groups import KvCacheGroup, longest_sequence, most_blocks

_BLOCKS_WHILE_CAPTURING = 2
"""Graphs of padding touch none."""


def profile(parts: RunnerParts, *, max_batch_tokens: int, graphs: RankGraphs, model: str | None = None) -> DeviceMemory:
    """Once weights are loaded. `model`: what names the loaded model with all its settings; with it the figure of a
    former start is taken where the rank is alone on a CPU. Raises ModelError where the largest batch does not fit."""
    platform = parts.platform
    rows = min(max_batch_tokens, platform.profiled_rows or max_batch_tokens)
    beside = sum(group.step_rows for group in parts.groups)
    try:
        step = _tried(parts, rows, 1, model)
        # By itself: rows beside prompts are as many, however many tokens a step has.
        read = _tried(parts, rows, beside, model) if beside else 0
        captured = sum(_of_graphs(each) for each in graphs if each is not None)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"a step of {max_batch_tokens} tokens and {parts.max_num_seqs} sequences does not fit beside the weights: "
            "lower max_batch_tokens or max_num_seqs, or use more ranks"
        ) from None
    reading = _all_free(platform)
    return DeviceMemory(
        kind="own" if platform.owns_memory else "shared",
        total=reading.total,
        free=reading.free,
        held=reading.own,
        activations=step * -(-max_batch_tokens // rows) + read + parts.token_bytes + parts.branch_bytes,
        graphs=captured,
    )


def _tried(parts: RunnerParts, rows: int, beside: int, model: str | None) -> int:
    if model is None or not _may_be_kept(parts):
        return _of_step(parts, rows, beside)
    drafts = type(parts.drafter).__name__, parts.drafting
    depends_on = model, parts.decoder.ops_name, rows, beside, parts.max_num_seqs, *drafts
    return kept_peak(depends_on, lambda: _of_step(parts, rows, beside))


def _of_step(parts: RunnerParts, rows: int, beside: int) -> int:
    """Bytes that a step of so many rows, and so many `beside` prompts where a model attends to any, takes beside
    weights and KV memory."""
    length = parts.card.max_model_len
    tables, size = max(1, len(parts.groups)), parts.card.block_size
    of_rows = sum(group.most_blocks(0, size, 0) for group in parts.groups if group.encoded is not None)
    probe = parts.runner((blocks_for(min(rows, length), size) + 1) * tables + of_rows, length)
    return parts.platform.peak_bytes(lambda: warm_up(probe, rows=rows, sequences=parts.max_num_seqs, beside=beside))


def _may_be_kept(parts: RunnerParts) -> bool:
    """Ranks try a step together, so all of them must or none."""
    return parts.platform.keeps_profile and parts.communicator.world_size == 1 and parts.pipeline.stages == 1


def _of_graphs(graphs: DecodeGraphs) -> int:
    """Bytes that the graphs of decode steps will take."""
    platform = graphs.platform
    caches = graphs.decoder.allocate_kv(_BLOCKS_WHILE_CAPTURING, sequences=1)
    capture = MeasuredCapture(CudaCapture(platform.device), lambda: _all_free(platform))
    with torch.inference_mode():
        replace(graphs, sizes=graphs.sizes[-2:]).replaying(capture)(graphs.decoder.forward, caches)
    return capture.of_all(len(graphs.sizes))


def _all_free(platform: Platform) -> MemoryReading:
    """Its memory once everything that nobody holds is given back."""
    platform.empty_cache()
    return platform.memory()


# Decides how many blocks of KV memory a rank has. Pure: what memory there is has been measured before.


_DEFAULT_MOST_OF_SHARED = 4 << 30
"""Main memory belongs to others too; whoever wants more says so."""
_DEFAULT_SHARE_OF_SHARED = 0.25
_MEAN_FILL_OF_SHARED = 0.25
"""Share of the context that sequences are assumed to fill on average; a block once written stays resident."""
_MAX_FILLS_OF_OWN = 4
"""A GPU's memory is taken whole, as what sequences leave caches prefixes. But a tiny model's millions of blocks would
only be work for its scheduler: so many times what all sequences can fill is enough."""


_CHECKPOINT_SHARE, _CHECKPOINTS_PER_SEQUENCE = 0.25, 2
"""Checkpoints take so much of the memory that the states of sequences leave, and there are at most so many."""
_MAX_WEIGHTLESS_BLOCKS = 1 << 20
"""Of a model without attention, whose blocks only count tokens: a sequence of a million tokens has 65,536 of 16."""


class KvDemand(Struct, frozen=True, kw_only=True):
    """What keys and values are asked to hold."""

    block_bytes: int
    """Bytes of one block over all layers of this rank."""
    block_size: int
    """Tokens of a block."""
    max_num_seqs: int
    max_model_len: int
    explicit_model_len: bool
    """Whether the user asked for that length: then it must fit."""
    given: int | None
    """Bytes that the user set; None: a default share of the free memory."""
    gpu_share: float = 0.9
    """Share of the whole GPU memory that this worker may take for everything; ignored if bytes are given."""
    groups: tuple[KvCacheGroup, ...] = ()
    """Of layers, each of which has blocks of its own; empty: a block is of all layers."""
    step_tokens: int = 1
    """Most tokens of a step."""
    state_bytes: int = 0
    """Bytes of a sequence's states over all layers of this rank, however long it is."""
    checkpoint_bytes: int = 0
    """Bytes of a copy of these."""

    @property
    def sequence_blocks(self) -> int:
        """Blocks of a sequence that fills its context; with groups also the null block, which all share."""
        if not self.groups:
            return blocks_for(self.max_model_len, self.block_size)
        return 1 + most_blocks(self.groups, self.max_model_len, self.block_size, self.step_tokens)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence that fills its context."""
        return self.sequence_blocks * self.block_bytes

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that so many blocks hold."""
        if not self.groups:
            return num_blocks * self.block_size
        return longest_sequence(self.groups, num_blocks, self.block_size, self.step_tokens)


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """A device's bytes once the weights are loaded and the largest batch was tried."""

    kind: Literal["own", "shared"]
    """Whether it is there for the engine, as a GPU's is, or belongs to others too, as main memory does."""
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

    def summary(self) -> str:
        """The figures, for logs and errors."""
        if self.kind == "shared":
            return f"a step of the largest batch takes {gib(self.activations)}, {gib(self.free)} are free"
        graphs = f", captured decodes {gib(self.graphs)}" if self.graphs else ""
        return (
            f"weights take {gib(self.held)}, a step of the largest batch {gib(self.activations)}{graphs}, "
            f"others {gib(self.others)} of {gib(self.total)}"
        )


class KvSize(Struct, frozen=True):
    """How much KV memory a rank is given."""

    num_blocks: int
    max_model_len: int
    """The configured context length, or the one that fits if none was configured."""
    state_checkpoints: int = 0
    """Copies of a sequence's states, beside those of the sequences themselves."""


def size_kv(demand: KvDemand, memory: DeviceMemory) -> KvSize:
    """Blocks that `memory` allows, once as many sequences as a step may hold have their states. Raises ModelError for
    too few."""
    demand, memory, checkpoints = _behind_states(demand, memory)
    if not demand.block_bytes:
        enough = (demand.max_num_seqs + checkpoints) * demand.sequence_blocks
        num_blocks = max(demand.sequence_blocks, min(enough, _MAX_WEIGHTLESS_BLOCKS))
        return KvSize(num_blocks, demand.max_model_len, checkpoints)
    room = _bytes(demand, memory)
    num_blocks = room // demand.block_bytes
    longest = demand.longest(num_blocks)
    if longest < 1 or (demand.explicit_model_len and num_blocks < demand.sequence_blocks):
        there = f"there are {gib(room)}" if demand.given is None else f"kv_memory leaves {gib(room)} for it"
        raise ModelError(
            f"one sequence of {demand.max_model_len} tokens needs {gib(demand.sequence_bytes)} of KV memory and "
            f"{there}: give kv_memory of so much or more"
            + (f", or lower the maximum model length to {longest}" if longest else "")
        )
    return KvSize(num_blocks, min(demand.max_model_len, longest), checkpoints)


def _behind_states(demand: KvDemand, memory: DeviceMemory) -> tuple[KvDemand, DeviceMemory, int]:
    """What is left for blocks behind the states of sequences and their checkpoints, and how many there are of these."""
    states = demand.max_num_seqs * demand.state_bytes
    if not states:
        return demand, memory, 0
    room = memory.usable if demand.given is None else demand.given
    if demand.given is None and memory.kind == "own":
        room = min(room, int(memory.total * demand.gpu_share) - memory.held - memory.activations - memory.graphs)
    if states > room:
        raise ModelError(
            f"max_num_seqs {demand.max_num_seqs}: the states of so many sequences take {gib(states)} of KV memory, "
            f"{gib(demand.state_bytes)} each, and there are {gib(max(0, room))}: lower it"
            + (", or give more KV memory" if demand.given is not None else "")
        )
    spare = int((room - states) * _CHECKPOINT_SHARE) // demand.checkpoint_bytes
    checkpoints = min(spare, _CHECKPOINTS_PER_SEQUENCE * demand.max_num_seqs)
    states += checkpoints * demand.checkpoint_bytes
    left = None if demand.given is None else demand.given - states
    behind = replace(memory, free=memory.free - states, held=memory.held + states)
    return replace(demand, given=left), behind, checkpoints


def _bytes(demand: KvDemand, memory: DeviceMemory) -> int:
    if demand.given is not None:
        return _given(demand.given, memory)
    return _of_shared(demand, memory) if memory.kind == "shared" else _of_own(demand, memory)


def _given(given: int, memory: DeviceMemory) -> int:
    if given > memory.usable:
        raise ModelError(
            f"{gib(given)} of KV memory do not fit: {gib(memory.free)} are free, of which a step of the largest "
            f"batch takes {gib(memory.activations + memory.graphs)}"
        )
    return given


def _of_own(demand: KvDemand, memory: DeviceMemory) -> int:
    """Bytes left of this worker's share of the device, as far as other processes have left them."""
    share = int(memory.total * demand.gpu_share)
    left = min(share - memory.held - memory.activations - memory.graphs, memory.usable)
    if left < demand.block_bytes:
        raise ModelError(
            f"nothing is left for keys and values of the {gib(share)} that gpu_memory_utilization = "
            f"{demand.gpu_share:g} allows: {memory.summary()}. Raise gpu_memory_utilization, end what else is on the "
            "device, lower max_batch_tokens, or use more ranks"
        )
    return min(left, _MAX_FILLS_OF_OWN * demand.max_num_seqs * demand.sequence_bytes)


def _of_shared(demand: KvDemand, memory: DeviceMemory) -> int:
    needed = demand.max_num_seqs * demand.sequence_bytes
    expected = max(demand.sequence_bytes, int(needed * _MEAN_FILL_OF_SHARED))
    return max(0, min(expected, int(memory.usable * _DEFAULT_SHARE_OF_SHARED), _DEFAULT_MOST_OF_SHARED))
