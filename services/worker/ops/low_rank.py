"""What adapters (LoRA) add to a product: the low-rank products beside one matrix, as `Ops` offers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
