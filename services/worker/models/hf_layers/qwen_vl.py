"""What the configuration of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL says of its language model. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

_QWEN2: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 500_000.0}
_SECTIONS: dict[str, Any] = {"mrope_section": [16, 24, 24], "mrope_interleaved": False}
_INTERLEAVED: dict[str, Any] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}

LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, _SECTIONS),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, _SECTIONS),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", _QWEN3, _INTERLEAVED),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeForCausalLM", _QWEN3, _INTERLEAVED),
}
"""The language model's architecture, what `transformers` takes where nothing is said, and its rotation, by the
architecture of the whole."""

_TIED = "tie_word_embeddings"
_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", _TIED)


def qwen_language_model(text: bytes, architecture: str) -> bytes:
    """The configuration of the language model within `text`, the `config.json` of that architecture, as if that were
    all. Both spellings are read: published files have it beside the tower's, later releases of `transformers` write it
    into `text_config`. Raises ValueError for a rotation that is not read, and msgspec's errors."""
    whole = msgspec.json.decode(text, type=dict[str, Any])
    own = whole.get("text_config")
    if own is None:
        own = {key: value for key, value in whole.items() if key != "vision_config"}
    alone, defaults, sections = LANGUAGE_MODELS[architecture]
    given = {key: whole[key] for key in _OF_THE_WHOLE if whole.get(key) is not None}
    read = {**defaults, **given, **{key: value for key, value in own.items() if value is not None}}
    if _TIED in given:  # the head is the whole's; Qwen3-VL's mixtures say otherwise of their language model
        read[_TIED] = given[_TIED]
    key = next((each for each in ("rope_scaling", "rope_parameters") if read.get(each)), "rope_parameters")
    read[key] = _rope({**sections, **(read.get(key) or {})}, interleaved=sections["mrope_interleaved"])
    levels = len((whole.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    return msgspec.json.encode({**read, "architectures": [alone], "input_levels": levels})


def _rope(parameters: dict[str, Any], *, interleaved: bool) -> dict[str, Any]:
    """`mrope` is no scaling, but says that there are sections; whether these are interleaved the architecture says."""
    plain = {key: "default" if value == "mrope" else value for key, value in parameters.items()}
    return {**plain, "mrope_interleaved": interleaved}
