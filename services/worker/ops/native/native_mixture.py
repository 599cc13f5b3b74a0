"""Mixtures of experts as the library reads them: how their routers choose, and their matrices."""

from __future__ import annotations

from typing import NamedTuple

from services.worker.ops.interface import Activation, PackedExperts, Routing
from services.worker.ops.native import library
from services.worker.ops.native.kernels import ACTIVATIONS, address_of
from services.worker.ops.native.matrix_stacks import MatrixStack


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
