"""Reads the `config.json` of Olmo-Hybrid: gated delta nets, and attention whose outputs are normed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.worker.models.config import (
    DeltaConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    dtype_named,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.delta import OLMO_HYBRID
from services.worker.models.hf_rope import read_ropes
from services.worker.models.rope import PlainRope, Rope

_HEAD_EPS = 1e-5
"""Of the norm behind a delta net, whatever the config says of others; so `transformers` has it."""
_THETA = 10_000.0
_KEY_SHARE = 0.75
"""Of the hidden size, elements of all keys where the config does not say."""
_ATTENDING = 4
"""The last layer of so many attends where the config does not say."""
_LAYER_TYPES = {"linear_attention": True, "full_attention": False}


class _RawOlmo(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 100352
    hidden_size: int = 3840
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 30
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 100257
    rope_theta: float | UnsetType | None = UNSET
    rope_parameters: dict[str, object] | None = None
    layer_types: list[str] | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True


_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "num_key_value_heads", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)


def olmo_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawOlmo, strict=True)
    _refuse_unsupported(raw)
    rope, positions = _rotation(raw)
    heads = raw.num_attention_heads
    dim = raw.head_dim or raw.hidden_size // heads
    return ModelConfig(
        architecture=OLMO_HYBRID,
        dtype=dtype_named(raw.dtype or raw.torch_dtype),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_heads=heads,
        num_kv_heads=raw.num_key_value_heads or heads,
        head_dim=dim,
        layers=tuple(
            LayerConfig(None, rope or PlainRope(_THETA), has_state=state, norms_outputs=not state)
            for state in _with_states(raw)
        ),
        max_positions=positions,
        norm_eps=raw.rms_norm_eps,
        activation="silu",
        attention_scale=dim**-0.5,
        attention_softcap=None,
        logits_softcap=None,
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        norm_offset=False,
        embedding_scale=None,
        tied_embeddings=raw.tie_word_embeddings,
        eos_token_ids=stop_tokens(raw.eos_token_id),
        states=_delta(raw),
        rotary_dim=0 if rope is None else None,
        norms_all_heads=True,
    )


def _refuse_unsupported(raw: _RawOlmo) -> None:
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    require_positive(**{key: value for key in _POSITIVE if (value := getattr(raw, key)) is not None})
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
    if raw.head_dim is None and raw.hidden_size % heads:
        raise ModelError(f"hidden_size {raw.hidden_size} is no multiple of {heads} heads")


def _delta(raw: _RawOlmo) -> DeltaConfig:
    heads = raw.linear_num_value_heads or raw.num_attention_heads
    groups, kernel = raw.linear_num_key_heads or raw.num_attention_heads, raw.linear_conv_kernel_dim
    if heads % groups:
        raise ModelError(f"linear_num_value_heads {heads} is no multiple of {groups} key heads")
    if kernel < 2:
        raise ModelError(f"linear_conv_kernel_dim {kernel} is not supported; supported: 2 and more")
    state_dim = raw.linear_key_head_dim or int(_KEY_SHARE * raw.hidden_size / groups)
    return DeltaConfig(
        heads=heads,
        head_dim=raw.linear_value_head_dim or 2 * state_dim,
        groups=groups,
        state_dim=state_dim,
        kernel=kernel,
        most_written=2 if raw.linear_allow_neg_eigval else 1,
        norm_eps=_HEAD_EPS,
    )


def _with_states(raw: _RawOlmo) -> list[bool]:
    """For each layer, whether it is a gated delta net; the others attend."""
    count = raw.num_hidden_layers
    if raw.layer_types is None:
        states = [bool((number + 1) % _ATTENDING) for number in range(count)]
        return states if not all(states) else [*states[:-1], False]
    return layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)


def _rotation(raw: _RawOlmo) -> tuple[Rope | None, int]:
    """(how heads are rotated, tokens of the longest sequence). None: they are not, as a base that is `null` says."""
    given = raw.rope_parameters or {}
    theta = given.get("rope_theta", raw.rope_theta)
    if theta is None:
        return None, raw.max_position_embeddings
    ropes = read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(given or None)),
        scaling=None,
        theta=_THETA if raw.rope_theta in (UNSET, None) else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )
    return ropes.full, ropes.max_positions
