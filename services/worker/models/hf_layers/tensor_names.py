"""What a layer's tensors are called in a checkpoint, by architecture, where that is not as Llama has it. No torch."""

from __future__ import annotations

from typing import NamedTuple

from services.worker.models.hf_layers.convolution import CONVOLUTION_ARCHITECTURES, LFM3
from services.worker.models.hf_layers.delta import (
    DELTA_ARCHITECTURES,
    GLM_NEXT,
    KIMI_LINEAR,
    LING_3,
    OLMO_HYBRID,
    QWEN4,
)
from services.worker.models.hf_layers.lightning import LIGHTNING_ARCHITECTURES
from services.worker.models.hf_layers.selective import JAMBA, RECURRENT_GEMMA
from services.worker.models.hf_layers.shared import ZAMBA2

GRANITE = "GraniteMoeHybridForCausalLM"
NEMOTRON_H = "NemotronHForCausalLM"
OURO = "OuroForCausalLM"

HEAD_GATE = "g_proj"
LEARNED_FREQUENCIES = "model.rotary_emb.alpha"


class TensorNames(NamedTuple):
    """Of a model: its own, then those within a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm.weight"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    """Directly before the MLP."""
    attention_post_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    """Directly behind attention and MLP, in models that have norms there."""
    mixer: str = "mamba"
    """That with states."""
    mixer_output: str = "out_proj"
    attention: str = "self_attn"
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    """The modules that queries, keys and values are made by; those of one name lie in one, in this order."""
    qkv_by_group: bool = False
    """What lies in one module lies there for each key/value head, with its queries, one behind the other."""
    attention_output: str = "o_proj"
    head_gate: str = "gate_proj"
    """What says how much of each head, or of its elements, is taken, in models that have it. LFM3's `transformers`, and
    so adapters, call `HEAD_GATE`."""
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    other_mlp: str | None = None
    """What some checkpoints call that, in layers with experts or in all of them."""
    ups: tuple[str, ...] = ("gate_proj", "up_proj")
    """The gates' first, where there are any."""
    down: str = "down_proj"
    gate_and_up: str | None = None
    """Where gates and ups are one matrix, but for checkpoints that have them apart."""
    expert_correction: str = "gate.e_score_correction_bias"
    """Within that: what is added to experts' scores where they are chosen."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Norms of layers, and what some checkpoints call them."""
    head: str = "lm_head"


PUBLISHED_NAMES = {
    "InternLM2ForCausalLM": TensorNames(
        embedding="model.tok_embeddings",
        input_norm="attention_norm",
        mlp_norm="ffn_norm",
        attention="attention",
        qkv=("wqkv", "wqkv", "wqkv"),
        qkv_by_group=True,
        attention_output="wo",
        mlp="feed_forward",
        ups=("w1", "w3"),
        down="w2",
        head="output",
    ),
    **dict.fromkeys(("BaichuanForCausalLM", "BaiChuanForCausalLM"), TensorNames(qkv=("W_pack", "W_pack", "W_pack"))),
    "QWenLMHeadModel": TensorNames(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f.weight",
        input_norm="ln_1",
        mlp_norm="ln_2",
        attention="attn",
        qkv=("c_attn", "c_attn", "c_attn"),
        attention_output="c_proj",
        ups=("w2", "w1"),
        down="c_proj",
    ),
    **dict.fromkeys(
        ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        TensorNames(
            embedding="transformer.embedding.word_embeddings",
            layers="transformer.encoder.layers",
            final_norm="transformer.encoder.final_layernorm.weight",
            attention="self_attention",
            qkv=("query_key_value", "query_key_value", "query_key_value"),
            attention_output="dense",
            gate_and_up="dense_h_to_4h",
            down="dense_4h_to_h",
            head="transformer.output_layer",
        ),
    ),
    **dict.fromkeys(
        ("TeleChat2ForCausalLM", "TelechatForCausalLM"),
        TensorNames(
            embedding="transformer.word_embeddings",
            layers="transformer.h",
            final_norm="transformer.ln_f.weight",
            attention="self_attention",
            qkv=("query", "key_value", "key_value"),
            qkv_by_group=True,
            attention_output="dense",
        ),
    ),
    "ExaoneForCausalLM": TensorNames(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f.weight",
        input_norm="ln_1",
        mlp_norm="ln_2",
        attention="attn.attention",
        attention_output="out_proj",
        ups=("c_fc_0", "c_fc_1"),
        down="c_proj",
    ),
    **dict.fromkeys(
        ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM", "Param2MoEForCausalLM"),
        TensorNames(
            embedding="model.word_embeddings",
            attention="attention",
            qkv=("query_key_value", "query_key_value", "query_key_value"),
            attention_output="dense",
            query_norm="query_layernorm",
            key_norm="key_layernorm",
            expert_correction="gate.expert_bias",
        ),
    ),
    "JAISLMHeadModel": TensorNames(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f.weight",
        input_norm="ln_1",
        mlp_norm="ln_2",
        attention="attn",
        qkv=("c_attn", "c_attn", "c_attn"),
        attention_output="c_proj",
        ups=("c_fc2", "c_fc"),
        down="c_proj",
    ),
    OURO: TensorNames(
        attention_post_norm="input_layernorm_2",
        mlp_norm="post_attention_layernorm",
        mlp_post_norm="post_attention_layernorm_2",
    ),
    "Plamo3ForCausalLM": TensorNames(
        layers="model.layers.layers",
        input_norm="pre_mixer_norm",
        attention_post_norm="post_mixer_norm",
        mlp_norm="pre_mlp_norm",
        mlp_post_norm="post_mlp_norm",
        attention="mixer",
        qkv=("qkv_proj", "qkv_proj", "qkv_proj"),
        gate_and_up="gate_up_proj",
    ),
    "YiForCausalLM": TensorNames(input_norm="ln1", mlp_norm="ln2"),
    "MiniMaxM3VLForCausalLM": TensorNames(gate_and_up="gate_up_proj"),
}
"""Of architectures whose code comes with their checkpoints; the others of these are called as Llama's."""

