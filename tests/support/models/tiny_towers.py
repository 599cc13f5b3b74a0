"""Sizes that tiny models of images share: of tiles and patches, of towers, and of language models behind them."""

from __future__ import annotations

from typing import Any

PATCH, SIDE, MOST = 7, 28, 6
"""Pixels of a patch's side and of a tile's, which has 16 of them; and most tiles."""
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
"""Of a language model of Llama's kind."""
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False}
"""Of a tower of SigLIP's kind."""


def tower(side: int = SIDE, patch: int = PATCH, **different: Any) -> dict[str, Any]:
    """The sizes of a tower that sees squares of `side`. `different`: further ones, or others."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "image_size": side, "patch_size": patch, "initializer_range": 0.2, **different}
