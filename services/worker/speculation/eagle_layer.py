"""EAGLE's forward pass: features and the tokens behind them become the features foreseen for those tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import KvCaches, Weights
from services.worker.model.mlp import apply_mlp
from services.worker.ops import BatchMeta, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Owned by the drafter."""

    weights: Weights
    """One layer, and the model's own embedding and head; no final norm."""
    has_input_norm: bool
    """The first EAGLE has none."""
    joined: PackedLinear
    """[token's embedding, feature] → what the layer begins with."""


class EaglePass(Protocol):
    """The layer as a whole."""

    def foresee(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """ids [n] int32, each behind one of the features `given` [n, hidden] → (the features foreseen for them
        [n, hidden], the head's logits [R, vocab] of `meta.logits_rows` where wanted, until the next call).
        """


@runtime_checkable
class FusesEagle(Protocol):
    """An `Ops` that has such a pass of its own, faster than its operations one by one."""

    def fuse_eagle(
        self, config: ModelConfig, weights: Weights, joined: PackedLinear, *, has_input_norm: bool
    ) -> EaglePass:
        """The pass of `EagleWeights` that hold these."""


def eagle_pass(config: ModelConfig, weights: EagleWeights, ops: Ops) -> EaglePass:
    """The fastest there is."""
    if isinstance(ops, FusesEagle) and config.mixture is None:
        return ops.fuse_eagle(config, weights.weights, weights.joined, has_input_norm=weights.has_input_norm)
    return _Portable(config, weights, ops)


class _Portable:
    """By single operations, on any device."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops

    def foresee(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        foreseen = self._foreseen(ids, given, meta, caches[0])
        if not wants_logits:
            return foreseen, None
        rows = foreseen if meta.every_row else foreseen.index_select(0, meta.logits_rows)
        return foreseen, head_logits(rows, self._weights.weights, self._config, self._ops)

    def _foreseen(self, ids: Tensor, given: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        ops, layer, eps = self._ops, self._weights.weights.layers[0], self._config.norm_eps
        embedding = self._weights.weights.embedding
        assert embedding is not None, "it is the model's"
        embedded = ops.embed(ids, embedding)
        if self._config.embedding_scale is not None:
            embedded = embedded * self._config.embedding_scale
        residual = ops.linear(torch.cat((embedded, given.to(embedded.dtype)), dim=1), self._weights.joined)
        x = ops.rms_norm(residual, layer.input_norm, eps) if self._weights.has_input_norm else residual
        queries = ops.rope_and_store(
            ops.linear(x, layer.qkv),
            meta,
            layer.cos_sin,
            *cache,
            heads=self._config.num_heads,
            q_norm=None,
            k_norm=None,
            eps=eps,
        )
        mixed = ops.paged_attention(
            queries, *cache, meta, scale=self._config.attention_scale, window=None, softcap=None
        )
        x, residual = ops.add_rms_norm(ops.linear(mixed, layer.output), residual.clone(), layer.mlp_norm, eps)
        return residual + apply_mlp(ops, layer.mlp, x, self._config.activation)


def head_logits(features: Tensor, weights: Weights, config: ModelConfig, ops: Ops) -> Tensor:
    """features [R, hidden] → [R, vocab], capped as the model's are."""
    assert weights.head is not None, "it is the model's"
    logits = ops.linear(features, weights.head)[:, : config.vocab_size]
    cap = config.logits_softcap
    return logits if cap is None else cap * (logits / cap).tanh()
