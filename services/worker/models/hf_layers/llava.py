"""What configurations say of the language model within a model that takes images, but Qwen's. No torch."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from services.worker.models.hf_layers.tied_heads import TIED, HasHead, tied_head, without_tensors, without_ties
from shared.models.image_models import (
    AUDIO_FLAMINGO3,
    DEEPSEEK_OCR2,
    DEFAULT_IMAGE_TOKENS,
    GEMMA,
    GLM_5_NEXT,
    GLM_ASR,
    GOT_OCR2,
    GRANITE4_VISION,
    GRANITE_DOCLING,
    GRANITE_SPEECH,
    IDEFICS2,
    KIMI_K2_5,
    LFM2_VL,
    LFM3_VL,
    LIGHTON_OCR,
    LLAVA_ONEVISION,
    MINICPM_V,
    MINIMAX_M3_VL,
    MISTRAL3,
    MISTRAL_LARGE_4,
    MLLAMA,
    OVIS2,
    QIANFAN_OCR,
    QWEN3_ASR,
    QWEN4_VL,
    VIDEO_LLAMA3,
    VOXTRAL,
)

LANGUAGE_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The language models that are read in LLaVA, LLaVA-NeXT and those that have tiles, by `model_type`."""
_OWN_MODELS = {
    GEMMA: {"gemma3_text": "Gemma3ForCausalLM"},
    MISTRAL3: {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    LLAVA_ONEVISION: {"qwen2": "Qwen2ForCausalLM"},
    OVIS2: {"qwen2": "Qwen2ForCausalLM"},
    MINICPM_V: {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    LIGHTON_OCR: {"qwen3": "Qwen3ForCausalLM"},
    QIANFAN_OCR: {"qwen3": "Qwen3ForCausalLM"},
    DEEPSEEK_OCR2: {"deepseek_ocr2_text": "DeepseekForCausalLM"},
    VIDEO_LLAMA3: {"qwen2": "Qwen2ForCausalLM"},
    GOT_OCR2: {"qwen2": "Qwen2ForCausalLM"},
    IDEFICS2: {"mistral": "MistralForCausalLM"},
    GRANITE4_VISION: {"granite4_vision_text": "Granite4VisionTextForCausalLM"},
    GRANITE_DOCLING: {"granite_docling_text": "GraniteDoclingTextForCausalLM"},
    **{each: {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"} for each in KIMI_K2_5},
    MISTRAL_LARGE_4: {"mistral_large4_text": "MistralLarge4ForCausalLM"},
    QWEN4_VL: {"qwen4_exp_text": "Qwen4ExpForCausalLM"},
    GLM_5_NEXT: {"glm5_next_text": "Glm5NextForCausalLM"},
    MINIMAX_M3_VL: {"minimax_m3_vl_text": "MiniMaxM3VLForCausalLM"},
    LFM3_VL: {"lfm3": "Lfm3ForCausalLM"},
    MLLAMA: {"mllama_text_model": "MllamaForCausalLM"},
    LFM2_VL: {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"},
    VOXTRAL: {"llama": "LlamaForCausalLM"},
    GLM_ASR: {"llama": "LlamaForCausalLM"},
    QWEN3_ASR: {"qwen3": "Qwen3ForCausalLM"},
    AUDIO_FLAMINGO3: {"qwen2": "Qwen2ForCausalLM"},
    GRANITE_SPEECH: {"granite": "GraniteSpeechTextForCausalLM"},
}
"""Those of others, by the architecture of the whole."""

LANGUAGE_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "mllama_text_model": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "deepseek_ocr2_text": {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}
"""What `transformers` takes where nothing is said, as in the files of LLaVA 1.5 and Gemma 3, which leave some
or most sizes out."""


class _RawTaps(Struct):
    deepstack_visual_indexes: list[int] | None = None

    @property
    def input_levels(self) -> int:
        """Layers of Granite Docling's tower whose output joins behind the first layers."""
        return 3 if self.deepstack_visual_indexes is None else len(self.deepstack_visual_indexes)


class _RawLlava(Struct):
    text_config: dict[str, Any]
    vision_config: Any = None
    """What is read of it is of one model alone; others may say anything."""
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    image_token_id: int | None = None
    deepstack_layer_map: list[tuple[int, int]] | None = None
    spatial_target_layers: list[int] | None = None

    @property
    def level_layers(self) -> list[int]:
        """Those of Granite 4 Vision's language model that parts of images join, in their order."""
        spatial = _SPATIAL if self.spatial_target_layers is None else self.spatial_target_layers
        return [*(layer for _, layer in self.deepstack_layer_map or ()), *spatial]


_SPATIAL = [12, 15, 18, 21]


def language_model(text: bytes, architecture: str, has_head: HasHead = without_tensors) -> bytes:
    """The configuration of the language model within `text`, the `config.json` of one of these, as if that were
    all. Raises ValueError for one that is not read, and msgspec's errors."""
    whole = msgspec.json.decode(text, type=_RawLlava)
    known = _OWN_MODELS.get(architecture, LANGUAGE_MODELS)
    kind = whole.text_config.get("model_type", next(iter(known)))
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"text_config.model_type {kind!r} is not supported; supported: {', '.join(known)}")
    outside = {
        "dtype": whole.dtype or whole.torch_dtype,
        "eos_token_id": whole.eos_token_id,
        TIED: tied_head(text, architecture, has_head),
    }
    given = {key: value for key, value in outside.items() if value is not None}
    if architecture == QWEN4_VL:  # whose n-grams have it, too
        token = whole.image_token_id
        given["image_token_id"] = DEFAULT_IMAGE_TOKENS[QWEN4_VL] if token is None else token
    if architecture == GRANITE4_VISION:
        given["level_layers"] = whole.level_layers
    if architecture == GRANITE_DOCLING:
        given["input_levels"] = msgspec.convert(whole.vision_config or {}, _RawTaps).input_levels
    own = {**LANGUAGE_MODEL_DEFAULTS.get(kind, {}), **given, **without_ties(whole.text_config)}
    return msgspec.json.encode({**own, "architectures": [known[kind]]})


def language_model_name(name: str) -> str:
    """What the language model alone calls a tensor of LLaVA's checkpoint `name`; others keep their names."""
    for whole, alone in _NAMES:
        if name.startswith(whole):
            return alone + name.removeprefix(whole)
    return name


_NAMES = (
    ("thinker.model.language_model.", "model."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.encoder.layers.", "model.layers."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""As releases of `transformers` before 4.52, and those since, call them; three are Qwen-Omni's, the last one is
Idefics3's and SmolVLM's. The fourth and the fifth are what the fifth release writes of Kimi K2.5 and Qianfan-OCR, whose
published files have `layers` there."""
