"""A tiny checkpoint of Llama 3.2 Vision's kind: layers that attend to an image's rows between those of a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, randomize

ACROSS = (1, 3)
IMAGE_TOKEN = VOCABULARY
"""The first of the embedding's rows behind the vocabulary."""
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "cross_attention_layers": list(ACROSS),
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 96,
}
"""A tile has five rows: four patches, and one of the whole."""
TILE_ROWS = 5


def make_mllama(folder: Path, **text: Any) -> TinyModel:
    """Writes it; gates of layers across are open, unlike those of a new model."""
    torch.manual_seed(11)
    config = MllamaConfig(vision_config=VISION, text_config={**TEXT, **text}, image_token_index=IMAGE_TOKEN)
    model = MllamaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate"):
                weight.fill_(0.8)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    return TinyModel("mllama", folder, model)
