"""Reads the `config.json` of HY4 (Hunyuan): a GLM-5 whose residual is several streams, with sinks and gates of
attention. Knows what its tensors are called in published files, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import HyperConnections, ModelConfig, ModelError, limited_activation
from services.worker.models.published.layout import Published, converted
from services.worker.ops.activation import SILU_LIMIT, Activation

_LIKE = "GlmMoeDsaForCausalLM"
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""`transformers` reads the second as the first."""
_PERIOD = 4
"""Where the config does not say: the first layer has an indexer, and then the first of so many."""


class _RawHy4(Struct, kw_only=True):
    """What GLM-5 has otherwise, or not at all; defaults are those of `transformers`."""

    vocab_size: int = 120_832
    hidden_size: int = 2816
    intermediate_size: int = 6912
    moe_intermediate_size: int = 768
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-5
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.827
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 16
    indexer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None
    hc_mult: int = 4
    hc_magnitude: float = 2.0
    hc_eps: float = 1e-6
    swiglu_limit: float = SILU_LIMIT
    learnable_sink_init: float = 0.0


_OWN = ("layer_types", "hc_mult", "hc_magnitude", "hc_eps", "swiglu_limit", "learnable_sink_init")
"""Keys that GLM-5 does not know, or reads otherwise."""


def hy4(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawHy4)
    for kind in own.layer_types or ():
        if kind not in _INDEXED:
            raise ModelError(f"layer_types {kind!r} is not supported; supported: {', '.join(_INDEXED)}")
    if own.hc_mult < 1:
        raise ModelError(f"hc_mult {own.hc_mult} is not positive")
    count = range(max(own.num_hidden_layers, 0))
    indexers = own.indexer_types or ["shared" if each and (each - 1) % _PERIOD else "full" for each in count]
    mlps = own.mlp_layer_types or ["sparse" if each else "dense" for each in count]
    given = {key: value for key, value in (msgspec.to_builtins(own) | dict(raw)).items() if key not in _OWN}
    base = {**given, "indexer_types": indexers, "mlp_layer_types": mlps}
    return Published(
        base, {}, like=_LIKE, revised=partial(_revised, own, limited_activation("silu_limited", own.swiglu_limit))
    )


def _revised(own: _RawHy4, limited: Activation, config: ModelConfig) -> ModelConfig:
    latent, mixture = config.latent, config.mixture
    assert latent is not None, "it is a GLM-5"
    assert latent.index is not None
    index = replace(latent.index, interleaved=False, rotates_last=True, norm_eps=config.norm_eps)
    return replace(
        config,
        latent=replace(latent, interleaved=False, gates="elements", index=index),
        mixture=None if mixture is None else replace(mixture, activation=limited),
        attention_sinks=True,
        connections=HyperConnections(own.hc_mult, 0, own.hc_eps, mixes=False, magnitude=own.hc_magnitude),
    )


def library_name(name: str) -> str:
    """`name`, published or the library's, as the library has it."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name


_RULES = (
    (re.compile(r"\.hc_pre\.hc_"), ".hc_"),
    (re.compile(r"\.learnable_sink_param"), ".sinks"),
    (re.compile(r"\.linear_gate\b"), ".gate_proj"),
    (re.compile(r"\.hc_attn_layer\.hc_"), ".attn_hc."),
    (re.compile(r"\.hc_mlp_layer\.hc_"), ".ffn_hc."),
    (re.compile(r"\.hc_head_(fn|base|scale)$"), r".hc_\1"),
)
"""In this order, as `transformers` has them."""
