"""Reads the `config.json` of GLM-5-Next's language model: a Ling 3 whose residual is several streams, whose rates and
gates are made of few numbers, and whose attention rotates nothing and goes to pools of tokens that an indexer chooses.
Knows what its tensors are called in published files, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from services.worker.models.config import (
    DeltaConfig,
    HyperConnections,
    ModelConfig,
    ModelError,
    layer_kinds,
    limited_activation,
    require_positive,
)
from services.worker.models.hf_layers.delta import GLM_NEXT as GLM_NEXT
from services.worker.models.hf_layers.latent import IndexConfig
from services.worker.models.published.layout import Published, converted
from services.worker.models.rope import STILL
from services.worker.ops.activation import SILU_LIMIT, Activation

_LIKE = "BailingHybridForCausalLM"
_SHARED_KEY = 2
"""Elements of queries that are read as if they were rotated: kernels know no key of latents alone."""
_PERIOD = 4
_KINDS = {
    "linear_attention": True,
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention", "full_attention"), False),
}
"""Whether there are states, by all names that `transformers` reads; published files have the third one."""


class _RawLinearAttention(Struct, kw_only=True):
    """Of a published file's `linear_attn_config`."""

    head_dim: int | None = None
    num_heads: int | None = None
    short_conv_kernel_size: int | None = None
    gate_lower_bound: float | UnsetType | None = UNSET
    safe_gate: bool = True


