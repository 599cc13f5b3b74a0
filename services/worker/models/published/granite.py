"""Reads the configuration of the language model within Granite 4 Vision: a Llama with multipliers, some of whose layers
read parts of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from services.worker.models.config import ModelError
from services.worker.models.published.layout import Published, converted

GRANITE_VISION = "Granite4VisionTextForCausalLM"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
"""What `transformers` takes where nothing is said."""


class _RawGraniteVision(Struct, kw_only=True):
    num_hidden_layers: int = 32
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    level_layers: tuple[int, ...] = ()


def granite_vision(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    own, said = converted(raw, _RawGraniteVision), {key: value for key, value in raw.items() if value is not None}
    layers = own.level_layers
    if wrong := [each for each in layers if not 0 <= each < own.num_hidden_layers or layers.count(each) > 1]:
        raise ModelError(
            f"deepstack_layer_map and spatial_target_layers name layer {wrong[0]}: each of the "
            f"{own.num_hidden_layers} layers may be named once"
        )
    changes = {
        "attention_scale": own.attention_multiplier,
        "embedding_scale": None if own.embedding_multiplier == 1 else own.embedding_multiplier,
        "scales_inputs": True,
        "residual_scale": None if own.residual_multiplier == 1 else own.residual_multiplier,
        "logits_divisor": None if own.logits_scaling == 1 else own.logits_scaling,
        "input_levels": len(layers),
        "level_layers": layers,
    }
    return Published({**_DEFAULTS, **said}, changes)
