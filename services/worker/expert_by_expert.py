"""Mixtures of experts by the operations of an MLP, one expert after the other: PyTorch's.

Reads the weights of those experts alone that were chosen. They come in ascending order, so that a row's sum is the same
in every batch where the operations' results are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops import Activation, Ops, PackedExperts, PackedLinear


class ExpertLinears(NamedTuple):
    """The experts as `pack` makes them of two stacks."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]


class Visit(NamedTuple):
    """One expert's rows."""

    expert: int
    rows: Tensor
    """[m] ascending"""
    chances: Tensor
    """[m, 1] float32"""


def pack(ops: Ops, gate_up: Tensor, down: Tensor) -> PackedExperts:
    """See `Ops.pack_experts`."""
    packed = (tuple(ops.pack_linear(weight, None) for weight in stack) for stack in (gate_up, down))
    return PackedExperts(ExpertLinears(*packed))


def mix(
    ops: Ops, x: Tensor, logits: Tensor, experts: PackedExperts, *, chosen: int, renormalised: bool, kind: Activation
) -> Tensor:
    """See `Ops.mixture`; float32."""
    assert isinstance(experts, ExpertLinears)
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for visit in visits(*route(logits, chosen, renormalised), len(experts.down)):
        gate_up = ops.linear(x.index_select(0, visit.rows), experts.gate_up[visit.expert])
        down = ops.linear(ops.gated_act(gate_up, kind), experts.down[visit.expert])
        mixed.index_add_(0, visit.rows, down.float() * visit.chances)
    return mixed


def route(logits: Tensor, chosen: int, renormalised: bool) -> tuple[Tensor, Tensor]:
    """logits [n, E] → chances (float32) and numbers of the `chosen` experts of each row, both [n, chosen]."""
    chances, experts = logits.float().softmax(dim=-1).topk(chosen, dim=-1)
    return chances / chances.sum(dim=-1, keepdim=True) if renormalised else chances, experts


def visits(chances: Tensor, experts: Tensor, count: int) -> Iterator[Visit]:
    """Those of `count` experts that have rows, in ascending order. Waits for the device."""
    chosen = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    rows, sorted_chances = order // chosen, chances.flatten()[order].unsqueeze(1)
    first = 0
    for expert, size in enumerate(torch.bincount(experts.flatten(), minlength=count).tolist()):
        if size:
            part = slice(first, first + size)
            yield Visit(expert, rows[part], sorted_chances[part])
            first += size
