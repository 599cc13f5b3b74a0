"""Reads the `config.json` of models with short convolutions (LFM2), as strictly as `hf_config` reads the others'."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    ConvolutionConfig,
    LayerConfig,
    Mixture,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_rope import RawRope, Ropes, read_ropes
from services.worker.models.states.reading.model import head_dim_of, model_with_states, require_kernel

_THETA = 1_000_000.0
"""Where the config names no base of the rotation."""


class _RawConvolution(Struct, kw_only=True):
    """The keys that both have; defaults are those of `transformers`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    head_dim: int | None = None
    max_position_embeddings: int = 128_000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    """Another name of it, which comes first."""
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    conv_bias: bool = False
    conv_L_cache: int = 3
    layer_types: list[str] | None = None
    full_attn_idxs: list[int] | None = None


class _RawLfm2(_RawConvolution, kw_only=True):
    intermediate_size: int = 12288
    block_ff_dim: int | None = None
    """Another name of it, which comes first."""
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256


class _RawLfm2Moe(_RawConvolution, kw_only=True):
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


_LAYER_TYPES = {"conv": True, "full_attention": False}


def convolution_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says of a model of `architecture`. `stop_tokens`: what ends its texts, given those
    that the config names. Raises ModelError, and msgspec's errors."""
    if architecture == "Lfm2ForCausalLM":
        lfm2 = msgspec.json.decode(text, type=_RawLfm2, strict=True)
        return _model_config(lfm2, architecture, _columns(lfm2), stop_tokens(lfm2.eos_token_id))
    raw = msgspec.json.decode(text, type=_RawLfm2Moe, strict=True)
    config = _model_config(raw, architecture, raw.intermediate_size, stop_tokens(raw.eos_token_id))
    layers = tuple(
        msgspec.structs.replace(layer, mixes=number >= raw.num_dense_layers)
        for number, layer in enumerate(config.layers)
    )
    return msgspec.structs.replace(config, layers=layers, mixture=_mixture(raw))


def _columns(raw: _RawLfm2) -> int:
    """Of an MLP: two thirds of what is said, rounded up, where the config says that it is to be adjusted."""
    size = raw.intermediate_size if raw.block_ff_dim is None else raw.block_ff_dim
    if not raw.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if raw.block_ffn_dim_multiplier is None:
        return size
    require_positive(block_multiple_of=raw.block_multiple_of)
    return -(-int(raw.block_ffn_dim_multiplier * size) // raw.block_multiple_of) * raw.block_multiple_of


def _model_config(raw: _RawConvolution, architecture: str, columns: int, eos: tuple[int, ...]) -> ModelConfig:
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=columns,
        num_hidden_layers=raw.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=raw.max_position_embeddings,
    )
    head_dim, ropes = head_dim_of(raw.hidden_size, heads, kv_heads, raw.head_dim), _ropes(raw)
    require_kernel("conv_L_cache", raw.conv_L_cache)
    raw.tie_word_embeddings = raw.tie_word_embeddings if raw.tie_embedding is None else raw.tie_embedding
    return model_with_states(
        *(raw, architecture),
        layers=tuple(LayerConfig(None, ropes.full, has_state=each) for each in _with_states(raw)),
        states=ConvolutionConfig(heads=raw.hidden_size, kernel=raw.conv_L_cache, bias=raw.conv_bias),
        max_positions=ropes.max_positions,
        norm_eps=raw.norm_eps,
        eos=eos,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=columns,
        qk_norm=True,
    )


def _ropes(raw: _RawConvolution) -> Ropes:
    return read_ropes(
        parameters=raw.rope_parameters,
        scaling=raw.rope_scaling,
        theta=_THETA if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )


def _with_states(raw: _RawConvolution) -> list[bool]:
    """For each layer, whether it is a convolution; the others attend."""
    count = raw.num_hidden_layers
    if raw.layer_types is None:
        attending = range(count) if raw.full_attn_idxs is None else raw.full_attn_idxs
        wrong = [index for index in attending if not 0 <= index < count]
        if wrong:
            raise ModelError(f"full_attn_idxs {wrong[0]}: there are {count} layers")
        return [number not in attending for number in range(count)]
    return layer_kinds("layer_types", raw.layer_types, _LAYER_TYPES, count)


def _mixture(raw: _RawLfm2Moe) -> Mixture:
    require_positive(num_experts=raw.num_experts, moe_intermediate_size=raw.moe_intermediate_size)
    if not 1 <= raw.num_experts_per_tok <= raw.num_experts:
        raise ModelError(f"num_experts_per_tok {raw.num_experts_per_tok}: there are {raw.num_experts} experts")
    return Mixture(
        experts=raw.num_experts,
        chosen=raw.num_experts_per_tok,
        intermediate_size=raw.moe_intermediate_size,
        renormalised=raw.norm_topk_prob,
        scoring="sigmoid",
        corrected=raw.use_expert_bias,
        scale=raw.routed_scaling_factor,
    )
