"""Tiny random DeepSeek-VL models, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLImageProcessorPil,
    DeepseekVLProcessor,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_tiles import TEXT
from tests.support.paths import DEMO_MODEL

PATCH, SIDE = 7, 28
ROWS = (SIDE // PATCH) ** 2
TOKEN = "<image_placeholder>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image_placeholder>{% elif item['type'] == 'text' %}{{ item['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n\n{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""What the models' own comes to."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
    "initializer_range": 0.2,
}


def make_deepseek_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens={"image_token": TOKEN})
    tokenizer.chat_template = TEMPLATE
    config = DeepseekVLConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": 0},
        vision_config={**_TOWER, "model_type": "siglip_vision_model"},
        image_token_id=tokenizer.convert_tokens_to_ids(TOKEN),
    )
    torch.manual_seed(seed)
    reference: Any = DeepseekVLForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images: Any = DeepseekVLImageProcessorPil(size={"height": SIDE, "width": SIDE}, min_size=2)
    processor = DeepseekVLProcessor(images, tokenizer, chat_template=TEMPLATE, num_image_tokens=ROWS)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
