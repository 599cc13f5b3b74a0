"""Reads the `config.json` of Mistral Small 4's language model: a DeepSeek-V3 whose router is a softmax, and whose
queries grow with the position."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_layers.latent import PositionSteps
from services.worker.models.published.layout import Published

MISTRAL_4 = "Mistral4ForCausalLM"
_LIKE = "DeepseekV3ForCausalLM"
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
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
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = 2


_QUERY_RANK = 1024
"""Where the config does not say; `null` says that queries have none."""


class _RawScale(Struct, kw_only=True):
    llama_4_scaling_beta: float | None = None
    original_max_position_embeddings: int | None = None


def mistral_small(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    said = {key: value for key, value in raw.items() if value is not None}
    own = msgspec.convert(said, _RawMistral)
    if own.n_group != 1:
        raise ModelError(f"n_group {own.n_group} is not supported; 1 is")
    rope = own.rope_parameters or said.get("rope_scaling") or _YARN
    if not isinstance(rope, dict):
        raise ModelError(f"rope_scaling {rope!r} is not supported; an object of a rotation's parameters is")
    scale = msgspec.convert(rope, _RawScale)
    beta, every = scale.llama_4_scaling_beta, scale.original_max_position_embeddings
    if beta is None or every is None or every < 1:
        raise ModelError(
            f"rope_parameters: llama_4_scaling_beta {beta} and original_max_position_embeddings {every} are not "
            "supported; a number and a positive one are"
        )
    base = {key: value for key, value in (msgspec.to_builtins(own) | said).items() if key not in ("head_dim",)}
    base |= {
        "n_routed_experts": said.get("num_local_experts", own.n_routed_experts),
        "q_lora_rank": raw.get("q_lora_rank", _QUERY_RANK),
        "rope_parameters": {key: value for key, value in rope.items() if key not in _OF_QUERIES},
        "rope_scaling": None,
    }
    return Published(base, {}, like=_LIKE, revised=partial(_revised, PositionSteps(beta=beta, length=every)))


def _revised(steps: PositionSteps, config: ModelConfig) -> ModelConfig:
    assert config.latent is not None, "it is a DeepSeek-V3"
    mixture = config.mixture and replace(config.mixture, scoring="softmax", corrected=False)
    return replace(config, latent=replace(config.latent, steps=steps), mixture=mixture)
