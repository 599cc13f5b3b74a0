"""What a checkpoint's tensors, and an adapter's modules, are called here where files have them by several names: as
published, or as `transformers` has them. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable

from services.worker.models.config import ModelConfig
from services.worker.models.hf_layers.compressed import DEEPSEEK_V4, HY4
from services.worker.models.hf_layers.delta import GLM_NEXT, LING_3
from services.worker.models.hf_layers.latent import MISTRAL_LARGE_4
from services.worker.models.published import glm_next, hunyuan, minimax, mistral_large
from services.worker.models.published.minimax import MINIMAX_M3

_DEEPSEEK_V4 = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^(layers|norm|hc_head|hc_head_\w+)(?=\.|$)", r"model.\1"),
    (r"\.hc_head_(fn|base|scale)$", r".hc_head.hc_\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"(\.(?:self_attn|compressor|indexer))\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(\.(?:shared_experts|experts\.\d+))\.w1\.", r"\1.gate_proj."),
    (r"(\.(?:shared_experts|experts\.\d+))\.w2\.", r"\1.down_proj."),
    (r"(\.(?:shared_experts|experts\.\d+))\.w3\.", r"\1.up_proj."),
    (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
)
"""In this order."""
_LING_3 = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.forget_gate\.", ".self_attn."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
)
"""In this order. `transformers` computes with a module of its own for rates of forgetting, and writes the outputs of
all layers as `dense`; published files have `o_proj` in those with states."""

_Rules = tuple[tuple[re.Pattern[str], str], ...]
_DEEPSEEK_V4_RULES: _Rules = tuple((re.compile(pattern), to) for pattern, to in _DEEPSEEK_V4)
_LING_3_RULES: _Rules = tuple((re.compile(pattern), to) for pattern, to in _LING_3)


def deepseek_v4_name(name: str) -> str:
    """`name`, published or the library's, as the library has it."""
    return _by(_DEEPSEEK_V4_RULES, name)


def ling_3_name(name: str) -> str:
    """`name`, published or the library's, as the library has it, but for that module of rates."""
    return _by(_LING_3_RULES, name)


_NAMES = {
    DEEPSEEK_V4: deepseek_v4_name,
    HY4: hunyuan.library_name,
    GLM_NEXT: glm_next.library_name,
    MINIMAX_M3: minimax.library_name,
    MISTRAL_LARGE_4: mistral_large.library_name,
    **dict.fromkeys(LING_3, ling_3_name),
}


def library_names(config: ModelConfig) -> Callable[[str], str] | None:
    """What a tensor is called here, by its name in files; None: as it is there."""
    return _NAMES.get(config.architecture)


def _by(rules: _Rules, name: str) -> str:
    for pattern, to in rules:
        name = pattern.sub(to, name)
    return name
