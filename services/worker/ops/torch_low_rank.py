"""Low-rank products of adapters in portable PyTorch, one adapter after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops.low_rank import AdapterRows, LowRankPart, LowRankShape


class _Columns(NamedTuple):
    first: int
    end: int


class StackedLowRank:
    """See :class:`services.worker.ops.low_rank.LowRankProducts`. Memory for every slot is taken at once; on a CPU the
    system gives it as it is first written to, and an adapter of a low rank writes to the start of its slot only."""

    def __init__(self, shape: LowRankShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        parts, outputs = len(shape.outputs), sum(shape.outputs)
        self.a = torch.empty(shape.slots, parts, shape.max_rank, shape.inputs, dtype=dtype, device=device)
        self.b = torch.empty(shape.slots, shape.max_rank, outputs, dtype=dtype, device=device)
        """[slots, ranks, outputs]: transposed, so that what an adapter has lies together."""
        self.ranks = [[0] * parts for _ in range(shape.slots)]
        """Of each slot's parts."""
        bounds = [sum(shape.outputs[:number]) for number in range(parts + 1)]
        self._columns = [_Columns(first, end) for first, end in pairwise(bounds)]

    def put(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        """Copies, in the order of the device's work."""
        for number, (part, (first, end)) in enumerate(zip(parts, self._columns, strict=True)):
            rank = 0 if part is None else len(part.a)
            self.ranks[slot][number] = rank
            if part is not None:
                self.a[slot, number, :rank].copy_(part.a)
                self.b[slot, :rank, first:end].copy_(part.b.T)

    def clear(self, slot: int) -> None:
        """What lies there is not read."""
        self.ranks[slot] = [0] * len(self.shape.outputs)

    def add(self, product: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Two products for each adapter and part."""
        for slot, first, end in rows.spans:
            chosen = rows.order[first:end]
            picked = x.index_select(0, chosen)
            for number, (column, end_column) in enumerate(self._columns):
                rank = self.ranks[slot][number]
                if rank:
                    high = picked @ self.a[slot, number, :rank].T @ self.b[slot, :rank, column:end_column]
                    product[:, column:end_column].index_add_(0, chosen, high.to(product.dtype))