_NAMES = {
    **dict.fromkeys(
        ("BambaForCausalLM", "FalconH1ForCausalLM", JAMBA),
        TensorNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward", final_norm="model.final_layernorm.weight"),
    ),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM"), TensorNames(mlp_norm="pre_feedforward_layernorm")),
    **dict.fromkeys(
        ("Glm4vForCausalLM", "GlmOcrForCausalLM"),
        TensorNames(
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            gate_and_up="gate_up_proj",
        ),
    ),
    GRANITE: TensorNames(mlp="shared_mlp", gate_and_up="input_linear", down="output_linear"),
    **dict.fromkeys((*DELTA_ARCHITECTURES, QWEN4), TensorNames(mixer="linear_attn")),
    OLMO_HYBRID: TensorNames(
        mixer="linear_attn",
        mixer_output="o_proj",
        renamed=(
            ("input_layernorm", "attention_layer_norm"),
            ("post_attention_layernorm", "feedforward_layer_norm"),
        ),
    ),
    GLM_NEXT: TensorNames(mixer="self_attn", mixer_output="o_proj"),
    KIMI_LINEAR: TensorNames(mixer="self_attn", mixer_output="o_proj", other_mlp="block_sparse_moe"),
    **dict.fromkeys(LING_3, TensorNames(mixer="self_attn", mixer_output="o_proj", head_gate=HEAD_GATE)),
    **dict.fromkeys(
        ("Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM"),
        TensorNames(
            embedding="backbone.embeddings",
            layers="backbone.layers",
            input_norm="norm",
            final_norm="backbone.norm_f.weight",
            mixer="mixer",
        ),
    ),
    **dict.fromkeys(LIGHTNING_ARCHITECTURES, TensorNames(mixer="self_attn")),
    NEMOTRON_H: TensorNames(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        final_norm="backbone.norm_f.weight",
        input_norm="norm",
        mlp_norm="norm",
        mixer="mixer",
        attention="mixer",
        mlp="mixer",
        ups=("up_proj",),
    ),
    ZAMBA2: TensorNames(
        mlp_norm="pre_ff_layernorm",
        mlp="feed_forward",
        gate_and_up="gate_up_proj",
        final_norm="model.final_layernorm.weight",
    ),
    RECURRENT_GEMMA: TensorNames(
        input_norm="temporal_pre_norm",
        mlp_norm="channel_pre_norm",
        final_norm="model.final_norm.weight",
        mixer="temporal_block",
        mixer_output="linear_out",
        attention="temporal_block",
        mlp="mlp_block",
    ),
    **PUBLISHED_NAMES,
    **dict.fromkeys(
        CONVOLUTION_ARCHITECTURES,
        TensorNames(
            final_norm="model.embedding_norm.weight",
            input_norm="operator_norm",
            mlp_norm="ffn_norm",
            mixer="conv",
            attention_output="out_proj",
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            mlp="feed_forward",
            ups=("w1", "w3"),
            down="w2",
            expert_correction="expert_bias",
        ),
    ),
    LFM3: TensorNames(
        final_norm="model.embedding_norm.weight",
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        attention_post_norm="post_operator_norm",
        mlp_post_norm="post_ffn_norm",
        mixer="conv",
        mlp="feed_forward",
        ups=("w1", "w3"),
        down="w2",
    ),
}


def tensor_names(architecture: str) -> TensorNames:
    """Those of a model of `architecture`."""
    return _NAMES.get(architecture, TensorNames())