class _RawGlmNext(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 154_880
    hidden_size: int = 4096
    intermediate_size: int = 12_288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 45
    num_attention_heads: int = 64
    n_shared_experts: int = 1
    n_routed_experts: int = 288
    routed_scaling_factor: float = 2.5
    kv_lora_rank: int = 512
    q_lora_rank: int = 1536
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 32
    index_kpool: int = 16
    index_kpool_always_select_tail: bool = True
    swiglu_limit: float = SILU_LIMIT
    linear_head_dim: int = 128
    linear_num_heads: int = 64
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float | None = -5.0
    linear_attn_config: _RawLinearAttention = field(default_factory=_RawLinearAttention)
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    index_kpool_compress: bool = True
    mhc: bool = True
    mla_use_nope: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"


_ONLY: tuple[tuple[str, object], ...] = (
    *(("qk_rope_head_dim", 0), ("index_kpool_always_select_tail", True)),
    *(("index_kpool_compress", True), ("mhc", True), ("mla_use_nope", True)),
    *(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
)
"""Keys of which one value is supported; `transformers` does not read the last five, which published files have."""
_POSITIVE = ("hc_mult", "hc_sinkhorn_iters", "index_kpool", "index_topk", "index_head_dim", "index_n_heads")
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "n_shared_experts", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank", "v_head_dim"),
    *("n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "attention_bias", "hidden_act"),
)
"""Keys that Ling 3 has, too, with the same meaning."""


def glm_next(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawGlmNext)
    if raw.get("linear_lower_bound", own.linear_lower_bound) is None:
        own.linear_lower_bound = None
    _refuse(own)
    kinds = _kinds(own)
    delta = own.linear_attn_config
    bound = own.linear_lower_bound if isinstance(delta.gate_lower_bound, UnsetType) else delta.gate_lower_bound
    if bound is None and raw.get("linear_attn_config") is not None and delta.safe_gate:
        bound = -5.0
    base = {key: getattr(own, key) for key in _SAME} | {
        "num_local_experts": raw.get("num_local_experts") or own.n_routed_experts,
        "qk_nope_head_dim": own.qk_nope_head_dim - _SHARED_KEY,
        "qk_rope_head_dim": _SHARED_KEY,
        "layer_types": ["linear_attention" if each else "full_attention" for each in kinds],
        "mlp_layer_types": own.mlp_layer_types
        or ["dense" if number < 3 else "sparse" for number in range(own.num_hidden_layers)],
        "linear_head_dim": delta.head_dim or own.linear_head_dim,
        "linear_num_heads": delta.num_heads or own.linear_num_heads,
        "linear_conv_kernel_dim": delta.short_conv_kernel_size or own.linear_conv_kernel_dim,
        "kda_safe_gate": bound is not None,
        "kda_lower_bound": bound,
        "eos_token_id": raw.get("eos_token_id"),  # a Ling 3 that names none has one
    }
    limited = limited_activation("silu_limited", own.swiglu_limit)
    return Published(base, {}, like=_LIKE, revised=partial(_revised, own, limited, _shared(own, kinds)))


def _refuse(own: _RawGlmNext) -> None:
    """Raises ModelError."""
    for key, value in _ONLY:
        if getattr(own, key) != value:
            raise ModelError(f"{key} {getattr(own, key)} is not supported; {value} is")
    require_positive(**{key: getattr(own, key) for key in _POSITIVE})
    if own.index_topk % own.index_kpool:
        raise ModelError(f"index_topk {own.index_topk} is no multiple of index_kpool {own.index_kpool}")
    if own.qk_nope_head_dim <= _SHARED_KEY:
        raise ModelError(f"qk_nope_head_dim {own.qk_nope_head_dim} is not above {_SHARED_KEY}")


def _kinds(own: _RawGlmNext) -> list[bool]:
    """For each layer, whether it has states."""
    count = own.num_hidden_layers
    if own.layer_types is None:
        return [number % _PERIOD != _PERIOD - 1 for number in range(count)]
    return layer_kinds("layer_types", own.layer_types, _KINDS, count)


def _shared(own: _RawGlmNext, kinds: list[bool]) -> tuple[int, ...]:
    """Layers that attend to what the layer before them chose, which has to be one that attends."""
    if own.index_topk_pattern is not None or own.index_topk_freq > 1:
        raise ModelError("index_topk_pattern and index_topk_freq are not supported; indexer_types is")
    types = own.indexer_types or []
    for kind in types:
        if kind not in ("full", "shared"):
            raise ModelError(f"indexer_types {kind!r} is not supported; supported: full, shared")
    if types and len(types) < len(kinds):
        raise ModelError(f"indexer_types names {len(types)} layers, num_hidden_layers {len(kinds)}")
    shared = tuple(number for number, kind in enumerate(types) if kind == "shared" and not kinds[number])
    for number in shared:
        if number == 0 or kinds[number - 1]:
            raise ModelError(f"indexer_types 'shared' of layer {number}: the layer before it chooses nothing")
    return shared


def _revised(own: _RawGlmNext, limited: Activation, shared: tuple[int, ...], config: ModelConfig) -> ModelConfig:
    latent, states = config.latent, config.states
    assert latent is not None, "it is a Ling 3"
    assert isinstance(states, DeltaConfig)
    index = IndexConfig(
        heads=own.index_n_heads,
        dim=own.index_head_dim,
        chosen=own.index_topk,
        interleaved=False,
        shared=shared,
        pool=own.index_kpool,
    )
    still = tuple(number for number, layer in enumerate(config.layers) if not layer.has_state)
    return replace(
        config,
        layers=tuple(replace(layer, rope=STILL) for layer in config.layers),
        latent=replace(latent, gates=None, unrotated=still, norm_eps=config.norm_eps, index=index),
        states=replace(states, gate_rank=states.head_dim, element_rates=False),
        activation=limited,
        connections=HyperConnections(own.hc_mult, own.hc_sinkhorn_iters, own.hc_eps, averaged=True),
    )


def library_name(name: str) -> str:
    """`name`, published or the library's, as it is read here."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name


_RULES = (
    (re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$"), r".\1_hc.\2"),
    (re.compile(r"\.self_attn\.(f_[ab]_proj\.|dt_bias$|A_log$)"), r".self_attn.forget_gate.\1"),
)
