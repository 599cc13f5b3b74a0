"""Reads the `config.json` of models with gated delta nets, as strictly as `hf_config` reads the others'."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    DeltaConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.delta import SEEING_ARCHITECTURES
from services.worker.models.hf_layers.mixture import MixtureLayers, RawMixture, read_mixture
from services.worker.models.hf_rope import Ropes, read_ropes
from services.worker.models.states.reading.model import head_dim_of, model_with_states, require_kernel

_ROTATED = 0.25
"""Share of a head that is rotated where the config does not say."""
_SECTIONS: dict[str, object] = {"mrope_section": [11, 11, 10]}
"""Of a model with a vision tower that does not say; they are always interleaved."""
_ATTENDING = 4
"""The last layer of so many attends where the config does not say."""


class _RawDelta(RawMixture, kw_only=True):
    """The keys that these families have; defaults are those of `transformers`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int = 0
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int = 256
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    norm_topk_prob: bool | None = True
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    partial_rotary_factor: float | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: list[str] | None = None
    full_attention_interval: int = _ATTENDING


class _RawSeeing(Struct, kw_only=True):
    """The keys of a model with a vision tower."""

    text_config: dict[str, object]
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "full_attention_interval",
)
_LAYER_TYPES = {"linear_attention": True, "full_attention": False}


def delta_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says of a model of `architecture`. `stop_tokens`: what ends its texts, given those
    that the config names. Raises ModelError, and msgspec's errors."""
    text = _language_model(text) if architecture in SEEING_ARCHITECTURES else text
    raw = msgspec.json.decode(text, type=_RawDelta, strict=True)
    raw.architectures = [SEEING_ARCHITECTURES.get(architecture, architecture)]
    _refuse_unsupported(raw)
    delta, mixing, heads = _delta(raw), _mixing(raw), raw.num_attention_heads
    ropes, rotated = _rotation(raw)
    sees = architecture in SEEING_ARCHITECTURES
    return model_with_states(
        *(raw, architecture),
        layers=tuple(
            LayerConfig(None, ropes.full, mixes, has_state)
            for mixes, has_state in zip(mixing.mixing, _with_states(raw), strict=True)
        ),
        states=delta,
        max_positions=ropes.max_positions,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=heads,
        kv_heads=raw.num_key_value_heads or heads,
        head_dim=raw.head_dim,
        intermediate_size=raw.intermediate_size,
        attention_bias=raw.attention_bias,
        qk_norm=True,
        norm_offset=True,
        mixture=mixing.mixture,
        gated_attention=True,
        rotary_dim=rotated,
        rope_axes=_axes(raw, ropes, rotated) if sees else (),
    )


def _language_model(text: bytes) -> bytes:
    """What the configuration of a model with a vision tower says of its language model, as if that were all. Whether
    embeddings are tied is said of the whole."""
    whole = msgspec.json.decode(text, type=_RawSeeing, strict=True)
    tied = {} if whole.tie_word_embeddings is None else {"tie_word_embeddings": whole.tie_word_embeddings}
    outside = {
        "dtype": whole.dtype or whole.torch_dtype,
        "eos_token_id": whole.eos_token_id,
    }
    given = {key: value for key, value in outside.items() if value is not None}
    return msgspec.json.encode({**given, **whole.text_config, **tied, "architectures": []})


def _refuse_unsupported(raw: _RawDelta) -> None:
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    require_positive(**{key: value for key in _POSITIVE if (value := getattr(raw, key)) is not None})
    heads = raw.num_attention_heads
    head_dim_of(raw.hidden_size, heads, raw.num_key_value_heads or heads, raw.head_dim)


def _delta(raw: _RawDelta) -> DeltaConfig:
    heads, groups, kernel = raw.linear_num_value_heads, raw.linear_num_key_heads, raw.linear_conv_kernel_dim
    if heads % groups:
        raise ModelError(f"linear_num_value_heads {heads} is no multiple of {groups} key heads")
    require_kernel("linear_conv_kernel_dim", kernel)
    return DeltaConfig(
        heads=heads,
        head_dim=raw.linear_value_head_dim,
        groups=groups,
        state_dim=raw.linear_key_head_dim,
        kernel=kernel,
    )


def _mixing(raw: _RawDelta) -> MixtureLayers:
    try:
        mixing = read_mixture(raw)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if not all(mixing.mixing) and raw.intermediate_size < 1:
        raise ModelError(f"intermediate_size {raw.intermediate_size} is not positive")
    return mixing


def _with_states(raw: _RawDelta) -> list[bool]:
    """For each layer, whether it is a gated delta net; the others attend."""
    count = raw.num_hidden_layers
    if raw.layer_types is None:
        return [bool((number + 1) % raw.full_attention_interval) for number in range(count)]
    return layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)


def _rope_keys(raw: _RawDelta) -> dict[str, object]:
    """Those of the older name alone where there are any, as in `transformers`."""
    return raw.rope_scaling or raw.rope_parameters or {}


def _rotation(raw: _RawDelta) -> tuple[Ropes, int]:
    """How heads are rotated, and so many of their elements."""
    given = _rope_keys(raw)
    share = given.get("partial_rotary_factor", raw.partial_rotary_factor)
    if share is None:
        share = _ROTATED
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ModelError(f"partial_rotary_factor {share!r} is no number from 0 to 1")
    rotated = int(raw.head_dim * share)
    if rotated % 2 or raw.head_dim % 2:
        raise ModelError(f"head_dim {raw.head_dim}: {rotated} of its elements are no pairs")
    parameters = {**_SECTIONS, **given, "mrope_interleaved": True}
    parameters.pop("partial_rotary_factor", None)
    ropes = read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(parameters)),
        scaling=None,
        theta=10_000.0 if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )
    return ropes, rotated


def _axes(raw: _RawDelta, ropes: Ropes, rotated: int) -> tuple[int, ...]:
    """See `ModelConfig.rope_axes`. Elements that are not rotated stay as they are by any axis. Where there is no tower
    nothing asks for them: of a text all axes are alike."""
    if _rope_keys(raw).get("mrope_section") is not None and 2 * len(ropes.axes) != rotated:
        raise ModelError(f"mrope_section has {len(ropes.axes)} frequencies, {rotated} rotated elements half as many")
    return (ropes.axes[: rotated // 2] + (0,) * raw.head_dim)[: raw.head_dim // 2]
