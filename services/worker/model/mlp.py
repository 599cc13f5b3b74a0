"""What stands behind attention in a layer: one MLP, or a mixture of experts. Knows tensors and `Ops`, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from torch import Tensor

from services.worker.ops import Activation, Ops, PackedExperts, PackedLinear


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One rank's columns of an MLP."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row goes through beside those that are chosen for it (Qwen2-MoE)."""

    mlp: DenseMlp
    gate: PackedLinear
    """[1, hidden]: the sigmoid of its product is how much of the MLP's output is taken."""


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """One rank's columns of every expert, and the whole router: every rank chooses the same experts."""

    router: PackedLinear
    experts: PackedExperts
    chosen: int
    renormalised: bool
    shared: SharedExpert | None


Mlp = DenseMlp | MixtureMlp


def apply_mlp(ops: Ops, mlp: Mlp, x: Tensor, activation: Activation) -> Tensor:
    """x [n, hidden] → [n, hidden], to be summed over the ranks."""
    match mlp:
        case DenseMlp():
            return ops.linear(ops.gated_act(ops.linear(x, mlp.gate_up), activation), mlp.down)
        case MixtureMlp():
            return _mixed(ops, mlp, x, activation)
        case _:
            assert_never(mlp)


def _mixed(ops: Ops, mixture: MixtureMlp, x: Tensor, activation: Activation) -> Tensor:
    logits = ops.linear(x, mixture.router)
    mixed = ops.mixture(
        x, logits, mixture.experts, chosen=mixture.chosen, renormalised=mixture.renormalised, kind=activation
    )
    if mixture.shared is None:
        return mixed
    share = ops.linear(x, mixture.shared.gate).sigmoid()
    return mixed.add_(apply_mlp(ops, mixture.shared.mlp, x, activation).mul_(share))
