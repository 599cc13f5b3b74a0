"""Reads the `config.json` of Mistral Large 4's language model: a GLM-5 whose queries, and its indexer's, are made of
rows, and which layers are not rotated or attend to another's latents. Knows what its tensors are called in published
files, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_layers.latent import MISTRAL_LARGE_4 as MISTRAL_LARGE_4
from services.worker.models.published.layout import Published
from services.worker.models.rope import STILL

_LIKE = "GlmMoeDsaForCausalLM"
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""What `transformers` calls layers whose indexer chooses, and what it reads as that."""
_PERIOD = 4
"""Where the config does not say: each layer whose number, from 1, this divides is not rotated."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


class _RawMistralLarge(Struct, kw_only=True):
    """What GLM-5 has otherwise, or not at all; defaults are those of `transformers`."""

    vocab_size: int = 204_800
    hidden_size: int = 6144
    intermediate_size: int = 24_576
    moe_intermediate_size: int = 6144
    num_hidden_layers: int = 72
    num_attention_heads: int = 64
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 1
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = _PERIOD
    kv_source_layers: list[int] | None = None
    final_logit_softcapping: float = 30.0
    eos_token_id: int | list[int] | None = 2


_OWN = ("layer_types", "no_rope_layers", "no_rope_layer_interval", "kv_source_layers", "head_dim", "num_experts")
"""Keys that GLM-5 does not know, or reads otherwise."""


def mistral_large(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    said = {key: value for key, value in raw.items() if value is not None}
    own = msgspec.convert(said, _RawMistralLarge)
    for kind in own.layer_types or ():
        if kind not in _INDEXED:
            raise ModelError(f"layer_types {kind!r} is not supported; supported: {', '.join(_INDEXED)}")
    if own.n_group != 1:
        raise ModelError(f"n_group {own.n_group} is not supported; 1 is")
    if own.final_logit_softcapping <= 0:
        raise ModelError(f"final_logit_softcapping {own.final_logit_softcapping} is not positive")
    given = {key: value for key, value in (msgspec.to_builtins(own) | said).items() if key not in _OWN}
    made = {
        "n_routed_experts": said.get("num_experts") or own.n_routed_experts,
        "rope_parameters": own.rope_parameters or _YARN,
        "q_lora_rank": own.kv_lora_rank,  # which a GLM-5 has to have
    }
    still = _unrotated(own)
    revised = partial(_revised, still, _sources(own, still))
    return Published(given | made, {}, like=_LIKE, revised=revised)


def _revised(still: tuple[int, ...], sources: tuple[int, ...], config: ModelConfig) -> ModelConfig:
    latent, mixture = config.latent, config.mixture
    assert latent is not None, "it is a GLM-5"
    assert latent.index is not None
    latent = replace(
        latent,
        q_rank=None,
        norm_eps=config.norm_eps,
        unrotated=still,
        sources=sources,
        by_position=True,
        learned_frequencies=True,
        index=replace(latent.index, reads_rows=True),
    )
    softmax = mixture and replace(mixture, scoring="softmax", corrected=False, renormalised=True)
    layers = (replace(each, rope=STILL) if number in still else each for number, each in enumerate(config.layers))
    return replace(config, latent=latent, mixture=softmax, layers=tuple(layers))


def _unrotated(own: _RawMistralLarge) -> tuple[int, ...]:
    count, period = own.num_hidden_layers, own.no_rope_layer_interval
    if own.no_rope_layers is None and period < 1:
        raise ModelError(f"no_rope_layer_interval {period} is not positive")
    rotates = own.no_rope_layers
    if rotates is None:
        rotates = [int((number + 1) % period != 0) for number in range(count)]
    if len(rotates) < count:
        raise ModelError(f"no_rope_layers names {len(rotates)} layers, num_hidden_layers {count}")
    return tuple(number for number in range(count) if not rotates[number])


def _sources(own: _RawMistralLarge, still: tuple[int, ...]) -> tuple[int, ...]:
    """`transformers` keeps the latents of two layers that others attend to, of the last that is rotated and of the last
    that is not, whatever number stands there: so other numbers are refused."""
    sources, count = own.kv_source_layers, own.num_hidden_layers
    if sources is None:
        return ()
    if len(sources) != count:
        raise ModelError(f"kv_source_layers names {len(sources)} layers, num_hidden_layers {count}")
    lenders = {source for number, source in enumerate(sources) if source != number}
    last: dict[bool, int] = {}
    for number, source in enumerate(sources):
        if source == number:
            if number in lenders:
                last[number in still] = number
        elif last.get(number in still) != source:
            raise ModelError(
                f"kv_source_layers: layer {number} names {source}, but the last layer before it that is rotated alike "
                f"and has latents for others is {last.get(number in still)}"
            )
    return tuple(sources)


def library_name(name: str) -> str:
    """`name`, published or the library's, as the library has it in the language model alone."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name


_RULES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"^tok_embeddings\.", "model.embed_tokens."),
        (r"^lerope\.alpha$", "model.rotary_emb.alpha"),
        (r"^(layers|norm)\.", r"model.\1."),
        (r"^output\.", "lm_head."),
        (r"\.attention\.", ".self_attn."),
        (r"\.wq\.", ".q_proj."),
        (r"\.wo\.", ".o_proj."),
        (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
        (r"\.wkv_b\.", ".kv_b_proj."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.kv_a_norm\.", ".kv_a_layernorm."),
        (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
        (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"(?<!\.mlp)\.(gate|experts|shared_experts)\.", r".mlp.\1."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)
"""In this order."""
