"""Reads from a Hugging Face config which layers are mixtures of experts, and of what kind. No torch."""

from __future__ import annotations

from msgspec import Struct


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
    """Intermediate size of the expert that every token goes through besides, where there is one (Qwen2-MoE)."""


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
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class _Defaults(Struct, frozen=True, kw_only=True):
    """What a family's config may leave out, and what it implies."""

    experts: int
    chosen: int
    size: int | None
    """None: an expert is as large as an MLP would be, in every layer."""
    shared_size: int | None = None
    renormalised: bool | None = None
    """None: `norm_topk_prob` says so."""


_FAMILIES = {
    "MixtralForCausalLM": _Defaults(experts=8, chosen=2, size=None, renormalised=True),
    "Qwen2MoeForCausalLM": _Defaults(experts=60, chosen=4, size=1408, shared_size=5632),
    "Qwen3MoeForCausalLM": _Defaults(experts=128, chosen=8, size=768),
}


class MixtureLayers(Struct, frozen=True):
    """A model's mixture, and for each of its layers whether that takes the place of its MLP."""

    mixture: Mixture | None
    mixing: tuple[bool, ...]


def read_mixture(raw: RawMixture) -> MixtureLayers:
    """Which layers are mixtures, and of what kind. Raises ValueError, naming key and value, for impossible numbers."""
    family = next((_FAMILIES[name] for name in raw.architectures if name in _FAMILIES), None)
    if family is None or (family.size is not None and raw.num_experts == 0):
        return MixtureLayers(None, (False,) * raw.num_hidden_layers)
    mixture = Mixture(
        experts=_given(raw.num_experts, raw.num_local_experts, family.experts),
        chosen=_given(raw.num_experts_per_tok, family.chosen),
        intermediate_size=_given(raw.moe_intermediate_size, family.size) if family.size else raw.intermediate_size,
        renormalised=raw.norm_topk_prob if family.renormalised is None else family.renormalised,
        shared_size=family.shared_size and _given(raw.shared_expert_intermediate_size, family.shared_size),
    )
    _check(raw, mixture)
    return MixtureLayers(
        mixture, tuple(family.size is None or _mixes(raw, layer) for layer in range(raw.num_hidden_layers))
    )


def _mixes(raw: RawMixture, layer: int) -> bool:
    return layer not in (raw.mlp_only_layers or ()) and (layer + 1) % raw.decoder_sparse_step == 0


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


def _given(*values: int | None) -> int:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
