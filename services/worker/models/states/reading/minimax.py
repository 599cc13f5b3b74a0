"""Reads the `config.json` of MiniMax-Text-01 and M1: lightning attention, and attention with rotation, before experts.

Keys are called as `transformers` writes them, or as the models are published; where both are there, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    LayerConfig,
    LightningConfig,
    Mixture,
    ModelConfig,
    ModelError,
    ResidualScales,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.keys import first_given
from services.worker.models.hf_layers.lightning import LIGHTNING_ARCHITECTURES
from services.worker.models.hf_rope import RawRope, Ropes, read_ropes
from services.worker.models.states.reading.model import head_dim_of, model_with_states

_THETA = 1_000_000.0
_HEADS_EPS = 1e-6
"""Of the norm behind lightning attention, whatever the config says of others; so `transformers` has it."""
_LAYER_TYPES = {"linear_attention": True, "full_attention": False}
_PUBLISHED_TYPES = {0: True, 1: False}


class _RawMiniMax(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 0
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    rotary_dim: int | None = None
    layer_types: list[str] | None = None
    attn_type_list: list[int] | None = None
    postnorm: bool | None = None
    full_attn_alpha_factor: float | None = None
    full_attn_beta_factor: float | None = None
    linear_attn_alpha_factor: float | None = None
    linear_attn_beta_factor: float | None = None
    mlp_alpha_factor: float | None = None
    mlp_beta_factor: float | None = None
    layernorm_full_attention_alpha: float | None = None
    layernorm_full_attention_beta: float | None = None
    layernorm_linear_attention_alpha: float | None = None
    layernorm_linear_attention_beta: float | None = None
    layernorm_mlp_alpha: float | None = None
    layernorm_mlp_beta: float | None = None


_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "num_local_experts"),
)


def minimax_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says of a model of `architecture`. `stop_tokens`: what ends its texts, given those
    that the config names. Raises ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawMiniMax, strict=True)
    _refuse_unsupported(raw)
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    dim, ropes = head_dim_of(raw.hidden_size, heads, kv_heads, raw.head_dim), _ropes(raw)
    config = model_with_states(
        *(raw, LIGHTNING_ARCHITECTURES[0]),
        layers=_layers(raw, architecture, ropes),
        states=LightningConfig(heads=heads, head_dim=dim, norm_eps=_HEADS_EPS),
        max_positions=ropes.max_positions,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        mixture=_mixture(raw),
        rotary_dim=_rotated(raw, dim),
    )
    normed = architecture == LIGHTNING_ARCHITECTURES[0] if raw.postnorm is None else raw.postnorm
    return msgspec.structs.replace(config, residual_normed=normed)


def _refuse_unsupported(raw: _RawMiniMax) -> None:
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    if raw.shared_intermediate_size:
        raise ModelError(f"shared_intermediate_size {raw.shared_intermediate_size} is not supported; supported: 0")
    require_positive(**{key: value for key in _POSITIVE if (value := getattr(raw, key)) is not None})


def _layers(raw: _RawMiniMax, architecture: str, ropes: Ropes) -> tuple[LayerConfig, ...]:
    mlp = _scales((raw.mlp_alpha_factor, raw.layernorm_mlp_alpha), (raw.mlp_beta_factor, raw.layernorm_mlp_beta))
    linear = _scales(
        (raw.linear_attn_alpha_factor, raw.layernorm_linear_attention_alpha),
        (raw.linear_attn_beta_factor, raw.layernorm_linear_attention_beta),
    )
    full = _scales(
        (raw.full_attn_alpha_factor, raw.layernorm_full_attention_alpha),
        (raw.full_attn_beta_factor, raw.layernorm_full_attention_beta),
    )
    return tuple(
        LayerConfig(None, ropes.full, mixes=True, has_state=True, residual=(linear, mlp))
        if has_state
        else LayerConfig(raw.sliding_window, ropes.full, mixes=True, residual=(full, mlp))
        for has_state in _with_states(raw, architecture)
    )


def _scales(kept: Sequence[float | None], added: Sequence[float | None]) -> ResidualScales:
    """Of each the first that is given."""
    return ResidualScales(first_given(*kept, 1.0), first_given(*added, 1.0))


def _with_states(raw: _RawMiniMax, architecture: str) -> list[bool]:
    """For each layer, whether it has lightning attention; the others attend."""
    count = raw.num_hidden_layers
    if raw.layer_types is not None:
        found = layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)
    elif raw.attn_type_list is not None:
        found = layer_kinds("attn_type_list", raw.attn_type_list, _PUBLISHED_TYPES, count)
    elif architecture == LIGHTNING_ARCHITECTURES[0]:
        found = [bool(number % 2) for number in range(count)]
    else:
        raise ModelError(
            "attn_type_list is missing: it says which layers have lightning attention (0), which attend (1)"
        )
    if not any(found):
        raise ModelError("no layer has lightning attention; a model without any is not supported")
    return found


def _ropes(raw: _RawMiniMax) -> Ropes:
    return read_ropes(
        parameters=raw.rope_parameters,
        scaling=raw.rope_scaling,
        theta=_THETA if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )


def _rotated(raw: _RawMiniMax, head_dim: int) -> int | None:
    rotated = head_dim if raw.rotary_dim is None else raw.rotary_dim
    if rotated % 2 or head_dim % 2 or not 0 < rotated <= head_dim:
        raise ModelError(f"rotary_dim {rotated} is no even number up to head_dim {head_dim}, which is to be even, too")
    return None if rotated == head_dim else rotated


def _mixture(raw: _RawMiniMax) -> Mixture:
    """As Mixtral's."""
    if not 1 <= raw.num_experts_per_tok <= raw.num_local_experts:
        raise ModelError(f"num_experts_per_tok {raw.num_experts_per_tok}: there are {raw.num_local_experts} experts")
    return Mixture(
        experts=raw.num_local_experts,
        chosen=raw.num_experts_per_tok,
        intermediate_size=raw.intermediate_size,
        renormalised=True,
    )
