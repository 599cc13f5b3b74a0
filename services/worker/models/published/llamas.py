"""Reads the `config.json` of language models of models that see or hear. They are Llamas: Llama 3.2 Vision (Mllama),
for texts alone, without the layers that attend to images, which give nothing where there is none; and with multipliers
Granite Speech, Granite Docling and Granite 4 Vision; some layers of the last two read a part of an image's row
each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import LayerConfig, ModelError
from services.worker.models.published.layout import Published, converted

MLLAMA_TEXT, GRANITE_VISION = "MllamaForCausalLM", "Granite4VisionTextForCausalLM"
GRANITE_SPEECH_TEXT, GRANITE_DOCLING_TEXT = "GraniteSpeechTextForCausalLM", "GraniteDoclingTextForCausalLM"
FURTHER_WORDS = 8
"""Rows that the embedding has behind those of the vocabulary: the image's token is the first."""
_THETA = 500_000.0
_GRANITE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
"""What `transformers` takes where a Granite says nothing."""
_DOCLING_DEFAULTS: dict[str, Any] = {
    "vocab_size": 133_800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 100_257,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
}
"""What it takes where a Granite Docling's does not."""


class _RawMllama(Struct, kw_only=True):
    num_hidden_layers: int = 40
    cross_attention_layers: list[int] | None = None
    rope_theta: float | None = None


def mllama(raw: Mapping[str, Any]) -> Published:
    """Layers have the checkpoint's numbers. Raises ModelError, and msgspec.ValidationError."""
    own = msgspec.convert(raw, _RawMllama)
    across = [3, 8, 13, 18, 23, 28, 33, 38] if own.cross_attention_layers is None else own.cross_attention_layers
    if len(set(across)) != len(across) or not all(0 <= each < own.num_hidden_layers for each in across):
        raise ModelError(f"cross_attention_layers {across}: different ones below {own.num_hidden_layers} are expected")
    numbers = [number for number in range(own.num_hidden_layers) if number not in across]
    if not numbers:
        raise ModelError(f"cross_attention_layers {across}: all {own.num_hidden_layers} layers attend to images")
    base = {**raw, "num_hidden_layers": len(numbers)}
    if "rope_parameters" not in raw and own.rope_theta is None:
        base["rope_theta"] = _THETA
    if raw.get("rms_norm_eps") is None:
        base["rms_norm_eps"] = 1e-5

    def arranged(layer: LayerConfig) -> tuple[LayerConfig, ...]:
        return tuple(replace(layer, blocks=(number, number)) for number in numbers)

    return Published(base, {"further_words": FURTHER_WORDS}, arranged=arranged)


class _RawGraniteBase(Struct, kw_only=True):
    num_hidden_layers: int = 32
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    level_layers: tuple[int, ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        """Rows of images and sounds are multiplied as the embedding's are."""
        return {
            "attention_scale": self.attention_multiplier,
            "embedding_scale": None if self.embedding_multiplier == 1 else self.embedding_multiplier,
            "scales_inputs": True,
            "residual_scale": None if self.residual_multiplier == 1 else self.residual_multiplier,
            "logits_divisor": None if self.logits_scaling == 1 else self.logits_scaling,
        }


def granite_speech(raw: Mapping[str, Any]) -> Published:
    """Raises msgspec.ValidationError."""
    return Published(dict(raw), converted(raw, _RawGraniteBase).changes)


def granite_vision(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    own, said = converted(raw, _RawGraniteBase), {key: value for key, value in raw.items() if value is not None}
    layers = own.level_layers
    if wrong := [each for each in layers if not 0 <= each < own.num_hidden_layers or layers.count(each) > 1]:
        raise ModelError(
            f"deepstack_layer_map and spatial_target_layers name layer {wrong[0]}: each of the "
            f"{own.num_hidden_layers} layers may be named once"
        )
    levels: dict[str, Any] = {"input_levels": len(layers), "level_layers": layers}
    return Published({**_GRANITE_DEFAULTS, **said}, own.changes | levels)


def granite_docling(raw: Mapping[str, Any]) -> Published:
    """Parts of an image's row join behind the first layers. Raises msgspec.ValidationError."""
    said = {**_DOCLING_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    return Published(said, converted(said, _RawGraniteBase).changes)
