"""What the configuration of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL says of its language model. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

_QWEN2: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}

LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, [16, 24, 24]),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2, [16, 24, 24]),
}
"""The language model's architecture, what `transformers` takes where nothing is said, and the sections of its rotation,
by the architecture of the whole."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


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
    key = next((each for each in ("rope_scaling", "rope_parameters") if read.get(each)), "rope_parameters")
    read[key] = {"mrope_section": sections, **_rope(read.get(key) or {})}
    return msgspec.json.encode({**read, "architectures": [alone]})


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """`mrope` is no scaling, but says that there are sections."""
    return {key: "default" if value == "mrope" else value for key, value in parameters.items()}
