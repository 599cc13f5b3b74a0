"""Reads the `config.json` of LFM3: short convolutions, and attention whose heads have gates, here and there windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    ConvolutionConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_rope import Ropes, read_ropes
from services.worker.models.states.reading.model import head_dim_of, model_with_states, require_kernel

_THETA = 1_000_000.0
"""Where a rotation names no base."""
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
}
_CONVOLUTION, _SLIDING, _FULL = "conv", "sliding_attention", "full_attention"
_PERIOD = 4
"""Where the config does not say: of so many layers the third sees everything, and the first, but that of the model, a
window."""


class _RawLfm3(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 128_000
    hidden_size: int = 2048
    intermediate_size: int = 7680
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    max_position_embeddings: int = 128_000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 124_900
    rope_parameters: dict[str, Any] | None = None
    conv_bias: bool = False
    conv_L_cache: int = 7
    layer_types: list[str] | None = None
    sliding_window: int | None = 256
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    attention_bias: bool = False


def lfm3_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawLfm3, strict=True)
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_key_value_heads=raw.num_key_value_heads,
        head_dim=raw.head_dim,
        max_position_embeddings=raw.max_position_embeddings,
    )
    require_kernel("conv_L_cache", raw.conv_L_cache)
    kinds = _kinds(raw)
    ropes = _ropes(raw, kinds)
    return model_with_states(
        *(raw, architecture),
        layers=tuple(_layer(each, raw.sliding_window, ropes) for each in kinds),
        states=ConvolutionConfig(heads=raw.hidden_size, kernel=raw.conv_L_cache, bias=raw.conv_bias),
        max_positions=ropes.max_positions,
        norm_eps=raw.norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads,
        head_dim=head_dim_of(raw.hidden_size, raw.num_attention_heads, raw.num_key_value_heads, raw.head_dim),
        intermediate_size=raw.intermediate_size,
        attention_bias=raw.attention_bias,
        qk_norm=True,
        post_norms=raw.use_sandwich_norm,
        head_gates=raw.use_attention_gate,
    )


def _layer(kind: str, window: int | None, ropes: Ropes) -> LayerConfig:
    if kind == _SLIDING:
        return LayerConfig(window, ropes.sliding)
    return LayerConfig(None, ropes.full, has_state=kind == _CONVOLUTION)


def _kinds(raw: _RawLfm3) -> list[str]:
    count, known = raw.num_hidden_layers, {kind: kind for kind in (_CONVOLUTION, _SLIDING, _FULL)}
    kinds = raw.layer_types
    if kinds is None:
        by_place = {_PERIOD // 2: _FULL, 0: _SLIDING}
        kinds = [by_place.get(each % _PERIOD, _CONVOLUTION) if each else _CONVOLUTION for each in range(count)]
    kinds = layer_kinds("layer_types", kinds, known, count)
    if _SLIDING in kinds and (raw.sliding_window is None or raw.sliding_window < 1):
        raise ModelError(f"sliding_window {raw.sliding_window} is not positive: layer_types has {_SLIDING}")
    return kinds


def _ropes(raw: _RawLfm3, kinds: list[str]) -> Ropes:
    """Each kind of layers that attend has a rotation of its own."""
    given = _ROPES if raw.rope_parameters is None else raw.rope_parameters
    for kind in (_FULL, _SLIDING):
        if kind in kinds and not isinstance(given.get(kind), dict):
            raise ModelError(f"rope_parameters has no {kind}: each kind of layers that attend has its own")
    own = {kind: given[kind] for kind in (_FULL, _SLIDING) if kind in kinds}
    return read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(own or None)),
        scaling=None,
        theta=_THETA,
        local_theta=None,
        positions=raw.max_position_embeddings,
        proportional=True,
    )
