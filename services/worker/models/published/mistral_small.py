"""Reads the `config.json` of the language models of Ministral 3, a Mistral, and Mistral Small 4, a DeepSeek-V3 whose
router is a softmax. Queries of both grow with the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import ModelConfig, ModelError, PositionSteps
from services.worker.models.published.layout import Published

MINISTRAL_3, MISTRAL_4 = "Ministral3ForCausalLM", "Mistral4ForCausalLM"
_LENGTH = "original_max_position_embeddings"
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    _LENGTH: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_OF_QUERIES = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
"""Keys among those of the rotation that say nothing of it here: its part of a head has a size of its own."""


class _RawMistral(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 131_072
    hidden_size: int = 4096
    intermediate_size: int = 12_288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    head_dim: int | None = None
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = 2


_QUERY_RANK = 1024
"""Where the config does not say; `null` says that queries have none."""


class _RawMinistral(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 131_072
    hidden_size: int = 4096
    intermediate_size: int = 14_336
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = 2


class _RawScale(Struct, kw_only=True):
    llama_4_scaling_beta: float | None = None
    original_max_position_embeddings: int | None = None


def ministral(raw: Mapping[str, Any]) -> Published:
    """Ministral 3. Raises ModelError, and msgspec.ValidationError."""
    said = {key: value for key, value in raw.items() if value is not None}
    own = msgspec.convert(said, _RawMinistral)
    rotation, steps = _rotation(said, {**_YARN, "rope_theta": 1_000_000.0, "factor": 16.0, _LENGTH: 16_384})
    base = msgspec.to_builtins(own) | said | rotation | {"sliding_window": said.get("sliding_window")}
    if raw.get("num_key_value_heads", own.num_key_value_heads) is None:
        base["num_key_value_heads"] = own.num_attention_heads
    return Published(base, {"query_steps": steps}, like="MistralForCausalLM")


def mistral_small(raw: Mapping[str, Any]) -> Published:
    """Mistral Small 4. Raises ModelError, and msgspec.ValidationError."""
    said = {key: value for key, value in raw.items() if value is not None}
    own = msgspec.convert(said, _RawMistral)
    if own.n_group != 1:
        raise ModelError(f"n_group {own.n_group} is not supported; 1 is")
    rotation, steps = _rotation(said, _YARN)
    dim = own.head_dim or own.qk_nope_head_dim + own.qk_rope_head_dim
    share = (own.rope_parameters or {}).get("partial_rotary_factor", own.qk_rope_head_dim / dim)
    if int(dim * share) != own.qk_rope_head_dim:
        raise ModelError(
            f"partial_rotary_factor {share} of head_dim {dim} is not qk_rope_head_dim {own.qk_rope_head_dim}"
        )
    base = {key: value for key, value in (msgspec.to_builtins(own) | said | rotation).items() if key != "head_dim"}
    base |= {
        "n_routed_experts": said.get("num_local_experts", own.n_routed_experts),
        "q_lora_rank": raw.get("q_lora_rank", _QUERY_RANK),
    }
    return Published(base, {"query_steps": steps}, like="DeepseekV3ForCausalLM", revised=_with_softmax)


def _with_softmax(config: ModelConfig) -> ModelConfig:
    mixture = config.mixture and replace(config.mixture, scoring="softmax", corrected=False, exact_router=False)
    return replace(config, mixture=mixture)


def _rotation(said: Mapping[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], PositionSteps | None]:
    """The keys of a rotation, and by what queries grow, which is said beside it; None: they do not (Devstral 2)."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or defaults
    if not isinstance(rope, dict):
        raise ModelError(f"rope_scaling {rope!r} is not supported; an object of a rotation's parameters is")
    scale = msgspec.convert(rope, _RawScale)
    beta, every = scale.llama_4_scaling_beta, scale.original_max_position_embeddings
    if beta is None or every is None or every < 1:
        raise ModelError(
            f"rope_parameters: llama_4_scaling_beta {beta} and {_LENGTH} {every} are not supported; a number and a "
            "positive one are"
        )
    alone = {key: value for key, value in rope.items() if key not in _OF_QUERIES}
    return {"rope_parameters": alone, "rope_scaling": None}, PositionSteps(beta, every) if beta else None
