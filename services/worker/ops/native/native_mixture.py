"""Mixtures of experts as the library reads them: how their routers choose, and their matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import Activation, PackedExperts, Picks, Routing
from services.worker.ops.native import library
from services.worker.ops.native.kernels import ACTIVATIONS, address_of
from services.worker.ops.native.matrix_stacks import MatrixStack, multiply_each

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps


class NativeExperts(NamedTuple):
    """A mixture's experts as the library reads them."""

    gate_up: MatrixStack
    down: MatrixStack


def rule_of(routing: Routing, experts: int) -> library.RouterRule:
    """How one of so many `experts` is chosen; points to the routing's bias."""
    return library.RouterRule(
        *(experts, routing.chosen, routing.scoring == "sigmoid", routing.renormalised, address_of(routing.bias)),
        *(routing.scale, routing.groups, routing.chosen_groups),
    )


def matrices_of(experts: PackedExperts, kind: Activation) -> library.NativeMixture:
    """The matrices of what `NativeOps.pack_experts` gave; points to them."""
    assert isinstance(experts, NativeExperts)
    return library.NativeMixture(
        *(experts.gate_up.linears, experts.down.linears, len(experts.down.packed), ACTIVATIONS[kind])
    )


def mix_ungated(ops: NativeOps, x: Tensor, picks: Picks, experts: NativeExperts) -> Tensor:
    """See `Ops.mixture`, of experts without gates ("relu2"): two jobs of the threads. float32; a row's sum goes over
    its experts by their numbers."""
    chosen, numbers = picks.experts.shape[1], picks.experts.long().flatten()
    order = numbers.argsort(stable=True)
    order = order[int((numbers < 0).sum()) :]  # other ranks' come first
    rows, ordered = order // chosen, numbers[order]
    starts = torch.zeros(len(experts.down.packed) + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(ordered, minlength=len(experts.down.packed)).cumsum(0)
    ups = multiply_each(ops, x.index_select(0, rows), experts.gate_up, starts)
    downs = multiply_each(ops, ops.gated_act(ups, "relu2"), experts.down, starts)
    mixed = torch.zeros(len(x), experts.down.out)
    return mixed.index_add_(0, rows, downs.mul_(picks.chances.float().flatten()[order].unsqueeze(1)))
