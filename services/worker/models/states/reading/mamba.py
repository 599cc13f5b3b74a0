"""Reads the `config.json` of models with Mamba-2 layers, as strictly as `hf_config` reads the others'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    LayerConfig,
    MambaConfig,
    Mixture,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.keys import first_given
from services.worker.models.hf_rope import RawRope, read_ropes
from services.worker.models.rope import Rope
from services.worker.models.states.reading.model import NO_ROPE, head_dim_of, model_with_states, require_kernel

MAMBA2_POSITIONS = 1 << 20
"""Tokens of the longest sequence of a model without attention, whose config names none: nothing depends on it."""
_BAMBA_ROTATED = 0.5
"""Share of a head that Bamba rotates, whatever its config says; so `transformers` has it."""


class RawMamba(Struct, kw_only=True):
    """The keys that all of these families have."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    time_step_limit: list[float | dict[str, str] | None] | None = None


class _RawMamba2(RawMamba, kw_only=True):
    """Mamba2ForCausalLM: Mamba-2 layers and nothing else."""

    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    expand: int = 2
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5


class RawHybrid(RawMamba, kw_only=True):
    """Bamba and Granite 4: Mamba-2 layers, some layers of attention, and MLPs behind both."""

    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    attention_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: dict[str, object] | None = None
    mamba_n_heads: int = 128
    mamba_d_head: int | Literal["auto"] | None = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False


class _RawBamba(RawHybrid, kw_only=True):
    intermediate_size: int = 14336
    attn_layer_indices: list[int] | None = None
    rms_norm_eps: float = 1e-5
    mlp_bias: bool = False


class _RawGranite(RawHybrid, kw_only=True):
    shared_intermediate_size: int = 1024
    num_local_experts: int | None = 8
    num_experts_per_tok: int | None = 2
    intermediate_size: int = 11008
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    rms_norm_eps: float = 1e-6
    position_embedding_type: str | None = None
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


_Raw = TypeVar("_Raw", bound=RawMamba)


def mamba_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says of a model of `architecture`. `stop_tokens`: what ends its texts, given those
    that the config names. Raises ModelError, and msgspec's errors."""
    match architecture:
        case "Mamba2ForCausalLM":
            mamba2 = decode_mamba(text, _RawMamba2)
            return _mamba2(mamba2, stop_tokens(mamba2.eos_token_id))
        case "BambaForCausalLM":
            bamba = decode_mamba(text, _RawBamba)
            return _bamba(bamba, stop_tokens(bamba.eos_token_id))
        case "GraniteMoeHybridForCausalLM":
            granite = decode_mamba(text, _RawGranite)
            return _granite(granite, stop_tokens(granite.eos_token_id))
        case _:
            raise AssertionError(f"{architecture} has no Mamba-2 layers")


def decode_mamba(text: bytes, kind: type[_Raw]) -> _Raw:
    """`text`, whose activation and limit of time steps are supported. Raises ModelError, and msgspec's errors."""
    raw = msgspec.json.decode(text, type=kind, strict=True)
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    if raw.time_step_limit is not None and (raw.time_step_limit[:1] != [0.0] or not _endless(raw.time_step_limit[-1])):
        # The library limits prompts' time steps, not those of what is generated behind them.
        raise ModelError(f"time_step_limit {raw.time_step_limit} is not supported; supported: from 0 without an end")
    return raw


def _endless(limit: float | dict[str, str] | None) -> bool:
    return limit is None or limit == {"__float__": "Infinity"} or (isinstance(limit, float) and math.isinf(limit))


def _mamba2(raw: _RawMamba2, eos: tuple[int, ...]) -> ModelConfig:
    mamba = _sizes(
        raw,
        raw.expand,
        MambaConfig(
            heads=raw.num_heads,
            head_dim=raw.head_dim,
            groups=raw.n_groups,
            state_dim=raw.state_size,
            kernel=raw.conv_kernel,
            conv_bias=raw.use_conv_bias,
            bias=raw.use_bias,
        ),
        ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    )
    layers = (LayerConfig(None, NO_ROPE, has_state=True),) * raw.num_hidden_layers
    return model_with_states(
        *(raw, "Mamba2ForCausalLM"),
        layers=layers,
        states=mamba,
        max_positions=MAMBA2_POSITIONS,
        norm_eps=raw.layer_norm_epsilon,
        eos=eos,
    )


def _bamba(raw: _RawBamba, eos: tuple[int, ...]) -> ModelConfig:
    wrong = [index for index in raw.attn_layer_indices or () if not 0 <= index < raw.num_hidden_layers]
    if wrong:
        raise ModelError(f"attn_layer_indices {wrong[0]}: there are {raw.num_hidden_layers} layers")
    dim, rope, positions = read_attention(raw, rotates=True)
    rotated = int(dim * _BAMBA_ROTATED)
    if rotated % 2:
        raise ModelError(f"head_dim {dim} is no multiple of 4, half of which is rotated in pairs")
    attends = [index in (raw.attn_layer_indices or ()) for index in range(raw.num_hidden_layers)]
    config = _hybrid(raw, "BambaForCausalLM", attends, raw.intermediate_size, dim, rope, eos)
    return msgspec.structs.replace(
        config, rotary_dim=rotated, norm_eps=raw.rms_norm_eps, mlp_bias=raw.mlp_bias, max_positions=positions
    )


