"""What configurations say of the language model within one whose images have positions of three axes: Qwen2-VL,
Qwen2.5-VL, Qwen2.5-Omni, Qwen3-Omni, Qwen3-VL, GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR and PaddleOCR-VL. No torch."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from services.worker.models.hf_layers.tied_heads import TIED, HasHead, tied_head, without_tensors
from shared.models.image_models import GLM4V, GLM4V_MOE, GLM46V, GLM_OCR, PADDLE_OCR, QWEN2_5_OMNI, QWEN3_OMNI

_QWEN2: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 500_000.0}
_OMNI: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
_OMNI3: dict[str, Any] = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
"""Qwen-Omni's have sizes, too, where nothing is said."""
_GLM: dict[str, Any] = {"rms_norm_eps": 1e-5}
_GLM_OCR: dict[str, Any] = {
    "vocab_size": 59_392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_ERNIE: dict[str, Any] = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_SECTIONS: dict[str, Any] = {"mrope_section": [16, 24, 24], "mrope_interleaved": False}
_INTERLEAVED: dict[str, Any] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_GLM_SECTIONS: dict[str, Any] = {"mrope_section": [8, 12, 12], "mrope_interleaved": False}

LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, _SECTIONS),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, _SECTIONS),
    **dict.fromkeys(QWEN2_5_OMNI, ("Qwen2ForCausalLM", _OMNI, _SECTIONS)),
    **dict.fromkeys(QWEN3_OMNI, ("Qwen3MoeForCausalLM", _OMNI3, _INTERLEAVED)),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", _QWEN3, _INTERLEAVED),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeForCausalLM", _QWEN3, _INTERLEAVED),
    GLM4V: ("Glm4vForCausalLM", _GLM, _GLM_SECTIONS),
    GLM46V: ("Glm4vForCausalLM", _GLM, _GLM_SECTIONS),
    GLM_OCR: ("GlmOcrForCausalLM", _GLM_OCR, _GLM_SECTIONS),
    PADDLE_OCR: ("LlamaForCausalLM", _ERNIE, _SECTIONS),
    GLM4V_MOE: ("Glm4vMoeForCausalLM", _GLM, {**_GLM_SECTIONS, "partial_rotary_factor": 0.5}),
}
"""The language model's architecture, what `transformers` takes where nothing is said, and its rotation, by the
architecture of the whole."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id")
_ROTATED = "partial_rotary_factor"


class _RawTower(Struct):
    deepstack_visual_indexes: list[int] | None = None


class _RawWhole(Struct):
    vision_config: _RawTower | None = None


def multi_axis_language_model(text: bytes, architecture: str, has_head: HasHead = without_tensors) -> bytes:
    """The configuration of the language model within `text`, the `config.json` of that architecture, as if that were
    all. Both spellings are read: published files have it beside the tower's, later releases of `transformers` write it
    into `text_config`. Raises ValueError for a rotation that is not read, and msgspec's errors."""
    whole = msgspec.json.decode(text, type=dict[str, Any])
    if isinstance(thinker := whole.get("thinker_config"), dict):
        whole = {**{key: whole[key] for key in _OF_THE_WHOLE if whole.get(key) is not None}, **thinker}
        text = msgspec.json.encode(whole)
    own = whole.get("text_config")
    if own is None:
        own = {key: value for key, value in whole.items() if key != "vision_config"}
    if architecture == GLM46V and own.get("model_type") == "glm4v_moe_text":
        architecture = GLM4V_MOE
    alone, defaults, sections = LANGUAGE_MODELS[architecture]
    given = {key: whole[key] for key in _OF_THE_WHOLE if whole.get(key) is not None}
    read = {**defaults, **given, **{key: value for key, value in own.items() if value is not None}}
    if (biased := read.get("use_bias")) is not None:
        read |= {"attention_bias": biased, "mlp_bias": biased}
    if (tied := tied_head(text, architecture, has_head)) is not None:
        read[TIED] = tied
    key = next((each for each in ("rope_scaling", "rope_parameters") if read.get(each)), "rope_parameters")
    beside = {_ROTATED: read[_ROTATED]} if _ROTATED in read else {}
    if not isinstance(said := read.get(key) or {}, dict):
        raise ValueError(f"{key} {said!r} is not supported; an object of a rotation's parameters is")
    read[key] = _rope({**sections, **beside}, said)
    tower = msgspec.convert(whole, _RawWhole).vision_config or _RawTower()
    levels = len(tower.deepstack_visual_indexes or ())
    return msgspec.json.encode({**read, "architectures": [alone], "input_levels": levels})


def _rope(defaults: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """`mrope` is no scaling, but says that there are sections; whether these are interleaved the architecture says, of
    which `defaults` are. Raises ValueError where there are none: images have positions of three axes."""
    plain = {key: "default" if value == "mrope" else value for key, value in said.items() if value is not None}
    if plain.get("mrope_section", True) == []:
        raise ValueError("mrope_section [] is not supported; numbers of frequencies are, one for each axis")
    return {**defaults, **plain, "mrope_interleaved": defaults["mrope_interleaved"]}
