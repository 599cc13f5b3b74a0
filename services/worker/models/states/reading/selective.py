"""Reads the `config.json` of models with Mamba-1 layers: Mamba, FalconMamba and Jamba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from services.worker.models.config import (
    LayerConfig,
    Mixture,
    ModelConfig,
    ModelError,
    SelectiveConfig,
    require_positive,
)
from services.worker.models.hf_layers.selective import JAMBA, SELECTIVE_ARCHITECTURES
from services.worker.models.states.reading.mamba import MAMBA2_POSITIONS, RawMamba, decode_mamba
from services.worker.models.states.reading.model import NO_ROPE, head_dim_of, model_with_states, require_kernel

_ELEMENTS_OF_A_STEP = 16
"""Of a row, for each number that time steps are made of, where their rank is "auto"."""


class _RawSelective(RawMamba, kw_only=True):
    """Mamba and FalconMamba: such layers and nothing else. Defaults are those of `transformers`."""

    tie_word_embeddings: bool = True
    state_size: int = 16
    conv_kernel: int = 4
    expand: int = 2
    intermediate_size: int | None = None
    time_step_rank: int | Literal["auto"] = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    mixer_rms_eps: float = 1e-6


class _RawJamba(RawMamba, kw_only=True):
    """Jamba: some layers attend, and some have experts in place of an MLP."""

    intermediate_size: int = 14336
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    num_experts: int = 16
    num_experts_per_tok: int = 2
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    """Of its first release."""


def selective_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says of a model of `architecture`. `stop_tokens`: what ends its texts, given those
    that the config names. Raises ModelError, and msgspec's errors."""
    assert architecture in SELECTIVE_ARCHITECTURES
    if architecture == JAMBA:
        jamba = decode_mamba(text, _RawJamba)
        return _jamba(jamba, stop_tokens(jamba.eos_token_id))
    raw = decode_mamba(text, _RawSelective)
    return _mamba(raw, architecture, stop_tokens(raw.eos_token_id))


def _mamba(raw: _RawSelective, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    # Falcon Mamba 7B says how large the mixer is, and an `expand` of something else.
    inner = raw.expand * raw.hidden_size if raw.intermediate_size is None else raw.intermediate_size
    rank = _step_rank(raw.time_step_rank, raw.hidden_size)
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        num_hidden_layers=raw.num_hidden_layers,
        intermediate_size=inner,
        state_size=raw.state_size,
        time_step_rank=rank,
    )
    require_kernel("conv_kernel", raw.conv_kernel)
    states = SelectiveConfig(
        heads=inner,
        state_dim=raw.state_size,
        kernel=raw.conv_kernel,
        step_rank=rank,
        conv_bias=raw.use_conv_bias,
        bias=raw.use_bias,
        norm_eps=raw.mixer_rms_eps if architecture == "FalconMambaForCausalLM" else None,
        norm_weights=False,
    )
    return model_with_states(
        *(raw, architecture),
        layers=(LayerConfig(None, NO_ROPE, has_state=True),) * raw.num_hidden_layers,
        states=states,
        max_positions=MAMBA2_POSITIONS,
        norm_eps=raw.layer_norm_epsilon,
        eos=eos,
    )


def _jamba(raw: _RawJamba, eos: tuple[int, ...]) -> ModelConfig:
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    rank = _step_rank(raw.mamba_dt_rank, raw.hidden_size)
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        num_hidden_layers=raw.num_hidden_layers,
        intermediate_size=raw.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=raw.max_position_embeddings,
        attn_layer_period=raw.attn_layer_period,
        expert_layer_period=raw.expert_layer_period,
        num_experts=raw.num_experts,
        mamba_expand=raw.mamba_expand,
        mamba_d_state=raw.mamba_d_state,
        mamba_dt_rank=rank,
        head_dim=1 if raw.head_dim is None else raw.head_dim,
    )
    require_kernel("mamba_d_conv", raw.mamba_d_conv)
    head_dim = head_dim_of(raw.hidden_size, heads, kv_heads, raw.head_dim)
    if raw.sliding_window is not None:
        raise ModelError(f"sliding_window {raw.sliding_window} is not supported; supported: null")
    if not raw.mamba_inner_layernorms:
        raise ModelError("mamba_inner_layernorms false is not supported; supported: true")
    states = SelectiveConfig(
        heads=raw.mamba_expand * raw.hidden_size,
        state_dim=raw.mamba_d_state,
        kernel=raw.mamba_d_conv,
        step_rank=rank,
        conv_bias=raw.mamba_conv_bias,
        bias=raw.mamba_proj_bias,
        norm_eps=raw.rms_norm_eps,
        norm_weights=True,
    )
    mixture = _mixture(raw)
    layers = tuple(
        LayerConfig(
            *(None, NO_ROPE),
            mixes=mixture is not None and number % raw.expert_layer_period == raw.expert_layer_offset,
            has_state=number % raw.attn_layer_period != raw.attn_layer_offset,
        )
        for number in range(raw.num_hidden_layers)
    )
    if not any(layer.has_state for layer in layers):
        raise ModelError(f"attn_layer_period {raw.attn_layer_period}: no layer has a mixer with states")
    return model_with_states(
        *(raw, JAMBA),
        layers=layers,
        states=states,
        max_positions=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        eos=eos,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        mixture=mixture,
        rotary_dim=0,
    )


def _mixture(raw: _RawJamba) -> Mixture | None:
    """None: there is one expert, which is an MLP."""
    if raw.num_experts == 1:
        return None
    if not 1 <= raw.num_experts_per_tok <= raw.num_experts:
        raise ModelError(f"num_experts_per_tok {raw.num_experts_per_tok}: there are {raw.num_experts} experts")
    return Mixture(
        experts=raw.num_experts,
        chosen=raw.num_experts_per_tok,
        intermediate_size=raw.intermediate_size,
        renormalised=False,
    )


def _step_rank(rank: int | Literal["auto"], hidden: int) -> int:
    return -(-hidden // _ELEMENTS_OF_A_STEP) if rank == "auto" else rank
