"""Mixtures of experts on the C++ kernels: rows sorted by expert, and one job of the threads for each of two matrices.

A job for each expert would have the threads meet three times for each of them, where one row takes microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from services.worker.expert_by_expert import route
from services.worker.native import library
from services.worker.native.kernels import ACTIVATIONS, Packed
from services.worker.ops import Activation

if TYPE_CHECKING:
    from services.worker.native.native_ops import NativeOps

_GATED_OUTPUTS = 128
"""`can_gate` of linear.h: gates are activated on their way out where gates and ups are multiples of half of that."""

_MOST_ROWS = 512
"""Rows whose experts' inputs and outputs are in memory at a time."""


class _Stack(NamedTuple):
    """One matrix of every expert."""

    linears: ctypes.Array[library.Linear]
    packed: tuple[Packed, ...]

    @property
    def out(self) -> int:
        return self.packed[0].out


class NativeExperts(NamedTuple):
    gate_up: _Stack
    down: _Stack


def pack_experts(ops: NativeOps, gate_up: Tensor, down: Tensor) -> NativeExperts:
    return NativeExperts(_packed(ops, gate_up), _packed(ops, down))


def _packed(ops: NativeOps, stack: Tensor) -> _Stack:
    packed = tuple(ops.pack_matrix(weight, None) for weight in stack)
    return _Stack((library.Linear * len(packed))(*(each.linear for each in packed)), packed)


def mix(
    ops: NativeOps,
    x: Tensor,
    logits: Tensor,
    experts: NativeExperts,
    *,
    chosen: int,
    renormalised: bool,
    kind: Activation,
) -> Tensor:
    """See `Ops.mixture`. A row's sum goes over its experts by their numbers, whatever the other rows are."""
    mixed = torch.zeros(x.shape)
    for part in _parts(len(x)):
        chances, numbers = route(logits[part], chosen, renormalised)
        order = numbers.flatten().argsort(stable=True)
        starts = torch.zeros(len(experts.down.packed) + 1, dtype=torch.int64)
        starts[1:] = torch.bincount(numbers.flatten(), minlength=len(starts) - 1).cumsum(0)
        rows = order // chosen
        gated = _gated(ops, x[part].index_select(0, rows), experts.gate_up, starts, kind)
        down = _multiplied(ops, gated, experts.down, starts, None)
        mixed[part].index_add_(0, rows, down.mul_(chances.flatten()[order].unsqueeze(1)))
    return mixed


def _parts(rows: int) -> Iterator[slice]:
    for first in range(0, rows, _MOST_ROWS):
        yield slice(first, first + _MOST_ROWS)


def _gated(ops: NativeOps, x: Tensor, stack: _Stack, starts: Tensor, kind: Activation) -> Tensor:
    if stack.out % _GATED_OUTPUTS:
        return ops.gated_act(_multiplied(ops, x, stack, starts, None), kind)
    return _multiplied(ops, x, stack, starts, kind)


def _multiplied(ops: NativeOps, x: Tensor, stack: _Stack, starts: Tensor, kind: Activation | None) -> Tensor:
    """Rows starts[e] to starts[e + 1] of x times expert e's matrix; `kind`: gated by it on the way out."""
    x, number = ops.known(x)
    to = torch.empty(len(x), stack.out) if kind is None else torch.empty(len(x), stack.out // 2, dtype=ops.dtype)
    ops.kernels.library.baton_multiply_each(
        ops.kernels.pool,
        *(stack.linears, starts.data_ptr(), len(stack.packed), x.data_ptr(), number, *x.shape),
        *((library.OUT_FLOAT, 0) if kind is None else (library.OUT_GATED, ACTIVATIONS[kind])),
        *(to.data_ptr(), to.shape[1]),
    )
    return to
