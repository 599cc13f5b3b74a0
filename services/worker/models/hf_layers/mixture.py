"""Reads from a Hugging Face config which layers are mixtures of experts, and of what kind. No torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.hf_layers.keys import first_given
from services.worker.ops.activation import Activation

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Mixture(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Experts in place of an MLP, of which each token goes through some (Shazeer et al., arXiv:1701.06538)."""

    experts: int
    chosen: int
    """Experts of each token: those with the greatest chances."""
    intermediate_size: int
    """Of each expert."""
    renormalised: bool
    """The chances of the chosen ones are scaled to add up to 1."""
    shared_size: int | None = None
    """Intermediate size of the experts that every token goes through besides, where there are any."""
    shared_gated: bool = True
    """How much of their output is taken is computed, by one more output of the router's kind (Qwen2-MoE)."""
    scoring: Scoring = "softmax"
    groups: int = 1
    """The experts are so many groups of neighbours (DeepSeek)."""
    chosen_groups: int = 1
    """A token's experts are of the best so many groups."""
    corrected: bool = False
    """There is a bias for each expert, which counts where experts are chosen, and not in their chances. A group is as
    good as its best two experts then, else as its best one."""
    scale: float = 1.0
    """What the chances of the chosen ones are multiplied by."""
    transposed: bool = False
    """Checkpoints may have inputs before outputs in tensors of all experts (Qwen3-VL)."""
    biased: bool = False
    """Router and experts have biases, and tensors are laid out as gpt-oss has them."""
    gated: bool = True
    """Experts have gates beside ups."""
    exact_router: bool = False
    """The router's matrix and its logits are float32, whatever the run's type is."""
    activation: Activation | None = None
    """Of experts, where MLPs have another (HY4)."""


class RawMixture(Struct, kw_only=True):
    """The keys of `config.json` that a mixture follows from."""

    architectures: list[str]
    num_hidden_layers: int
    intermediate_size: int
    num_experts: int | None = None
    num_local_experts: int | None = None
    """Mixtral's name of it, and transformers 5's of Qwen3-MoE's."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    mlp_layer_types: list[str] | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int | None = None
    moe_layer_freq: int = 1
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    routed_scaling_factor: float | None = None


class _Routing(Struct, frozen=True, kw_only=True):
    """How one of DeepSeek's families routes, and what its config may leave out."""

    scoring: Scoring
    methods: tuple[str, ...]
    """What `topk_method` may be; the first one where it is left out."""
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared: int
    """Experts that every token goes through."""
    dense: int
    """Layers before the first one that mixes."""
    renormalised: bool
    """Where `norm_topk_prob` is left out."""


class _Defaults(Struct, frozen=True, kw_only=True):
    """What a family's config may leave out, and what it implies."""

    experts: int
    chosen: int
    size: int | None
    """None: an expert is as large as an MLP would be, in every layer."""
    shared_size: int | None = None
    renormalised: bool | None = None
    """None: `norm_topk_prob` says so."""
    routing: _Routing | None = None
    """What DeepSeek's routers do."""
    transposed: bool = False
    biased: bool = False


_LIMITED = "group_limited_greedy"

_FAMILIES = {
    "MixtralForCausalLM": _Defaults(experts=8, chosen=2, size=None, renormalised=True),
    "Qwen2MoeForCausalLM": _Defaults(experts=60, chosen=4, size=1408, shared_size=5632),
    "Qwen3MoeForCausalLM": _Defaults(experts=128, chosen=8, size=768),
    "Qwen3VLMoeForCausalLM": _Defaults(experts=60, chosen=4, size=1408, renormalised=True, transposed=True),
    "Qwen3NextForCausalLM": _Defaults(experts=512, chosen=10, size=512, shared_size=512),
    "Qwen3_5MoeForCausalLM": _Defaults(experts=256, chosen=8, size=512, shared_size=512, renormalised=True),
    "GptOssForCausalLM": _Defaults(experts=128, chosen=4, size=None, renormalised=True, biased=True),
    "DeepseekV2ForCausalLM": _Defaults(
        experts=64,
        chosen=6,
        size=1407,
        routing=_Routing(scoring="softmax", methods=("greedy", _LIMITED), shared=2, dense=0, renormalised=False),
    ),
    "DeepseekV3ForCausalLM": _Defaults(
        experts=256,
        chosen=8,
        size=2048,
        routing=_Routing(
            scoring="sigmoid",
            methods=("noaux_tc",),
            groups=8,
            chosen_groups=4,
            scale=2.5,
            shared=1,
            dense=3,
            renormalised=True,
        ),
    ),
}
_FAMILIES["DeepseekV32ForCausalLM"] = _V3 = _FAMILIES["DeepseekV3ForCausalLM"]
assert _V3.routing is not None
_GLM_ROUTING = replace(_V3.routing, groups=1, chosen_groups=1, scale=1.0, dense=1)
_FAMILIES["Glm4vMoeForCausalLM"] = _Defaults(experts=128, chosen=8, size=1408, routing=_GLM_ROUTING)
_FAMILIES["GlmMoeDsaForCausalLM"] = replace(_V3, routing=replace(_V3.routing, groups=1, chosen_groups=1))


class MixtureLayers(Struct, frozen=True):
    """A model's mixture, and for each of its layers whether that takes the place of its MLP."""

    mixture: Mixture | None
    mixing: tuple[bool, ...]


