"""Tiny random checkpoints of architectures that `transformers` computes for us, and that library as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from tests.support.models.tiny_models import LFM3, MINIMAX_M3, POSITIONS, VOCABULARY, TinyModel

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON: dict[str, Any] = {name: each for name, each in _SHAPE.items() if name not in ("head_dim", "intermediate_size")}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    **{name: each for name, each in _SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA4: dict[str, Any] = {
    **_SHAPE,
    **_WINDOWS,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
}
_BERT: dict[str, Any] = {
    **{name: each for name, each in _SHAPE.items() if name not in ("num_key_value_heads", "head_dim")},
    "max_position_embeddings": POSITIONS + 8,  # RoBERTa's begin behind the padding token
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""An encoder's layers with a mask that is causal."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "AXK1": {**_LATENT, **_ROUTED, "head_dim": 8},
    "Afmoe": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32, "num_dense_layers": 1},
    "Apertus": _SHAPE,
    "Apertus1p5Text": _SHAPE,
    "Arcee": _SHAPE,
    "AriaText": {**_SHAPE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "Beam": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    "Bert": _BERT,
    "BioGpt": {**_SHAPE, "hidden_dropout_prob": 0.0},
    "BitNet": _SHAPE,
    "Bloom": {**_GPT, "n_embed": 64, "hidden_size": 64},
    "CTRL": {**_GPT, "dff": 96},
    "Camembert": _BERT,
    "CodeGen": {**_GPT, "n_embd": 128, "rotary_dim": 16},
    "Cohere": {**_SHAPE, "logit_scale": 0.5},
    "Cohere2": {**_SHAPE, "sliding_window": 24},
    "Cohere2Moe": {**_SHAPE, **_EXPERTS, **_WINDOWS, "num_shared_experts": 1},
    "CohereCompassText": {
        **_SHAPE,
        **_WINDOWS,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "Cwm": {**_SHAPE, **_WINDOWS},
    "Data2VecText": _BERT,
    "Dbrx": {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": POSITIONS,
        "initializer_range": 0.2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DiffLlama": _SHAPE,
    "Dory": {
        **_SHAPE,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Dots1": {**_SHAPE, **_ROUTED, "sliding_window": None},
    "Electra": {**_BERT, "embedding_size": 64},
    "Ernie": _BERT,
    "Ernie4_5": _SHAPE,
    "Ernie4_5_Moe": {
        **_SHAPE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "Exaone": _SHAPE,
    "Exaone4": {**_SHAPE, "sliding_window": 24, "sliding_window_pattern": 2},
    "ExaoneMoe": {**_SHAPE, **_WINDOWS, **_EXPERTS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    "Falcon": _FALCON,
    "Falcon (ALiBi)": {**_FALCON, "alibi": True, "multi_query": False, "bias": True},
    "Falcon (grouped)": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "FlexOlmo": {**_SHAPE, **_EXPERTS},
    "Flint": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "GPT2": _GPT,
    "GPTBigCode": _GPT,
    "GPTJ": {**_GPT, "rotary_dim": 8},
    "GPTNeo": {
        **_SHAPE,
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "window_size": 24,
    },
    "GPTNeoX": {**_SHAPE, "rotary_pct": 0.5},
    "Gemma": _SHAPE,
    "Gemma3nText": {
        **_SHAPE,
        **_WINDOWS,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
    },
    "Gemma4Text": {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "Gemma4Text (experts)": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "use_bidirectional_attention": "vision",
    },
    "Glm": {**_SHAPE, "partial_rotary_factor": 0.5},
    "Glm4": {**_SHAPE, "partial_rotary_factor": 0.5},
    "Glm4Moe": {**_SHAPE, **_ROUTED},
    "Glm4MoeLite": {**_LATENT, **_ROUTED},
    "GptOss": {
        **_SHAPE,
        **_EXPERTS,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Granite": {**_SHAPE, "logits_scaling": 4.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "GraniteMoe": {**_SHAPE, **_EXPERTS},
    "GraniteMoeSWA": {**_SHAPE, **_EXPERTS, **_WINDOWS, "shared_intermediate_size": 32},
    "GraniteMoeShared": {**_SHAPE, **_EXPERTS, "shared_intermediate_size": 32},
    "GraniteSWA": {**_SHAPE, **_WINDOWS},
    "HYV3": {**_SHAPE, **_EXPERTS, "moe_intermediate_size": 32},
    "Helium": _SHAPE,
    "HrmText": {**_SHAPE, "num_hidden_layers": 1},
    "HunYuanDenseV1": _SHAPE,
    "HunYuanMoEV1": {**_SHAPE, "num_experts": 4, "moe_topk": 2},
    "HyperCLOVAX": _SHAPE,
    "Jais2": _SHAPE,
    "JetMoe": {**_SHAPE, "kv_channels": 16, "num_key_value_heads": 2, **_EXPERTS},
    "Kolibri1": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Laguna": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Llama4Text": {
        **_SHAPE,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 32,
        "no_rope_layer_interval": 3,
        "interleave_moe_layer_step": 2,
        "floor_scale": 20,
        "attn_scale": 0.5,
    },
    "LongcatFlash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "Mellum": {**_SHAPE, **_EXPERTS, **_WINDOWS, "moe_intermediate_size": 32},
    "MiMoV2Flash": {**_SHAPE, **_ROUTED, **_WINDOWS, "v_head_dim": 8},
    "MiniCPM3": {**_LATENT, "head_dim": 8},
    "MiniMaxM2": {**_SHAPE, **_EXPERTS},
    "Ministral": {**_SHAPE, "sliding_window": 24},
    "Ministral3": _SHAPE,
    "ModernBertDecoder": {**_SHAPE, "local_attention": 24, "global_attn_every_n_layers": 2},
    "Mpt": {
        "vocab_size": VOCABULARY,
        "d_model": 96,
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": POSITIONS,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "NanoChat": _SHAPE,
    "Nemotron": _SHAPE,
    "OPT": {**_SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo": _SHAPE,
    "Olmo2": _SHAPE,
    "Olmo3": {**_SHAPE, "sliding_window": 24},
    "Olmoe": {**_SHAPE, **_EXPERTS},
    "Persimmon": _SHAPE,
    "Phi": {**_SHAPE, "partial_rotary_factor": 0.5},
    "Phi3": {**_SHAPE, "sliding_window": None},
    "Phi4Multimodal": {
        **{name: each for name, each in _SHAPE.items() if name != "head_dim"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2},
    },
    "Phimoe": {**_SHAPE, **_EXPERTS},
    "RoCBert": {**_BERT, "enable_pronunciation": False, "enable_shape": False},
    "Roberta": _BERT,
    "RobertaPreLayerNorm": _BERT,
    "SeedOss": _SHAPE,
    "SmolLM3": {**_SHAPE, "no_rope_layer_interval": 2},
    "SolarOpen": {**_SHAPE, **_ROUTED},
    "StableLm": {**_SHAPE, "partial_rotary_factor": 0.5},
    "Starcoder2": {**_SHAPE, "sliding_window": 24},
    "VaultGemma": {**_SHAPE, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "XGLM": {
        **_SHAPE,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 3,
        "attention_heads": 4,
        "init_std": 0.2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "XLMRoberta": _BERT,
    "XLMRobertaXL": _BERT,
    "Xmod": {**_BERT, "languages": ["en_XX"], "default_language": "en_XX"},
    "Youtu": {**_LATENT, "head_dim": 8},
}
"""By the name that their classes begin with; behind it, in brackets, what is special about this one of several."""

_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 64,
}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "Aria": {**ARCHITECTURES["AriaText"], "model_type": "aria_text"},
    "AyaVision": {**ARCHITECTURES["Cohere2"], "model_type": "cohere2"},
    "Cohere2Vision": {**ARCHITECTURES["Cohere2"], "model_type": "cohere2"},
    "Exaone4_5_": {**ARCHITECTURES["Exaone4"], "model_type": "exaone4"},
    "Kimi_K25": {**_LATENT, **_ROUTED, "head_dim": 8, "model_type": "deepseek_v3"},
    "LightOnOcr": {**_SHAPE, "model_type": "qwen3"},
    "LlavaNextVideo": {**_SHAPE, "model_type": "llama"},
    "Step3p7": {
        **_SHAPE,
        **_WINDOWS,
        "model_type": "step3p5",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
    },
}
"""Of checkpoints with images, by the same names: what is said of the part that reads text."""
FOR_TEXTS_ALONE = tuple(LANGUAGE_MODELS)
"""Those that see, and whose images are not served: they start with `language_model_only`."""

NESTED: dict[str, dict[str, Any]] = {
    "DeepseekVL": {**_SHAPE, "model_type": "llama"},
    "InternVL": {**_SHAPE, "model_type": "qwen2"},
    "Kimi_K25": {
        **LANGUAGE_MODELS["Kimi_K25"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
    },
    "Lfm2Vl": {
        **{name: each for name, each in _SHAPE.items() if name != "head_dim"},
        "block_multiple_of": 16,
        "layer_types": ["conv", "full_attention", "conv"],
        "model_type": "lfm2",
    },
    "Lfm3Vl": {**_SHAPE, **LFM3, "model_type": "lfm3"},
    "MiniMaxM3VL": {
        **_SHAPE,
        **MINIMAX_M3,
        "model_type": "minimax_m3_vl_text",
    },
    "Mistral3": {**_SHAPE, "model_type": "mistral"},
}
"""The same of those whose language model is native."""

ONE_STAGE = (
    "Dory",
    "Gemma3nText",
    "Gemma4Text",
    "Gemma4Text (experts)",
    "HrmText",
    "LongcatFlash",
    "MiMoV2Flash",
    "Xmod",
)
"""Those that are not computed in stages."""


_REFERENCES = {"Falcon (ALiBi)": "sdpa"}
"""Whose attention of the library is the reference, where that is not the eager one. Falcon's eager one adds ALiBi's
biases twice in transformers 5: to the mask, and to the scores."""


def library_config(architecture: str, *, tied: bool = False, **changes: Any) -> PretrainedConfig:
    """The tiny configuration of `architecture`, with `changes`. `tied`: what it says of a head beside a tower."""
    kind = getattr(transformers, f"{architecture.partition(' ')[0]}Config", None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} does not know {architecture}")
    if (text := NESTED.get(architecture, LANGUAGE_MODELS.get(architecture))) is not None:
        text = {**text, **changes}
        own = default.to_dict() if (default := getattr(kind(), "vision_config", None)) is not None else {}
        tower = {"model_type": own.get("model_type"), **{key: each for key, each in _TOWER.items() if key in own}}
        settings: dict[str, Any] = {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}
    else:
        settings = {**ARCHITECTURES[architecture], **changes}
    config: PretrainedConfig = kind(**settings)
    return config


def library_model(architecture: str, path: Path, *, tied: bool = False, **changes: Any) -> TinyModel:
    """Writes the checkpoint to `path`. The same weights every time; norms and biases too are random."""
    torch.manual_seed(sum(map(ord, architecture)))
    build = AutoModelForImageTextToText if architecture in {*LANGUAGE_MODELS, *NESTED} else AutoModelForCausalLM
    model = build.from_config(
        library_config(architecture, tied=tied, **changes), attn_implementation=_REFERENCES.get(architecture, "eager")
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * (0.5 if "bias" in name else 0.2))
    model.float().eval().save_pretrained(path)
    # The reference goes on after an end token, as a backend does that is not stopped.
    model.generation_config.eos_token_id = None
    return TinyModel(architecture, path, model)
