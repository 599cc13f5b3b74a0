"""Reads the `config.json` of Nemotron-H, whose every layer is a Mamba-2 mixer, attention, an MLP or a mixture alone."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.models.config import LayerConfig, MambaConfig, Mixture, ModelConfig, ModelError, require_positive
from services.worker.models.hf_layers.tensor_names import NEMOTRON_H
from services.worker.models.states.reading.mamba import RawMamba, decode_mamba
from services.worker.models.states.reading.model import (
    NO_ROPE,
    head_dim_of,
    model_with_states,
    require_groups,
    require_kernel,
)


class _RawNemotronH(RawMamba, kw_only=True):
    """Defaults are those of `transformers`."""

    num_hidden_layers: int = 0
    """Not used: what says the kinds of layers says how many there are."""
    hybrid_override_pattern: str | None = None
    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    attention_head_dim: int | None = None
    """The older name of it."""
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    conv_kernel: int = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True


_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def nemotron_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. An MLP or a mixture is a part of the layer of the mixer before it.
    `stop_tokens`: what ends its texts, given those that the config names. Raises ModelError, and msgspec's errors."""
    assert architecture == NEMOTRON_H
    raw = decode_mamba(text, _RawNemotronH)
    kinds, heads = _kinds(raw), raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    _refuse_unsupported(raw, kinds, kv_heads)
    head_dim = head_dim_of(raw.hidden_size, heads, kv_heads, raw.head_dim or raw.attention_head_dim or 128)
    return model_with_states(
        *(raw, architecture),
        layers=_layers(kinds),
        states=MambaConfig(
            heads=raw.mamba_num_heads,
            head_dim=raw.mamba_head_dim,
            groups=raw.n_groups,
            state_dim=raw.ssm_state_size,
            kernel=raw.conv_kernel,
            conv_bias=raw.use_conv_bias,
            bias=raw.use_bias,
        ),
        max_positions=raw.max_position_embeddings,
        norm_eps=raw.layer_norm_epsilon,
        eos=stop_tokens(raw.eos_token_id),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size if "mlp" in kinds else 0,
        activation="relu2",
        mlp_bias=raw.mlp_bias,
        mixture=_mixture(raw) if "moe" in kinds else None,
        rotary_dim=0,
    )


def _kinds(raw: _RawNemotronH) -> list[str]:
    """Of each of the checkpoint's layers."""
    names = raw.layers_block_type or raw.layer_types
    if names is not None:
        named = [_OTHER_NAMES.get(name, name) for name in names]
    elif raw.hybrid_override_pattern is not None:
        named = [_LETTERS.get(letter, letter) for letter in raw.hybrid_override_pattern]
    else:
        raise ModelError("layers_block_type and hybrid_override_pattern are missing: one says what each layer is")
    unknown = sorted(set(named) - set(_LETTERS.values()))
    if unknown:
        raise ModelError(
            f"layers_block_type {unknown[0]!r} is not supported; supported: {', '.join(_LETTERS.values())}"
        )
    return named


def _layers(kinds: list[str]) -> tuple[LayerConfig, ...]:
    layers: list[LayerConfig] = []
    for number, kind in enumerate(kinds):
        mixer = kinds[number - 1] if number else "nothing"
        if kind in ("mamba", "attention"):
            behind = kinds[number + 1] if number + 1 < len(kinds) else ""
            has_mlp = behind in ("mlp", "moe")
            layers.append(
                LayerConfig(
                    *(None, NO_ROPE, behind == "moe", kind == "mamba"),
                    has_mlp=has_mlp,
                    blocks=(number, number + has_mlp),
                )
            )
        elif mixer not in ("mamba", "attention"):
            raise ModelError(f"layers_block_type: layer {number}, {kind}, stands behind {mixer}, not behind a mixer")
    if not any(layer.has_state for layer in layers):
        raise ModelError("layers_block_type: no layer is mamba")
    return tuple(layers)


def _refuse_unsupported(raw: _RawNemotronH, kinds: list[str], kv_heads: int) -> None:
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_attention_heads=raw.num_attention_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=raw.max_position_embeddings,
        mamba_num_heads=raw.mamba_num_heads,
        mamba_head_dim=raw.mamba_head_dim,
        n_groups=raw.n_groups,
        ssm_state_size=raw.ssm_state_size,
    )
    require_kernel("conv_kernel", raw.conv_kernel)
    if raw.mamba_num_heads % raw.n_groups:
        raise ModelError(f"n_groups {raw.n_groups}: {raw.mamba_num_heads} heads do not divide by it")
    if raw.mlp_hidden_act != "relu2":
        raise ModelError(f"mlp_hidden_act {raw.mlp_hidden_act!r} is not supported; supported: relu2")
    if raw.mamba_hidden_act not in ("silu", "swish"):
        raise ModelError(f"mamba_hidden_act {raw.mamba_hidden_act!r} is not supported; supported: silu")
    if raw.attention_bias:
        raise ModelError("attention_bias true is not supported")
    if "moe" in kinds and raw.moe_latent_size is not None:
        raise ModelError(f"moe_latent_size {raw.moe_latent_size} is not supported: experts of whole rows alone are")
    if "moe" in kinds and raw.mlp_bias:
        raise ModelError("mlp_bias true is not supported with experts")


def _mixture(raw: _RawNemotronH) -> Mixture:
    experts, chosen, groups = raw.n_routed_experts, raw.num_experts_per_tok, raw.n_group
    require_positive(
        n_routed_experts=experts,
        moe_intermediate_size=raw.moe_intermediate_size,
        moe_shared_expert_intermediate_size=raw.moe_shared_expert_intermediate_size,
        n_group=groups,
    )
    require_groups(("n_group", groups), raw.topk_group, experts, ("num_experts_per_tok", chosen))
    return Mixture(
        experts=experts,
        chosen=chosen,
        intermediate_size=raw.moe_intermediate_size,
        renormalised=raw.norm_topk_prob,
        shared_size=raw.moe_shared_expert_intermediate_size,
        shared_gated=False,
        scoring="sigmoid",
        groups=groups,
        chosen_groups=raw.topk_group,
        corrected=True,
        scale=raw.routed_scaling_factor,
        gated=False,
        exact_router=True,
    )
