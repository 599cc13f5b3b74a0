"""A rank's weights, layer by layer, and what an MLP or a mixture of experts makes of rows. Knows tensors, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

from torch import Tensor

from services.worker.ops.interface import Activation, BatchMeta, Ops, PackedExperts, PackedLinear


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


KvCaches = list[tuple[Tensor, Tensor]]
"""For each layer, its keys and its values."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One rank's weights of one layer. Norm weights are float32."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp
    mlp_post_norm: Tensor | None
    cos_sin: Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One rank's weights of its stage's layers. Embedding and head are shares of words, padded alike on all ranks."""

    embedding: Tensor | None
    """On the first stage."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor | None
    """The last norm; None on every stage but the last."""
    head: PackedLinear | None
    first_layer: int = 0
    """Which of the model's layers the first of `layers` is."""


class ForwardPass(Protocol):
    """What runs a whole decoder: `Decoder.forward`, or decodes that are replayed from graphs."""

    def __call__(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """What `Decoder.forward` promises."""


def apply_mlp(ops: Ops, mlp: Mlp, x: Tensor, activation: Activation) -> Tensor:
    """x [n, hidden] → [n, hidden], to be summed over the ranks."""
    match mlp:
        case DenseMlp():
            return ops.linear(ops.gated_act(ops.linear(x, mlp.gate_up), activation), mlp.down)
        case MixtureMlp():
            return _apply_mixture(ops, mlp, x, activation)
        case _:
            assert_never(mlp)


def _apply_mixture(ops: Ops, mixture: MixtureMlp, x: Tensor, activation: Activation) -> Tensor:
    logits = ops.linear(x, mixture.router)
    mixed = ops.mixture(
        x, logits, mixture.experts, chosen=mixture.chosen, renormalised=mixture.renormalised, kind=activation
    )
    if mixture.shared is None:
        return mixed
    share = ops.linear(x, mixture.shared.gate).sigmoid()
    return mixed.add_(apply_mlp(ops, mixture.shared.mlp, x, activation).mul_(share))
