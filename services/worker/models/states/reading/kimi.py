"""Reads the `config.json` of Kimi-Linear: Kimi Delta Attention, latent attention without positions, and experts.

Two spellings are read: that of published files, whose `linear_attn_config` numbers layers from 1, and that of
`transformers`. Where a file has both, `layer_types` says what layers are, as in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    DeltaConfig,
    LatentConfig,
    LayerConfig,
    Mixture,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.keys import first_given
from services.worker.models.states.reading.model import NO_ROPE, model_with_states, require_groups, require_kernel

_LAYER_TYPES = {"linear_attention": True, "full_attention": False}
_MLP_TYPES = {"sparse": True, "dense": False}
_ATTENDING = 4
"""Where the config does not say, layers whose number this divides attend, but for the first."""


class _RawLinear(Struct, kw_only=True):
    """`linear_attn_config`."""

    kda_layers: list[int] | None = None
    full_attn_layers: list[int] | None = None
    head_dim: int | None = None
    num_heads: int | None = None
    short_conv_kernel_size: int | None = None


class RawDeltaHybrid(Struct, kw_only=True):
    """Keys of models whose layers are Kimi Delta Attention or latent attention; some have two names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    model_max_length: int | None = None
    max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_token: int | None = None
    num_experts_per_tok: int | None = None
    num_shared_experts: int | None = None
    n_shared_experts: int | None = None
    num_expert_group: int | None = None
    n_group: int | None = None
    moe_renormalize: bool | None = None
    norm_topk_prob: bool | None = None
    first_k_dense_replace: int
    topk_group: int
    moe_intermediate_size: int
    routed_scaling_factor: float


class _RawKimi(RawDeltaHybrid, kw_only=True):
    """Defaults are those of `transformers`, which has two names of some keys."""

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 163586
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    linear_attn_config: _RawLinear | None = None
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    topk_group: int = 1
    use_grouped_topk: bool = True
    moe_intermediate_size: int = 1024
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 2.446


def kimi_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=_RawKimi, strict=True)
    _refuse_unsupported(raw)
    check_sizes(raw)
    latent, states, mixes = latent_of(raw, interleaved=False), _with_states(raw), mixing_layers(raw)
    return model_with_states(
        *(raw, architecture),
        layers=tuple(LayerConfig(None, NO_ROPE, *each) for each in zip(mixes, states, strict=True)),
        states=_delta(raw),
        max_positions=first_given(raw.model_max_length, raw.max_position_embeddings, 1_048_576),
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=raw.num_attention_heads,
        kv_heads=1,
        head_dim=latent.cached_dim,
        intermediate_size=raw.intermediate_size,
        # That `use_grouped_topk` counts is as vLLM has it, and Moonshot's files.
        mixture=mixture_of(raw, experts=256, groups=1, grouped=raw.use_grouped_topk) if any(mixes) else None,
        latent=latent,
        rotary_dim=0,
    )


