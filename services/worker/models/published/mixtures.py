"""Reads the `config.json` of mixtures of experts whose Python code comes with their checkpoints: Ling and Ring (Bailing
MoE, 1 and 2), Sarvam's two, Param2, and the first DeepSeek-MoE (arXiv:2401.06066)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import LayerConfig, Mixture, ModelError
from services.worker.models.published.layout import Published, converted

_Keys = Mapping[str, Any]


class _RawMixture(Struct, kw_only=True):
    """What all of them say by the same names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False


class _RawDeepSeek(_RawMixture, kw_only=True):
    n_routed_experts: int
    n_shared_experts: int = 0
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy"] = "greedy"
    routed_scaling_factor: float = 1.0
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    attention_bias: bool = False


def deepseek(raw: _Keys) -> Published:
    """The first DeepSeek-MoE, and DeepSeek-OCR 2's language model: a Llama but for its experts. Raises ModelError, and
    msgspec.ValidationError."""
    own = converted(raw, _RawDeepSeek)
    mixture = Mixture(
        experts=own.n_routed_experts,
        chosen=own.num_experts_per_tok,
        intermediate_size=own.moe_intermediate_size,
        renormalised=own.norm_topk_prob,
        shared_size=own.n_shared_experts * own.moe_intermediate_size or None,
        shared_gated=False,
        scale=own.routed_scaling_factor,
    )
    if (kinds := own.mlp_layer_types) is None:
        return _published(dict(raw), own, mixture, {})
    if len(kinds) != own.num_hidden_layers:
        raise ModelError(f"mlp_layer_types names {len(kinds)} layers, num_hidden_layers {own.num_hidden_layers}")
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise ModelError(f"mlp_layer_types {kinds} is not supported: layers with an MLP come first")
    return _published(dict(raw), replace(own, first_k_dense_replace=dense), mixture, {})


class _RawBailing(_RawMixture, kw_only=True):
    num_experts: int
    num_shared_experts: int = 0
    head_dim: int | None = None
    use_bias: bool = False
    use_qkv_bias: bool = False
    norm_head: Literal[False] = False
    norm_softmax: Literal[False] = False
    moe_shared_expert_intermediate_size: int | None = None
    multi_gate: Literal[False] = False


