"""What a DeepSeek-V4 checkpoint's tensors are called: as published, or as `transformers` has them. No torch."""

from __future__ import annotations

import re

_PUBLISHED = (
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
_RULES = tuple((re.compile(pattern), to) for pattern, to in _PUBLISHED)


def library_name(name: str) -> str:
    """`name`, published or the library's, as the library has it."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name
