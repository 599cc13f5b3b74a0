"""What kernels and steps are measured with: a kernel's calls, each on memory of its own, and batches as a scheduler
would give them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.measure.roofline.wire import KernelWork, StepCase
from services.worker.models.config import ModelConfig
from services.worker.ops.interface import BatchMeta, Ops
from services.worker.ops.torch_ops import TorchOps
from shared.blocks import DEFAULT_BLOCK_SIZE, blocks_for

Call = Callable[[], object]

_COLD_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""Memory that calls go through before they come back to the first: more than caches hold."""
_MAX_COPIES = 256


class NoKernel(Exception):
    """There is no kernel of a family to measure; the text says why."""


class KernelCase(NamedTuple):
    """One measurement of a kernel: calls of ours, and of what it is compared with."""

    name: str
    work: KernelWork
    """Bytes and operations of one call."""
    ours: list[Call]
    """Equal calls on different memory, to be run one after the other: in a model, too, nothing is in the caches."""
    rival: list[Call]
    """Calls of torch's own operation; empty if torch has none, or if ours is torch's."""
    rival_name: str = "torch"
    rival_waits: bool = False
    """Whether torch's operation asks the device something on its way, so that no graph can have it."""


Cases = Iterator[KernelCase]


class KernelContext(NamedTuple):
    """What kernels are measured for."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    ours: Ops
    torch_ops: TorchOps
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    room: int
    """Bytes that a case may take."""

    @property
    def implementations(self) -> tuple[Ops, ...]:
        """Our operations, and torch's where ours are others."""
        return (self.ours,) if type(self.ours) is TorchOps else (self.ours, self.torch_ops)

    def copies(self, size: float) -> int:
        """How many copies of memory calls that move `size` bytes go through."""
        wanted = math.ceil(_COLD_BYTES[self.device.type] / max(size, 1.0))
        return max(1, min(wanted, _MAX_COPIES, int(self.room / 4 / max(size, 1.0))))

    def noise(self, *shape: int) -> Tensor:
        """A tensor of `shape`, normally distributed, in the dtype that is measured, on the device."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def products(self, ops: Ops, rows: int, width: int) -> Tensor:
        """[rows, width] as `ops` gives it out of a product."""
        return ops.linear(self.noise(rows, 16), ops.pack_linear(self.noise(width, 16), None))

    def calls(self, size: float, made: Callable[[Ops], Call]) -> tuple[list[Call], list[Call]]:
        """Calls of ours and of torch's: `made` gives one on memory of its own."""
        first, *others = [[made(ops) for _ in range(self.copies(size))] for ops in self.implementations]
        return first, others[0] if others else []


# Batches: nothing is shared between sequences, and blocks lie anywhere.


def blocks_needed(case: StepCase, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """KV blocks that the step's sequences take together."""
    return case.batch * blocks_for(case.context, block_size)


def rows_of(case: StepCase) -> int:
    """Tokens that the step computes."""
    return case.batch if case.kind == "decode" else case.batch * case.context


def batch_of(
    case: StepCase, num_blocks: int, vocab_size: int, device: torch.device, block_size: int = DEFAULT_BLOCK_SIZE
) -> tuple[Tensor, BatchMeta]:
    """The token ids and the rest of a step; its blocks are spread over all of `num_blocks`."""
    random = torch.Generator().manual_seed(1)
    width = blocks_for(case.context, block_size)
    tables = torch.randperm(num_blocks, generator=random)[: case.batch * width].to(torch.int32).view(case.batch, width)
    ids = torch.randint(vocab_size, (rows_of(case),), generator=random, dtype=torch.int32)
    meta = (_decodes if case.kind == "decode" else _prefills)(case, tables, block_size)
    return ids.to(device), _on(meta, device)


def _decodes(case: StepCase, tables: Tensor, block_size: int) -> BatchMeta:
    last = case.context - 1
    return BatchMeta(
        query_starts=_counting(case.batch + 1),
        context_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        block_tables=tables,
        slots=tables[:, last // block_size] * block_size + last % block_size,
        positions=torch.full((case.batch,), last, dtype=torch.int32),
        logits_rows=_counting(case.batch),
        num_decodes=case.batch,
        prefills=(),
        max_query=1,
        max_context=case.context,
        block_size=block_size,
        every_row=True,
    )


def _prefills(case: StepCase, tables: Tensor, block_size: int) -> BatchMeta:
    positions = _counting(case.context)
    slots = tables[:, positions // block_size] * block_size + positions % block_size
    starts = _counting(case.batch + 1) * case.context
    return BatchMeta(
        query_starts=starts,
        context_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        block_tables=tables,
        slots=slots.reshape(-1),
        positions=positions.repeat(case.batch),
        logits_rows=starts[1:] - 1,
        num_decodes=0,
        prefills=((case.context, case.context),) * case.batch,
        max_query=case.context,
        max_context=case.context,
        block_size=block_size,
    )


def _counting(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def _on(meta: BatchMeta, device: torch.device) -> BatchMeta:
    moved = {
        name: getattr(meta, name).contiguous().to(device)
        for name in ("query_starts", "context_lens", "block_tables", "slots", "positions", "logits_rows")
    }
    counts = {
        name: getattr(meta, name)
        for name in ("num_decodes", "prefills", "max_query", "max_context", "block_size", "every_row")
    }
    return BatchMeta(**moved, **counts)
