"""Multi-head latent attention of one rank's heads: what is multiplied before and behind the cached latents.

A head's key is keys_up · latent, beside the rotated key of all heads; its value is values_up · latent. Neither is made:
q · (keys_up · latent) is (keys_upᵀ · q) · latent, so queries are multiplied with the matrix instead, and so is what
attention makes of latents as values (DeepSeek-V2, arXiv:2405.04434, section 2.1.2: "absorbed"). Attention then has one
head of keys that all queries read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.hf_layers.latent import IndexConfig, LatentConfig
from services.worker.models.latent.pools import ChosenPools, PoolStep, pooled_attention
from services.worker.models.sharding import PipelineStage
from services.worker.models.weights import IndexWeights, LatentWeights, LayerWeights
from services.worker.ops.interface import AttentionName, BatchMeta, CacheDtype, LatentCache, Ops
from services.worker.ops.torch_latent import IndexStep, sunk_attention


def check_latent(latent: LatentConfig, cache: CacheDtype, attention: AttentionName, stage: PipelineStage) -> None:
    """Raises ModelError for settings that latent attention does not know."""
    if cache != "auto":
        raise ModelError(f"kv_cache_dtype {cache}: latents are kept in the model's dtype")
    if attention == "flash-attn":
        raise ModelError("attention flash-attn: it knows no latents, which have kernels of their own; choose auto")
    if latent.index is not None and stage.first_layer in latent.index.shared:
        raise ModelError(
            f"pp-layers: a stage begins with layer {stage.first_layer}, which attends to what the layer before it chose"
        )
    for layer, source in enumerate(latent.sources[: stage.end_layer]):
        if source < stage.first_layer <= layer:
            raise ModelError(
                f"pp-layers: a stage begins with layer {stage.first_layer}, and layer {layer} of it attends to the "
                f"latents of layer {source}"
            )


class _Choice(NamedTuple):
    """What the last indexer chose for the rows of a step; None: they attend to all."""

    meta: BatchMeta
    slots: Tensor | ChosenPools | None


class LatentAttention:
    """Knows no weights and no cache: they are given with each call. Of DeepSeek sparse attention it keeps what was
    chosen in a layer until it attends, there and in the layers behind that share it."""

    def __init__(self, latent: LatentConfig, ops: Ops, heads: int, scale: float) -> None:
        """`heads`: of this rank. `scale`: of the scores."""
        self._latent = latent
        self._ops = ops
        self._heads = heads
        self._scale = scale
        self._choice: _Choice | None = None
        self._lent: dict[bool, tuple[Tensor, Tensor]] = {}
        """The cache of the last layer that has latents for others behind it: of those that are rotated, and of those
        that are not."""

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [n, hidden] → queries [n, H, nope + rope], the last of which are rotated; the cache has the rows' latents
        and rotated keys then. Where there are gates, each head's lie behind its query."""
        ops, latent, weights = self._ops, self._latent, _weights(layer)
        made = ops.linear(x, layer.qkv)
        wide = latent.q_rank or self._heads * latent.query_dim
        queries, cached = torch.split(made, [wide, made.shape[1] - wide], dim=1)
        if cached.shape[1] < latent.cached_dim:  # nothing is rotated, or nothing is its own
            cached = F.pad(cached, (0, latent.cached_dim - cached.shape[1]))
        if weights.latents == "lent":
            self._lent[weights.rotated] = cache
        normed, counts = queries, None
        if weights.q_norm is not None and weights.q_up is not None:
            normed = ops.rms_norm(queries.contiguous(), weights.q_norm, latent.norm_eps)
            queries = ops.linear(normed, weights.q_up)
        if latent.index is not None:
            cached, counts = self._with_index_key(latent.index, weights.index, x, cached)
        rotated = ops.latents.rope_and_store(
            queries.reshape(len(x), self._heads, latent.query_dim),
            cached.contiguous(),
            meta,
            layer.cos_sin,
            LatentCache.of(cache, latent.rope_dim),
            norm=weights.kv_norm,
            eps=latent.norm_eps,
        )
        if latent.index is not None and weights.index is not None and counts is not None:
            read = x if latent.index.reads_rows else normed
            self._choice = self._choose(latent.index, weights.index, read, counts, meta, layer.cos_sin, cache)
        if weights.by_position is not None:
            rotated = rotated * weights.by_position.of(meta.positions).to(rotated.dtype)
        if layer.gate is None:
            return rotated
        gates = ops.linear(x, layer.gate).view(len(x), self._heads, latent.gates_of_head)
        return torch.cat((rotated, gates.to(rotated.dtype)), dim=2)

    def _with_index_key(
        self, index: IndexConfig, weights: IndexWeights | None, x: Tensor, cached: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`cached` with the indexer's keys of rows x behind it, and how much its heads count. Keys of layers that have
        no indexer are zeros."""
        if weights is None:
            return torch.cat((cached, cached.new_zeros(len(x), index.cached_dim)), dim=1), None
        sizes = [index.dim, index.cached_dim - index.dim, index.heads]
        keys, shares, counts = torch.split(self._ops.linear(x, weights.inputs).float(), sizes, dim=1)
        keys = F.layer_norm(keys, (index.dim,), *weights.key_norm, eps=index.norm_eps)
        return torch.cat((cached, keys.to(cached.dtype), shares.to(cached.dtype)), dim=1), counts

    def _choose(
        self,
        index: IndexConfig,
        weights: IndexWeights,
        read: Tensor,
        counts: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> _Choice:
        """`read`: what queries are made of. Nothing is scored while no sequence is longer than what is chosen."""
        if meta.max_context <= index.chosen:
            return _Choice(meta, None)
        if weights.row_norm is not None:
            read = F.layer_norm(read.float(), read.shape[1:], *weights.row_norm, eps=index.norm_eps).to(read.dtype)
        q = self._ops.linear(read, weights.q_up).view(len(read), index.heads, index.dim)
        if weights.by_position is not None:
            q = q * weights.by_position.of(meta.positions).to(q.dtype)
        keys = LatentCache.of(cache, self._latent.rope_dim)
        if weights.pool_bias is not None:
            step = PoolStep(IndexStep(q, counts, keys, meta), weights.pool_bias, index.chosen // index.pool)
            return _Choice(meta, step.choose())
        return _Choice(meta, self._ops.latents.choose(q, counts, meta, cos_sin, keys, index.chosen))

    def attend(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """What `queries` makes → what the heads' values add up to, [n, H * value_dim]."""
        ops, weights = self._ops.latents, _weights(layer)
        nope, rotated, gates = torch.tensor_split(queries, [self._latent.nope_dim, self._latent.query_dim], dim=2)
        if not weights.rotated:  # the shared key, of zeros, makes nothing of the other elements
            nope = queries[:, :, : self._latent.query_dim]
        absorbed = ops.linear_of_heads(nope.contiguous(), weights.keys_up)
        chosen = None
        if self._latent.index is not None:
            assert self._choice is not None, "the first layer of a stage has an indexer"
            assert self._choice.meta is meta, "an indexer chose for this step"
            chosen = self._choice.slots
        q = torch.cat((absorbed, rotated.to(absorbed.dtype)), dim=2)
        read = self._lent[weights.rotated] if weights.latents == "borrowed" else cache
        latents = LatentCache.of(read, self._latent.rope_dim)
        if layer.sinks is not None:  # which no kernel of latents knows
            assert not isinstance(chosen, ChosenPools), "no model has both"
            mixed = sunk_attention(q, latents, meta, self._scale, layer.sinks, chosen).to(q.dtype)
        elif isinstance(chosen, ChosenPools):
            mixed = pooled_attention(q, latents, meta, self._scale, chosen).to(q.dtype)
        else:
            mixed = ops.attention(q, latents, meta, scale=self._scale, chosen=chosen)
        values = ops.linear_of_heads(mixed, weights.values_up)
        if layer.gate is not None:
            values = self._ops.sigmoid_gated(values.flatten(0, 1), gates.flatten(0, 1).contiguous()).view(values.shape)
        return values.flatten(1)


def _weights(layer: LayerWeights) -> LatentWeights:
    assert layer.latent is not None, "a model with latent attention has it in every layer"
    return layer.latent