_LAYER_TYPES = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


def _granite(raw: _RawGranite, eos: tuple[int, ...]) -> ModelConfig:
    if raw.position_embedding_type not in (None, "nope", "rope"):
        raise ModelError(
            f"position_embedding_type {raw.position_embedding_type!r} is not supported; supported: rope, nope"
        )
    key = "layers_block_type" if raw.layer_types is None else "layer_types"
    names = first_given(raw.layer_types, raw.layers_block_type, ["mamba"] * raw.num_hidden_layers)
    attends = layer_kinds(key, names, _LAYER_TYPES, raw.num_hidden_layers)
    rotates = raw.position_embedding_type == "rope"
    dim, rope, positions = read_attention(raw, rotates=rotates)
    config = _hybrid(
        *(raw, "GraniteMoeHybridForCausalLM", attends, raw.shared_intermediate_size, dim, rope, eos),
    )
    mixture = _granite_mixture(raw)
    if mixture is not None:  # beside the chosen experts every token goes through what is the MLP of the others
        layers = tuple(msgspec.structs.replace(layer, mixes=True) for layer in config.layers)
        config = msgspec.structs.replace(config, mixture=mixture, layers=layers, intermediate_size=0)
    return msgspec.structs.replace(
        config,
        rotary_dim=None if rotates else 0,
        norm_eps=raw.rms_norm_eps,
        max_positions=positions,
        attention_scale=raw.attention_multiplier,
        embedding_scale=None if raw.embedding_multiplier == 1 else raw.embedding_multiplier,
        scales_inputs=True,
        residual_scale=None if raw.residual_multiplier == 1 else raw.residual_multiplier,
        logits_divisor=None if raw.logits_scaling == 1 else raw.logits_scaling,
    )


def _granite_mixture(raw: _RawGranite) -> Mixture | None:
    """Of every layer; its router's softmax is over the chosen ones. None: there is none."""
    experts, chosen = raw.num_local_experts or 0, 2 if raw.num_experts_per_tok is None else raw.num_experts_per_tok
    if not experts:
        return None
    require_positive(num_local_experts=experts, intermediate_size=raw.intermediate_size)
    if not 1 <= chosen <= experts:
        raise ModelError(f"num_experts_per_tok {chosen}: there are {experts} experts")
    return Mixture(
        experts=experts,
        chosen=chosen,
        intermediate_size=raw.intermediate_size,
        renormalised=True,
        shared_size=raw.shared_intermediate_size,
        shared_gated=False,
    )


def _hybrid(
    raw: RawHybrid,
    architecture: str,
    attends: list[bool],
    intermediate_size: int,
    head_dim: int,
    rope: Rope,
    eos: tuple[int, ...],
) -> ModelConfig:
    auto = raw.mamba_expand * raw.hidden_size // raw.mamba_n_heads if raw.mamba_n_heads > 0 else 0
    mamba = _sizes(
        raw,
        raw.mamba_expand,
        MambaConfig(
            heads=raw.mamba_n_heads,
            head_dim=raw.mamba_d_head if isinstance(raw.mamba_d_head, int) else auto,
            groups=raw.mamba_n_groups,
            state_dim=raw.mamba_d_state,
            kernel=raw.mamba_d_conv,
            conv_bias=raw.mamba_conv_bias,
            bias=raw.mamba_proj_bias,
        ),
        ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    )
    require_positive(intermediate_size=intermediate_size)
    return model_with_states(
        *(raw, architecture),
        layers=tuple(LayerConfig(None, rope, has_state=not each) for each in attends),
        states=mamba,
        max_positions=raw.max_position_embeddings,
        norm_eps=1e-5,
        eos=eos,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        attention_bias=raw.attention_bias,
    )


def read_attention(raw: RawHybrid, *, rotates: bool) -> tuple[int, Rope, int]:
    """(elements of a head, its rotation, tokens of the longest sequence)."""
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    dim = head_dim_of(raw.hidden_size, heads, kv_heads, raw.head_dim)
    if not rotates:
        return dim, NO_ROPE, raw.max_position_embeddings
    # Which share of a head is rotated follows from the family.
    parameters = {key: value for key, value in (raw.rope_parameters or {}).items() if key != "partial_rotary_factor"}
    ropes = read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(parameters or None)),
        scaling=raw.rope_scaling,
        theta=10_000.0 if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )
    return dim, ropes.full, ropes.max_positions


def _sizes(raw: RawMamba, expand: int, mamba: MambaConfig, keys: tuple[str, str, str, str, str]) -> MambaConfig:
    """Checked: `keys` are what the config calls heads, head_dim, groups, state_dim and kernel."""
    values = (mamba.heads, mamba.head_dim, mamba.groups, mamba.state_dim, mamba.kernel)
    positive = dict(zip(keys, values, strict=True)) | {
        key: getattr(raw, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")
    }
    require_positive(**positive)
    require_kernel(keys[4], mamba.kernel)
    if mamba.inner != expand * raw.hidden_size:
        raise ModelError(f"{mamba.heads} heads of {mamba.head_dim} are not {expand} * hidden_size {raw.hidden_size}")
    if mamba.heads % mamba.groups:
        raise ModelError(f"{keys[2]} {mamba.groups}: {mamba.heads} heads do not divide by it")
    return mamba
