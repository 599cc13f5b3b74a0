"""Tiny random DeepSeek-OCR 2 models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekOcr2ImageProcessorPil,
    DeepseekOcr2Processor,
)

from tests.support.models.tiny_images import TEMPLATE as LLAVA
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import TEXT
from tests.support.paths import DEMO_MODEL

PATCH, SIDE, TILE = 2, 128, 96
"""Pixels of a patch, of the whole image and of a tile: as many patches as in the released model, whose numbers of rows
are fixed."""
_SAM: dict[str, Any] = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "global_attn_indexes": [],
    "window_size": 8,
    "downsample_channels": [12, 32],
    "initializer_range": 0.2,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}
_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "max_position_embeddings": 4096,
}


def make_deepseek_ocr_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens={"image_token": "<image>"})
    tokenizer.chat_template = LLAVA
    config = DeepseekOcr2Config(
        text_config={**_TEXT, "vocab_size": len(tokenizer)},
        vision_config={"sam_config": _SAM, "encoder_config": _ENCODER},
        image_token_id=tokenizer.image_token_id,
    )
    torch.manual_seed(seed)
    reference: Any = DeepseekOcr2ForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images = DeepseekOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, tile_size=TILE)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = DeepseekOcr2Processor(images, tokenizer, chat_template=LLAVA, patch_size=PATCH, downsample_ratio=4)
    return ImageModel(folder, reference, processor)
