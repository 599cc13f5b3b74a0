"""Tiny mixtures of experts in published layouts: GLM-4's in the library, with the router that each has."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from tests.support.models.published_shapes import DIM, QKV, Layout, plain


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
    "DeepseekForCausalLM": Layout(
        plain(**{**_ROUTED, "norm_topk_prob": False}, n_routed_experts=8, n_shared_experts=2, moe_layer_freq=1),
        reference="Glm4MoeConfig",
        shape={**_GLM, **_ROUTED, **_rope(1.0), "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False},
        adapt=_softmax_router,
        dropped=("e_score_correction_bias",),
    ),
}
