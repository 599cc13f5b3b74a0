"""Reads the `config.json` of Ling 3 (Bailing hybrid): Kimi Delta Attention, gated latent attention, and experts.

Two spellings are read: that of published files (`BailingMoeV3ForCausalLM`) and that of `transformers`, which has two
names of some keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import msgspec
from msgspec import field
from msgspec.structs import replace

from services.worker.models.config import (
    DeltaConfig,
    ExpertLimits,
    LayerConfig,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.keys import first_given
from services.worker.models.hf_rope import RawRope, read_ropes
from services.worker.models.states.reading.kimi import (
    RawDeltaHybrid,
    check_sizes,
    latent_of,
    mixing_layers,
    mixture_of,
)
from services.worker.models.states.reading.model import model_with_states, require_kernel

LING_2_5 = ("BailingMoeV2_5ForCausalLM", "BailingMoeLinearV2ForCausalLM")
"""Of the same `model_type`, and of other layers."""

_LAYER_TYPES = {"linear_attention": True, "full_attention": False}
_ONLY: dict[str, object] = {
    "attention_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_interleave": True,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "scale_router_input": False,
    "up_proj_norm": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "value_norm": False,
}
"""Keys of which one value is supported, which is the one where there is none."""


class _RawLing3(RawDeltaHybrid, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 157184
    hidden_size: int = 2560
    intermediate_size: int = 6144
    num_hidden_layers: int = 42
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 156895
    rope_theta: float = 6_000_000.0
    rope_scaling: RawRope | None = None
    rope_parameters: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(b"null"))
    v_head_dim: int = 128
    head_dim: int = 128
    linear_head_dim: int | None = None
    linear_num_heads: int | None = None
    linear_conv_kernel_dim: int | None = None
    short_conv_kernel_size: int = 4
    kda_safe_gate: bool = True
    kda_lower_bound: float | None = -5.0
    layer_group_size: int = 6
    first_k_dense_replace: int = 2
    topk_group: int = 4
    moe_intermediate_size: int = 768
    moe_shared_expert_intermediate_size: int | None = None
    expert_swiglu_limit_list: list[float | None] | None = None
    share_expert_swiglu_limit_list: list[float | None] | None = None
    routed_scaling_factor: float = 2.5


def bailing_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawLing3, strict=True)
    _refuse_unsupported(raw, msgspec.json.decode(text, type=dict[str, object]))
    check_sizes(raw)
    latent, states, mixes = latent_of(raw, interleaved=True, gates="heads"), _with_states(raw), mixing_layers(raw)
    ropes = read_ropes(
        parameters=raw.rope_parameters,
        scaling=raw.rope_scaling,
        theta=raw.rope_theta,
        local_theta=None,
        positions=first_given(raw.model_max_length, raw.max_position_embeddings, 262_144),
        partly=True,  # published files say how much of a head is rotated, and mean qk_rope_head_dim, as that says, too
    )
    config = model_with_states(
        *(raw, architecture),
        layers=tuple(
            LayerConfig(None, ropes.full, mixing, has_state, limits=limits)
            for mixing, has_state, limits in zip(mixes, states, _limits(raw, mixes), strict=True)
        ),
        states=_delta(raw),
        max_positions=ropes.max_positions,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=raw.num_attention_heads,
        kv_heads=1,
        head_dim=latent.cached_dim,
        intermediate_size=raw.intermediate_size,
        mixture=mixture_of(raw, experts=512, groups=8, shared_size=raw.moe_shared_expert_intermediate_size)
        if any(mixes)
        else None,
        latent=latent,
    )
    return replace(config, attention_scale=config.attention_scale * ropes.latent_scale)


def refuse_ling_2_5(
    _text: bytes, architecture: str, _stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> NoReturn:
    """Raises ModelError: its lightning attention rotates and norms queries and keys, and norms heads in groups."""
    raise ModelError(
        f"architectures {architecture!r} is not supported: lightning attention of rotated queries and keys; of "
        "model_type bailing_hybrid BailingMoeV3ForCausalLM and BailingHybridForCausalLM are"
    )


def _refuse_unsupported(raw: _RawLing3, keys: dict[str, object]) -> None:
    for key, only in _ONLY.items():
        if keys.get(key, only) != only:
            shown, known = (msgspec.json.encode(each).decode() for each in (keys[key], only))
            raise ModelError(f"{key} {shown} is not supported; supported: {known}")


def _delta(raw: _RawLing3) -> DeltaConfig:
    """`head_dim` is that of these layers as published; `transformers` writes it as `linear_head_dim`."""
    heads = first_given(raw.linear_num_heads, raw.num_attention_heads)
    dim = first_given(raw.linear_head_dim, raw.head_dim)
    kernel = first_given(raw.linear_conv_kernel_dim, raw.short_conv_kernel_size)
    names = (
        "num_attention_heads" if raw.linear_num_heads is None else "linear_num_heads",
        "head_dim" if raw.linear_head_dim is None else "linear_head_dim",
    )
    require_positive(**dict(zip(names, (heads, dim), strict=True)))
    require_kernel("short_conv_kernel_size" if raw.linear_conv_kernel_dim is None else "linear_conv_kernel_dim", kernel)
    if raw.kda_safe_gate and not (raw.kda_lower_bound is not None and raw.kda_lower_bound < 0):
        raise ModelError(f"kda_lower_bound {raw.kda_lower_bound} is not negative, as kda_safe_gate true needs it")
    return DeltaConfig(
        heads=heads,
        head_dim=dim,
        groups=heads,
        state_dim=dim,
        kernel=kernel,
        element_rates=True,
        lower_bound=raw.kda_lower_bound if raw.kda_safe_gate else None,
    )


def _with_states(raw: _RawLing3) -> list[bool]:
    """For each layer, whether it is Kimi Delta Attention; the others attend. Of layers behind the last whole group the
    published code and `transformers` differ."""
    count, group = raw.num_hidden_layers, raw.layer_group_size
    if raw.layer_types is not None:
        states = layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)
    else:
        require_positive(layer_group_size=group)
        if count % group:
            raise ModelError(f"num_hidden_layers {count} is no multiple of layer_group_size {group}: name layer_types")
        states = [(number + 1) % group != 0 for number in range(count)]
    if not any(states):
        raise ModelError("layer_types: no layer is linear_attention")
    return states


def _limits(raw: _RawLing3, mixes: list[bool]) -> list[ExpertLimits]:
    """Of each layer's experts, which vLLM limits and `transformers` does not: who leaves the limits out writes what the
    model was not trained to write."""
    routed, shared = (
        _limits_of(key, getattr(raw, key), len(mixes))
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    )
    return [
        ExpertLimits(*each) if mixing else ExpertLimits() for mixing, *each in zip(mixes, routed, shared, strict=True)
    ]


def _limits_of(key: str, limits: list[float | None] | None, count: int) -> list[float | None]:
    """0, and none: there is no limit, as for layers behind the end of the list."""
    for limit in limits or ():
        if limit is not None and not 0 <= limit < math.inf:
            raise ModelError(f"{key} {limit} is not supported; supported: null, 0 and positive numbers")
    given = [limit or None for limit in limits or ()][:count]
    return given + [None] * (count - len(given))
