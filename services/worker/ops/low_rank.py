"""What adapters (LoRA) add to a product: the low-rank products beside one matrix, as `Ops` offers them; and in portable
PyTorch, one adapter after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LowRankShape(NamedTuple):
    """What the low-rank products of one matrix are sized by."""

    slots: int
    """Adapters that lie on the device."""
    max_rank: int
    inputs: int
    outputs: tuple[int, ...]
    """Of each of its parts: projections that are one matrix, one below the other."""


class LowRankPart(NamedTuple):
    """What an adapter adds to one part of a matrix: x → b @ (a @ x)."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank], with the adapter's scale."""


class AdapterSpan(NamedTuple):
    """Which rows have the adapter of a slot: `AdapterRows.order` from `first` to `end`."""

    slot: int
    first: int
    end: int


class AdapterRows(NamedTuple):
    """Whose adapter each of a tensor's n rows has."""

    slots: Tensor
    """int32 [n] on the device; -1: none."""
    order: Tensor
    """int32 on the device: the rows that have an adapter, by slot."""
    spans: tuple[AdapterSpan, ...]
    """Of each slot that a row has, on the host."""


class LowRankProducts(Protocol):
    """The low-rank products beside one matrix, of the adapters that lie on the device."""

    def put(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        """Copies those of one adapter to `slot`; None: it has none for a part. The latest step may still read what is
        in other slots."""

    def clear(self, slot: int) -> None:
        """Nothing is in `slot`."""

    def add(self, product: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Adds to `product` [n, out] what the rows' adapters make of x [n, in]; both as `linear` takes and gives
        them."""


class _Columns(NamedTuple):
    first: int
    end: int


class StackedLowRank:
    """See `LowRankProducts`. Memory for every slot is taken at once; on a CPU the system gives it as it is first
    written to, and an adapter of a low rank writes to the start of its slot only."""

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
