"""Reads the `config.json` of Llama 3.2 Vision's language model (Mllama), for texts alone: a Llama, between whose layers
lie others that attend to an image's rows. Without an image these give nothing, so here they are not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import LayerConfig, ModelError
from services.worker.models.published.layout import Published

MLLAMA_TEXT = "MllamaForCausalLM"
FURTHER_WORDS = 8
"""Rows that the embedding has behind those of the vocabulary: the image's token is the first."""
_THETA = 500_000.0


class _RawMllama(Struct, kw_only=True):
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    hidden_act: str = "silu"
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
