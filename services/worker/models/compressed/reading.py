"""Reads the `config.json` of DeepSeek-V4: as published, or as `transformers` writes it.

Published files say by `compress_ratios` what layers are, by `num_hash_layers` which experts are chosen by a table, and
have one `rope_scaling`; `transformers` writes `layer_types`, `mlp_layer_types` and nested `rope_parameters`. Where both
are there the library's count, as in the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    CompressedConfig,
    Compression,
    HyperConnections,
    LayerConfig,
    Mixture,
    ModelConfig,
    ModelError,
    dtype_named,
    limited_activation,
    require_positive,
)
from services.worker.models.hf_layers.compressed import DEEPSEEK_V4
from services.worker.models.hf_layers.keys import first_given
from services.worker.models.hf_layers.mixture import Scoring
from services.worker.models.hf_rope import RawRope, read_ropes
from services.worker.models.rope import Rope
from services.worker.ops.activation import SILU_LIMIT

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_OF_RATIOS = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: 4, _HEAVY: 128}
_SCORINGS: dict[str, Scoring] = {"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"}
_MLP_TYPES = {"hash_moe": True, "moe": False}


class _RawV4(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 129280
    hidden_size: int = 4096
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    q_lora_rank: int = 1024
    num_experts_per_tok: int = 6
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    max_position_embeddings: int = 1_048_576
    rope_theta: float = 10_000.0
    rope_scaling: RawRope | None = None
    rope_parameters: dict[str, Any] | None = None
    compress_rope_theta: float = 160_000.0
    qk_rope_head_dim: int | None = None
    partial_rotary_factor: float | None = None
    layer_types: list[str] | None = None
    compress_ratios: list[int] | None = None
    compress_rates: dict[str, int] | None = None
    compress_rate_csa: int | None = None
    compress_rate_hca: int | None = None
    mlp_layer_types: list[str] | None = None
    num_hash_layers: int = 3
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    swiglu_limit: float = SILU_LIMIT
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 1


_POSITIVE = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("q_lora_rank", "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "sliding_window", "o_groups"),
    *("o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok"),
)


def deepseek_v4_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawV4, strict=True)
    _refuse_unsupported(raw)
    rope_dim = _rope_dim(raw)
    layers = _layers(raw)
    return ModelConfig(
        architecture=architecture,
        dtype=dtype_named(raw.dtype or raw.torch_dtype),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=0,
        num_heads=raw.num_attention_heads,
        num_kv_heads=1,
        head_dim=raw.head_dim,
        layers=layers,
        max_positions=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        activation=limited_activation("silu_limited", raw.swiglu_limit),
        attention_scale=raw.head_dim**-0.5,
        attention_softcap=None,
        logits_softcap=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        norm_offset=False,
        embedding_scale=None,
        tied_embeddings=raw.tie_word_embeddings,
        eos_token_ids=stop_tokens(raw.eos_token_id),
        mixture=_mixture(raw),
        attention_sinks=True,
        compressed=CompressedConfig(
            q_rank=raw.q_lora_rank,
            rope_dim=rope_dim,
            groups=raw.o_groups,
            output_rank=raw.o_lora_rank,
            window=raw.sliding_window,
            index_heads=raw.index_n_heads,
            index_dim=raw.index_head_dim,
            index_chosen=raw.index_topk,
        ),
        connections=HyperConnections(raw.hc_mult, raw.hc_sinkhorn_iters, raw.hc_eps),
    )


def _refuse_unsupported(raw: _RawV4) -> None:
    require_positive(**{key: getattr(raw, key) for key in _POSITIVE})
    alike = (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("norm_topk_prob", True),
    )
    for key, known in alike:
        if getattr(raw, key) != known:
            raise ModelError(f"{key} {getattr(raw, key)!r} is not supported; supported: {known}")
    if raw.num_attention_heads % raw.o_groups:
        raise ModelError(f"o_groups {raw.o_groups}: {raw.num_attention_heads} heads do not divide by it")
    if raw.num_experts_per_tok > raw.n_routed_experts:
        raise ModelError(f"num_experts_per_tok {raw.num_experts_per_tok}: there are {raw.n_routed_experts} experts")


def _rope_dim(raw: _RawV4) -> int:
    share = raw.partial_rotary_factor
    given = first_given(raw.qk_rope_head_dim, 64 * raw.head_dim // 512) if share is None else int(raw.head_dim * share)
    if given % 2 or not 0 < given <= min(raw.head_dim, raw.index_head_dim):
        raise ModelError(
            f"qk_rope_head_dim {given}: rotated are pairs of a head's {raw.head_dim} and an indexer's "
            f"{raw.index_head_dim} elements"
        )
    return given


def _mixture(raw: _RawV4) -> Mixture:
    if raw.scoring_func not in _SCORINGS:
        raise ModelError(f"scoring_func {raw.scoring_func!r} is not supported; supported: {', '.join(_SCORINGS)}")
    return Mixture(
        experts=raw.n_routed_experts,
        chosen=raw.num_experts_per_tok,
        intermediate_size=raw.moe_intermediate_size,
        renormalised=True,
        shared_size=raw.moe_intermediate_size,
        shared_gated=False,
        scoring=_SCORINGS[raw.scoring_func],
        corrected=True,
        scale=raw.routed_scaling_factor,
        exact_router=True,
    )


def _layers(raw: _RawV4) -> tuple[LayerConfig, ...]:
    """Layers that compress nothing have a rotation of their own."""
    plain, compressing = _ropes(raw)
    kinds = [_compression(raw, kind) for kind in _layer_types(raw)]
    return tuple(
        LayerConfig(raw.sliding_window, plain if kind is None else compressing, True, compression=kind, hashed=hashed)
        for kind, hashed in zip(kinds, _hashed(raw), strict=True)
    )


def _ropes(raw: _RawV4) -> tuple[Rope, Rope]:
    nested = raw.rope_parameters or {}
    main, compress = nested.get("main"), nested.get("compress")
    if not (isinstance(main, dict) and isinstance(compress, dict)):
        flat = {key: value for key, value in nested.items() if key not in ("main", "compress")}
        scaling = flat or (msgspec.to_builtins(raw.rope_scaling) if raw.rope_scaling else {})
        main, compress = {"rope_theta": raw.rope_theta}, {**scaling, "rope_theta": raw.compress_rope_theta}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)  # the reference scales no cosines
    plain, compressing = (
        read_ropes(
            parameters=msgspec.Raw(msgspec.json.encode(each)),
            scaling=None,
            theta=theta,
            local_theta=None,
            positions=raw.max_position_embeddings,
            partly=True,
        ).full
        for each, theta in ((main, raw.rope_theta), (compress, raw.compress_rope_theta))
    )
    return plain, compressing


def _layer_types(raw: _RawV4) -> list[str]:
    count, types = raw.num_hidden_layers, raw.layer_types
    if types is None and raw.compress_ratios is not None:
        for ratio in raw.compress_ratios:
            if ratio not in _OF_RATIOS:
                raise ModelError(f"compress_ratios {ratio} is not supported; supported: 0, 4, 128")
        types = [_OF_RATIOS[ratio] for ratio in raw.compress_ratios]
    if types is None:
        types = [_SPARSE if layer > 1 and layer % 2 else _HEAVY for layer in range(count)]
    for kind in types:
        if kind not in _OF_RATIOS.values():
            raise ModelError(f"layer_types {kind!r} is not supported; supported: {', '.join(_OF_RATIOS.values())}")
    if len(types) < count:
        raise ModelError(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    return types[:count]  # those that predict further tokens are behind


def _compression(raw: _RawV4, kind: str) -> Compression | None:
    if kind == _SLIDING:
        return None
    older = raw.compress_rate_csa if kind == _SPARSE else raw.compress_rate_hca
    rate = first_given(older, (raw.compress_rates or {}).get(kind), _RATES[kind])
    if rate < 1:
        raise ModelError(f"compress_rates {kind} {rate} is not positive")
    return Compression(rate, sparse=kind == _SPARSE)


def _hashed(raw: _RawV4) -> list[bool]:
    count, types = raw.num_hidden_layers, raw.mlp_layer_types
    if types is None:
        return [layer < raw.num_hash_layers for layer in range(count)]
    for kind in types:
        if kind not in _MLP_TYPES:
            raise ModelError(f"mlp_layer_types {kind!r} is not supported; supported: {', '.join(_MLP_TYPES)}")
    if len(types) < count:
        raise ModelError(f"mlp_layer_types names {len(types)} layers, num_hidden_layers {count}")
    return [_MLP_TYPES[kind] for kind in types[:count]]


COMPRESSED_READERS = {DEEPSEEK_V4: deepseek_v4_model_config}
"""By architecture."""