def bailing(raw: _Keys) -> Published:
    """Ling-lite and Ling-plus. Raises ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawBailing)
    return _bailing(raw, own, _mixture_of(own), {})


class _RawBailing2(_RawBailing, kw_only=True):
    use_qk_norm: bool = True
    partial_rotary_factor: float = 1.0
    rope_parameters: dict[str, Any] | None = None
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    score_function: Literal["sigmoid"] = "sigmoid"
    moe_router_enable_expert_bias: Literal[True] = True


def bailing_2(raw: _Keys) -> Published:
    """Ling 2.0 and Ring 1T. Raises ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawBailing2)
    dim = own.head_dim or own.hidden_size // max(own.num_attention_heads, 1)
    rope = own.rope_parameters or {}
    part = rope.get("partial_rotary_factor", own.partial_rotary_factor)
    rotated = int(dim * part)
    if not 0 < rotated <= dim or rotated % 2:
        raise ModelError(f"partial_rotary_factor {part}: {rotated} of {dim} elements of a head would be rotated")
    mixture = replace(
        _mixture_of(own),
        renormalised=True,  # whatever `norm_topk_prob` says
        scoring="sigmoid",
        groups=own.n_group,
        chosen_groups=own.topk_group,
        corrected=True,
        scale=own.routed_scaling_factor,
        exact_router=True,
    )
    if own.n_group < 1 or own.num_experts % own.n_group or own.num_experts // own.n_group < 2:
        raise ModelError(f"n_group {own.n_group}: {own.num_experts} experts are no groups of two or more")
    if not 1 <= own.topk_group <= own.n_group:
        raise ModelError(f"topk_group {own.topk_group}: there are {own.n_group} groups")
    if own.num_experts_per_tok > own.topk_group * (own.num_experts // own.n_group):
        raise ModelError(
            f"num_experts_per_tok {own.num_experts_per_tok}: topk_group {own.topk_group} has not so many experts"
        )
    rotation = {} if rotated == dim else {"rotary_dim": rotated}
    if rope:  # as transformers 5 writes it, with how much of a head is rotated
        raw = {**raw, "rope_parameters": {key: rope[key] for key in rope if key != "partial_rotary_factor"}}
    return _bailing(raw, own, mixture, {"qk_norm": own.use_qk_norm, **rotation})


_SARVAM = {"first_k_dense_replace": 1, "num_shared_experts": 1, "routed_scaling_factor": 2.5}
"""What Sarvam's configurations may leave out."""


def sarvam(raw: _Keys) -> Published:
    """Sarvam 30B: a Ling 2.0 with other defaults. Raises ModelError, and msgspec.ValidationError."""
    _check_renormalised(raw)
    defaults = {**_SARVAM, "rope_theta": 8_000_000.0, "rms_norm_eps": 1e-6}
    return bailing_2({**defaults, **raw, "num_shared_experts": _shared_of(raw)})


class _RawParam2(Struct):
    use_qk_norm: bool
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int | None = None


def param2(raw: _Keys) -> Published:
    """Param2 17B: a Ling 2.0 whose shared experts' size is that of all together. Raises ModelError, and
    msgspec.ValidationError."""
    _check_renormalised(raw)
    own, count = msgspec.convert(raw, _RawParam2), _shared_of(raw)
    size = own.moe_shared_expert_intermediate_size or own.moe_intermediate_size * count
    shared = {"num_shared_experts": min(count, 1), "moe_shared_expert_intermediate_size": size or None}
    return bailing_2({"first_k_dense_replace": 1, **raw, **shared})


class _RawSarvamLatent(_RawMixture, kw_only=True):
    num_experts: int
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    score_function: Literal["sigmoid"] = "sigmoid"
    moe_router_enable_expert_bias: Literal[True] = True
    moe_shared_expert_intermediate_size: int | None = None
    use_bias: Literal[False] = False
    use_qkv_bias: Literal[False] = False


def sarvam_latent(raw: _Keys) -> Published:
    """Sarvam 105B: a DeepSeek-V3 whose keys have other names. Raises ModelError, and msgspec.ValidationError."""
    own = converted({**_SARVAM, **raw}, _RawSarvamLatent)
    if own.moe_shared_expert_intermediate_size not in (None, own.moe_intermediate_size):
        raise ModelError(
            f"moe_shared_expert_intermediate_size {own.moe_shared_expert_intermediate_size} is not supported; "
            f"moe_intermediate_size {own.moe_intermediate_size} is"
        )
    if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
        raise ModelError("rope_scaling is missing: implementations differ in what it is then")
    base = {key: value for key, value in raw.items() if key not in ("head_dim", "q_head_dim")}
    base |= {
        "n_routed_experts": own.num_experts,
        "n_shared_experts": _shared_of(raw),
        "first_k_dense_replace": own.first_k_dense_replace,
        "n_group": own.n_group,
        "topk_group": own.topk_group,
        "routed_scaling_factor": own.routed_scaling_factor,
        "norm_topk_prob": own.norm_topk_prob,
        "q_lora_rank": own.q_lora_rank,
    }
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(base.get(key), dict):
            base[key] = {name: "yarn" if value == "deepseek_yarn" else value for name, value in base[key].items()}
    return Published(base, {}, like="DeepseekV3ForCausalLM")


def _check_renormalised(raw: _Keys) -> None:
    """Of those whose code looks at it, as that of Ling 2.0 does not. Raises ModelError."""
    if raw.get("norm_topk_prob") is False:
        raise ModelError("norm_topk_prob false is not supported; true is")


def _shared_of(raw: _Keys) -> int:
    shared = raw.get("num_shared_experts", 1)
    return 0 if shared is None else msgspec.convert(shared, int)


def _mixture_of(own: _RawBailing) -> Mixture:
    each = own.moe_shared_expert_intermediate_size or own.moe_intermediate_size
    return Mixture(
        experts=own.num_experts,
        chosen=own.num_experts_per_tok,
        intermediate_size=own.moe_intermediate_size,
        renormalised=own.norm_topk_prob,
        shared_size=each * own.num_shared_experts or None,
        shared_gated=False,
    )


def _bailing(raw: _Keys, own: _RawBailing, mixture: Mixture, changes: dict[str, Any]) -> Published:
    if own.use_bias:
        raise ModelError("use_bias true is not supported: MLPs and experts have no biases here")
    kept = {key: value for key, value in raw.items() if key not in ("qkv_bias", "attention_bias", "mlp_bias")}
    return _published(kept, own, mixture, {"qkv_bias": own.use_qkv_bias, **changes})


def all_mixing(base: dict[str, Any], mixture: Mixture, layers: int, changes: dict[str, Any]) -> Published:
    """Each of so many layers has `mixture`. Raises ModelError for one that there cannot be."""
    _check(mixture)
    return Published(base, {"mixture": mixture, **changes}, arranged=partial(_layers, count=layers, dense=0))


def _published(base: dict[str, Any], own: _RawMixture, mixture: Mixture, changes: dict[str, Any]) -> Published:
    _check(mixture)
    arranged = partial(_layers, count=own.num_hidden_layers, dense=own.first_k_dense_replace)
    return Published(base, {"mixture": mixture, **changes}, arranged=arranged)


def _check(mixture: Mixture) -> None:
    sizes = (mixture.experts, mixture.intermediate_size, mixture.shared_size or 1)
    if min(sizes) < 1 or not 1 <= mixture.chosen <= mixture.experts:
        raise ModelError(
            f"num_experts_per_tok {mixture.chosen} of {mixture.experts} experts of {mixture.intermediate_size} columns "
            f"beside shared ones of {mixture.shared_size}"
        )


def _layers(layer: LayerConfig, count: int, dense: int) -> tuple[LayerConfig, ...]:
    """The first `dense` ones have an MLP."""
    return tuple(replace(layer, mixes=number >= dense) for number in range(count))
