"""What the readers of models with states share: the fields that such models have alike, and checks of sizes."""

from __future__ import annotations

from typing import Protocol

from services.worker.models.config import (
    LatentConfig,
    LayerConfig,
    Mixture,
    ModelConfig,
    ModelError,
    Multipliers,
    StateConfig,
    dtype_named,
)
from services.worker.models.rope import PlainRope
from services.worker.ops.activation import ActivationName

NO_ROPE = PlainRope(10_000.0)
"""Of layers that rotate nothing."""


class RawModel(Protocol):
    """The keys that every such `config.json` has."""

    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool
    dtype: str | None
    torch_dtype: str | None


def model_with_states(
    raw: RawModel,
    architecture: str,
    *,
    layers: tuple[LayerConfig, ...],
    states: StateConfig,
    max_positions: int,
    norm_eps: float,
    eos: tuple[int, ...],
    heads: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    intermediate_size: int = 0,
    activation: ActivationName = "silu",
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    norm_offset: bool = False,
    embedding_scale: float | None = None,
    logits_divisor: float | None = None,
    mixture: Mixture | None = None,
    latent: LatentConfig | None = None,
    gated_attention: bool = False,
    head_gates: bool = False,
    rotary_dim: int | None = None,
    rope_axes: tuple[int, ...] = (),
    multipliers: Multipliers | None = None,
) -> ModelConfig:
    """A model of `architecture` with what `raw` says of its size, and nothing of what is not named: a `head_dim` of 0
    is of one whose layers never attend. Raises ModelError for an unknown dtype."""
    scaled_by = head_dim if latent is None else latent.query_dim
    return ModelConfig(
        architecture=architecture,
        dtype=dtype_named(raw.dtype or raw.torch_dtype),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        max_positions=max_positions,
        norm_eps=norm_eps,
        activation=activation,
        attention_scale=scaled_by**-0.5 if scaled_by else 1.0,
        attention_softcap=None,
        logits_softcap=None,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
        tied_embeddings=raw.tie_word_embeddings,
        eos_token_ids=eos,
        mixture=mixture,
        latent=latent,
        states=states,
        gated_attention=gated_attention,
        head_gates=head_gates,
        rotary_dim=rotary_dim,
        rope_axes=rope_axes,
        logits_divisor=logits_divisor,
        multipliers=multipliers,
    )


def head_dim_of(hidden_size: int, heads: int, kv_heads: int, head_dim: int | None) -> int:
    """Elements of a head, where the config names none as many as `hidden_size` has for each. Raises ModelError."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
    if head_dim is None and hidden_size % heads:
        raise ModelError(f"hidden_size {hidden_size} is no multiple of {heads} heads")
    return head_dim or hidden_size // heads


def require_groups(groups: tuple[str, int], chosen_groups: int, experts: int, chosen: tuple[str, int]) -> None:
    """Raises ModelError, with the keys of `config.json` that are given beside values, where `experts` are no groups of
    two and more, as their scores are sums of the best two, or where so many are not chosen in `chosen_groups`."""
    key, count = groups
    each = experts // count
    if experts % count or each < 2:
        raise ModelError(f"{key} {count}: {experts} experts are not so many groups of two and more")
    if not 1 <= chosen_groups <= count:
        raise ModelError(f"topk_group {chosen_groups}: there are {count} groups")
    if not 1 <= chosen[1] <= each * chosen_groups:
        raise ModelError(f"{chosen[0]} {chosen[1]}: there are {each * chosen_groups} experts in {chosen_groups} groups")


def require_kernel(key: str, kernel: int) -> None:
    """Raises ModelError for a convolution that sees less than two tokens."""
    if kernel < 2:
        raise ModelError(f"{key} {kernel} is not supported; supported: 2 and more")
