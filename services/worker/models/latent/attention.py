"""Multi-head latent attention of one rank's heads: what is multiplied before and behind the cached latents.

A head's key is keys_up · latent, beside the rotated key of all heads; its value is values_up · latent. Neither is made:
q · (keys_up · latent) is (keys_upᵀ · q) · latent, so queries are multiplied with the matrix instead, and so is what
attention makes of latents as values (DeepSeek-V2, arXiv:2405.04434, section 2.1.2: "absorbed"). Attention then has one
head of keys that all queries read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.hf_layers.latent import LatentConfig
from services.worker.models.weights import LatentWeights, LayerWeights
from services.worker.ops.interface import AttentionName, BatchMeta, CacheDtype, LatentCache, Ops


def check_latent(latent: LatentConfig | None, cache: CacheDtype, attention: AttentionName) -> None:
    """Raises ModelError for settings that latent attention does not know, of a model that has it."""
    if latent is None:
        return
    if cache != "auto":
        raise ModelError(f"kv_cache_dtype {cache}: latents are kept in the model's dtype")
    if attention == "flash-attn":
        raise ModelError("attention flash-attn: it knows no latents, which have kernels of their own; choose auto")


class LatentAttention:
    """Knows no weights and no cache: they are given with each call."""

    def __init__(self, latent: LatentConfig, ops: Ops, heads: int, scale: float) -> None:
        """`heads`: of this rank. `scale`: of the scores."""
        self._latent = latent
        self._ops = ops
        self._heads = heads
        self._scale = scale

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [n, hidden] → queries [n, H, nope + rope], the last of which are rotated; the cache has the rows' latents
        and rotated keys then."""
        ops, latent, weights = self._ops, self._latent, _weights(layer)
        made = ops.linear(x, layer.qkv)
        queries, cached = torch.split(made, [made.shape[1] - latent.cached_dim, latent.cached_dim], dim=1)
        if weights.q_norm is not None and weights.q_up is not None:
            queries = ops.linear(ops.rms_norm(queries.contiguous(), weights.q_norm, latent.norm_eps), weights.q_up)
        return ops.latents.rope_and_store(
            queries.reshape(len(x), self._heads, latent.query_dim),
            cached.contiguous(),
            meta,
            layer.cos_sin,
            LatentCache(*cache),
            norm=weights.kv_norm,
            eps=latent.norm_eps,
        )

    def attend(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """What `queries` makes → what the heads' values add up to, [n, H * value_dim]."""
        ops, weights = self._ops.latents, _weights(layer)
        nope, rotated = torch.split(queries, [self._latent.nope_dim, self._latent.rope_dim], dim=2)
        absorbed = ops.linear_of_heads(nope.contiguous(), weights.keys_up)
        mixed = ops.attention(
            torch.cat((absorbed, rotated.to(absorbed.dtype)), dim=2), LatentCache(*cache), meta, scale=self._scale
        )
        return ops.linear_of_heads(mixed, weights.values_up).flatten(1)


def _weights(layer: LayerWeights) -> LatentWeights:
    assert layer.latent is not None, "a model with latent attention has it in every layer"
    return layer.latent