def check_sizes(raw: RawDeltaHybrid) -> None:
    """Raises ModelError for what such a model cannot have."""
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    if raw.num_key_value_heads not in (None, raw.num_attention_heads):
        raise ModelError(
            f"num_key_value_heads {raw.num_key_value_heads} is not supported; num_attention_heads, "
            f"{raw.num_attention_heads}, is"
        )
    for key in ("model_max_length", "max_position_embeddings"):
        if (value := getattr(raw, key)) is not None:
            require_positive(**{key: value})
    require_positive(
        **{key: getattr(raw, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    )


def latent_of(raw: RawDeltaHybrid, *, interleaved: bool, gates: Literal["heads"] | None = None) -> LatentConfig:
    """How its other layers attend. Raises ModelError for sizes that there cannot be."""
    sizes = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    require_positive(**{key: value for key in sizes if (value := getattr(raw, key)) is not None})
    if raw.qk_rope_head_dim % 2:
        raise ModelError(f"qk_rope_head_dim {raw.qk_rope_head_dim} is odd")
    return LatentConfig(
        q_rank=raw.q_lora_rank,
        kv_rank=raw.kv_lora_rank,
        nope_dim=raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=raw.qk_nope_head_dim if raw.v_head_dim is None else raw.v_head_dim,
        interleaved=interleaved,
        gates=gates,
    )


def mixing_layers(raw: RawDeltaHybrid) -> list[bool]:
    """For each layer, whether experts take the place of its MLP. Raises ModelError."""
    count = raw.num_hidden_layers
    if raw.mlp_layer_types is not None:
        return layer_kinds("mlp_layer_types", raw.mlp_layer_types, _MLP_TYPES, count)
    return [number >= raw.first_k_dense_replace for number in range(count)]


def mixture_of(
    raw: RawDeltaHybrid, *, experts: int, groups: int, grouped: bool = True, shared_size: int | None = None
) -> Mixture:
    """`experts` and `groups`: where it does not say how many there are; not `grouped`: one group, whatever it says.
    `shared_size`: of each expert that every token goes through; None: it is like the others. Raises ModelError for
    sizes that there cannot be."""
    experts = first_given(raw.num_experts, raw.num_local_experts, experts)
    chosen = first_given(raw.num_experts_per_token, raw.num_experts_per_tok, 8)
    shared = first_given(raw.num_shared_experts, raw.n_shared_experts, 1)
    groups, size = first_given(raw.num_expert_group, raw.n_group, groups), raw.moe_intermediate_size
    chosen_groups, of_shared = raw.topk_group, first_given(shared_size, size)
    if not grouped:
        groups = chosen_groups = 1
    require_positive(
        num_experts=experts,
        moe_intermediate_size=size,
        moe_shared_expert_intermediate_size=of_shared,
        num_expert_group=groups,
    )
    if shared < 0:
        raise ModelError(f"num_shared_experts {shared} is negative")
    require_groups(("num_expert_group", groups), chosen_groups, experts, ("num_experts_per_token", chosen))
    return Mixture(
        experts=experts,
        chosen=chosen,
        intermediate_size=size,
        renormalised=first_given(raw.moe_renormalize, raw.norm_topk_prob, True),
        shared_size=shared * of_shared or None,
        shared_gated=False,
        scoring="sigmoid",
        groups=groups,
        chosen_groups=chosen_groups,
        corrected=True,
        scale=raw.routed_scaling_factor,
        exact_router=True,
    )


def _refuse_unsupported(raw: _RawKimi) -> None:
    if raw.attention_bias:
        raise ModelError("attention_bias true is not supported")
    if not raw.mla_use_nope:
        raise ModelError("mla_use_nope false is not supported: only attention without positions is")
    if raw.mla_use_output_gate:
        raise ModelError("mla_use_output_gate true is not supported: only attention without gates is")
    if raw.mlp_layer_types is None and raw.moe_layer_freq != 1:
        raise ModelError(f"moe_layer_freq {raw.moe_layer_freq} is not supported; supported: 1")
    if raw.moe_router_activation_func != "sigmoid":
        raise ModelError(
            f"moe_router_activation_func {raw.moe_router_activation_func!r} is not supported; supported: sigmoid"
        )


def _delta(raw: _RawKimi) -> DeltaConfig:
    own = raw.linear_attn_config or _RawLinear()
    heads, dim = first_given(own.num_heads, raw.linear_num_heads), first_given(own.head_dim, raw.linear_head_dim)
    kernel = first_given(own.short_conv_kernel_size, raw.linear_conv_kernel_dim)
    names = (
        "linear_num_heads" if own.num_heads is None else "linear_attn_config.num_heads",
        "linear_head_dim" if own.head_dim is None else "linear_attn_config.head_dim",
    )
    require_positive(**dict(zip(names, (heads, dim), strict=True)))
    require_kernel(
        "linear_conv_kernel_dim" if own.short_conv_kernel_size is None else "linear_attn_config.short_conv_kernel_size",
        kernel,
    )
    return DeltaConfig(heads=heads, head_dim=dim, groups=heads, state_dim=dim, kernel=kernel, gate_rank=dim)


def _with_states(raw: _RawKimi) -> list[bool]:
    """For each layer, whether it is Kimi Delta Attention; the others attend."""
    count, own = raw.num_hidden_layers, raw.linear_attn_config or _RawLinear()
    if raw.layer_types is not None:
        states = layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)
    elif own.kda_layers is not None and own.full_attn_layers is not None:
        states = _numbered(own.kda_layers, own.full_attn_layers, count)
    else:
        states = [not number or number % _ATTENDING != 0 for number in range(count)]
    if not any(states):
        raise ModelError("layer_types: no layer is linear_attention")
    return states


def _numbered(kda: list[int], attending: list[int], count: int) -> list[bool]:
    """By the numbers of layers, from 1."""
    for number in (*kda, *attending):
        if not 1 <= number <= count:
            raise ModelError(f"linear_attn_config: layer {number}; num_hidden_layers is {count}")
    for number in range(1, count + 1):
        named = (number in kda) + (number in attending)
        if named != 1:
            lists = "kda_layers and full_attn_layers" if named else "neither kda_layers nor full_attn_layers"
            raise ModelError(f"linear_attn_config: layer {number} is in {lists}; it must be in one of the two")
    return [number in kda for number in range(1, count + 1)]
