"""Tiny mixtures of experts in published layouts: GLM-4's in the library, with the router that each has."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from tests.support.models.published_shapes import DIM, HEADS, HIDDEN, LAYERS, QKV, Layout, plain


def _softmax_router(model: Any) -> None:
    """As the first releases have it: chances of all experts, of which the best are taken, with their sum 1 or not."""

    def routed(gate: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(rows.view(-1, gate.hidden_dim).float(), gate.weight.float())
        weights, chosen = logits.softmax(dim=-1).topk(gate.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = MethodType(routed, layer.mlp.gate)


_BAILING_NAMES = (
    ("model.embed_tokens", "model.word_embeddings"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("self_attn", "attention"),
    ("gate.e_score_correction_bias", "gate.expert_bias"),
)
_ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": True}
_GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_BAILING = plain(head_dim=DIM, num_experts=8, num_shared_experts=2, use_bias=False, **_ROUTED)
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def _rope(part: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": part}}


_SARVAM_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "routed_scaling_factor": 2.5,
    **_ROUTED,
}
_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
_MINICPM_NAMES = (
    ("block_sparse_moe.router", "mlp.gate"),
    ("block_sparse_moe", "mlp"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
)

MIXTURES: dict[str, Layout] = {
    "BailingMoeV2ForCausalLM": Layout(
        {
            **_BAILING,
            **_GROUPS,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "score_function": "sigmoid",
            "use_qkv_bias": False,
            "moe_router_enable_expert_bias": True,
        },
        _BAILING_NAMES,
        {"attention.query_key_value": (QKV, 1)},
        reference="Glm4MoeConfig",
        shape={**_GLM, **_ROUTED, **_GROUPS, **_rope(0.5), "use_qk_norm": True, "attention_bias": False},
    ),
    "BailingMoeForCausalLM": Layout(
        {**_BAILING, "use_qkv_bias": True, "norm_head": False},
        _BAILING_NAMES,
        {"attention.query_key_value": (QKV, 1)},
        reference="Glm4MoeConfig",
        shape={**_GLM, **_ROUTED, **_rope(1.0), "use_qk_norm": False, "attention_bias": True},
        adapt=_softmax_router,
        dropped=("e_score_correction_bias",),
    ),
    "SarvamMoEForCausalLM": Layout(
        {**_BAILING, **_GROUPS, "rope_theta": 8e6, "use_qk_norm": True, "use_qkv_bias": False, "num_shared_experts": 1},
        _BAILING_NAMES,
        {"attention.query_key_value": (QKV, 1)},
        reference="Glm4MoeConfig",
        shape={
            **_GLM,
            "n_shared_experts": 1,
            **_ROUTED,
            **_GROUPS,
            "use_qk_norm": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8e6, "partial_rotary_factor": 1.0},
        },
    ),
    "Param2MoEForCausalLM": Layout(
        {
            **_BAILING,
            **_GROUPS,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "moe_shared_expert_intermediate_size": 64,
            **_rope(0.5),
        },
        _BAILING_NAMES,
        {"attention.query_key_value": (QKV, 1)},
        reference="Glm4MoeConfig",
        shape={**_GLM, **_ROUTED, **_GROUPS, **_rope(0.5), "use_qk_norm": True, "attention_bias": False},
    ),
    "SarvamMLAForCausalLM": Layout(
        {
            **plain(**_SARVAM_LATENT),
            "num_experts": 8,
            "num_shared_experts": 1,
            "head_dim": 40,
            "q_head_dim": 24,
            "use_qk_norm": True,
            "rope_scaling": {**_YARN, "type": "deepseek_yarn"},
        },
        reference="SarvamMLAConfig",
        shape={
            **_SARVAM_LATENT,
            "num_key_value_heads": HEADS,
            "head_dim": 8,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "rope_parameters": {**_YARN, "rope_type": "yarn", "rope_theta": 10_000.0},
        },
    ),
    "MiniCPMForCausalLM (experts)": Layout(
        plain(scale_emb=12, scale_depth=1.4, dim_model_base=16, num_experts=4, num_experts_per_tok=2),
        _MINICPM_NAMES,
        reference="GraniteMoeConfig",
        shape={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / LAYERS**0.5,
            "logits_scaling": HIDDEN / 16,
            "attention_multiplier": DIM**-0.5,
            "initializer_range": 0.4,
        },
    ),
    "DeepseekForCausalLM": Layout(
        plain(**{**_ROUTED, "norm_topk_prob": False}, n_routed_experts=8, n_shared_experts=2, moe_layer_freq=1),
        reference="Glm4MoeConfig",
        shape={**_GLM, **_ROUTED, **_rope(1.0), "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False},
        adapt=_softmax_router,
        dropped=("e_score_correction_bias",),
    ),
}