def read_mixture(raw: RawMixture) -> MixtureLayers:
    """Which layers are mixtures, and of what kind. Raises ValueError, naming key and value, for impossible numbers."""
    family = next((_FAMILIES[name] for name in raw.architectures if name in _FAMILIES), None)
    if family is None or (family.size is not None and raw.num_experts == 0):
        return MixtureLayers(None, (False,) * raw.num_hidden_layers)
    if family.routing is not None:
        return _deepseek(raw, family, family.routing)
    mixture = Mixture(
        experts=first_given(raw.num_experts, raw.num_local_experts, family.experts),
        chosen=first_given(raw.num_experts_per_tok, family.chosen),
        intermediate_size=first_given(raw.moe_intermediate_size, family.size) if family.size else raw.intermediate_size,
        renormalised=bool(raw.norm_topk_prob) if family.renormalised is None else family.renormalised,
        shared_size=family.shared_size and first_given(raw.shared_expert_intermediate_size, family.shared_size),
        transposed=family.transposed,
        biased=family.biased,
    )
    _check(raw, mixture)
    return MixtureLayers(
        mixture, tuple(family.size is None or _mixes(raw, layer) for layer in range(raw.num_hidden_layers))
    )


def _mixes(raw: RawMixture, layer: int) -> bool:
    return layer not in (raw.mlp_only_layers or ()) and (layer + 1) % raw.decoder_sparse_step == 0


def _deepseek(raw: RawMixture, family: _Defaults, routing: _Routing) -> MixtureLayers:
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437)."""
    _require("scoring_func", raw.scoring_func or routing.scoring, (routing.scoring,))
    _require("topk_method", raw.topk_method or routing.methods[0], routing.methods)
    _require("moe_layer_freq", raw.moe_layer_freq, (1,))
    corrected = routing.scoring == "sigmoid"
    if raw.norm_topk_prob and not corrected:
        raise ValueError(f"norm_topk_prob true is not supported for {raw.architectures[0]}")
    grouped = corrected or raw.topk_method == _LIMITED
    size = first_given(raw.moe_intermediate_size, family.size)
    shared = first_given(raw.n_shared_experts, routing.shared)
    mixture = Mixture(
        experts=first_given(raw.n_routed_experts, raw.num_experts, raw.num_local_experts, family.experts),
        chosen=first_given(raw.num_experts_per_tok, family.chosen),
        intermediate_size=size,
        renormalised=routing.renormalised if raw.norm_topk_prob is None else raw.norm_topk_prob,
        shared_size=shared * size or None,
        shared_gated=False,
        scoring=routing.scoring,
        groups=first_given(raw.n_group, routing.groups) if grouped else 1,
        chosen_groups=first_given(raw.topk_group, routing.chosen_groups) if grouped else 1,
        corrected=corrected,
        scale=first_given(raw.routed_scaling_factor, routing.scale),
        exact_router=True,
    )
    _check(raw, mixture)
    _check_groups(mixture)
    if raw.mlp_layer_types is not None:
        return MixtureLayers(mixture, _named_mixing(raw, raw.mlp_layer_types))
    dense = first_given(raw.first_k_dense_replace, routing.dense)
    return MixtureLayers(mixture, tuple(layer >= dense for layer in range(raw.num_hidden_layers)))


def _named_mixing(raw: RawMixture, types: list[str]) -> tuple[bool, ...]:
    for kind in types:
        _require("mlp_layer_types", kind, ("dense", "sparse"))
    if len(types) < raw.num_hidden_layers:
        raise ValueError(f"mlp_layer_types names {len(types)} layers, num_hidden_layers {raw.num_hidden_layers}")
    return tuple(kind == "sparse" for kind in types[: raw.num_hidden_layers])


def _require(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} {value!r} is not supported; supported: {', '.join(map(str, allowed))}")


def _check_groups(mixture: Mixture) -> None:
    if mixture.groups < 1 or mixture.experts % mixture.groups:
        raise ValueError(f"n_group {mixture.groups}: {mixture.experts} experts do not divide by it")
    if not 1 <= mixture.chosen_groups <= mixture.groups:
        raise ValueError(f"topk_group {mixture.chosen_groups}: there are {mixture.groups} groups")
    of_a_group = mixture.experts // mixture.groups
    if mixture.corrected and of_a_group < 2:
        raise ValueError(f"n_group {mixture.groups}: a group of {mixture.experts} experts needs two of them")
    if mixture.chosen > mixture.chosen_groups * of_a_group:
        raise ValueError(
            f"num_experts_per_tok {mixture.chosen}: there are {mixture.chosen_groups * of_a_group} experts in "
            f"{mixture.chosen_groups} groups"
        )


def _check(raw: RawMixture, mixture: Mixture) -> None:
    positive = {
        "decoder_sparse_step": raw.decoder_sparse_step,
        "num_experts": mixture.experts,
        "moe_intermediate_size": mixture.intermediate_size,
        "shared_expert_intermediate_size": mixture.shared_size,
    }
    for key, value in positive.items():
        if value is not None and value < 1:
            raise ValueError(f"{key} {value} is not positive")
    if not 1 <= mixture.chosen <= mixture.experts:
        raise ValueError(f"num_experts_per_tok {mixture.chosen}: there are {mixture.experts} experts")
