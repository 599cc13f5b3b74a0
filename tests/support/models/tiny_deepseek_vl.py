"""Tiny random DeepSeek-VL models, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    DeepseekVLHybridImageProcessorPil,
    DeepseekVLHybridProcessor,
    DeepseekVLImageProcessorPil,
    DeepseekVLProcessor,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import PATCH, SIDE, SIGLIP, TEXT, tower
from tests.support.paths import DEMO_MODEL

ROWS = (SIDE // PATCH) ** 2
TOKEN = "<image_placeholder>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image_placeholder>{% elif item['type'] == 'text' %}{{ item['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n\n{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""What the models' own comes to."""


_HIGH_SIDE, _HIGH_PATCH = 64, 8
_HIGH_TOWER: dict[str, Any] = {
    "model_type": "sam_vision_model",
    "hidden_size": 32,
    "output_channels": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _HIGH_SIDE,
    "patch_size": _HIGH_PATCH,
    "window_size": 3,
    "global_attn_indexes": [1],
    "initializer_range": 0.2,
}
"""Of the hybrid one, which has a second tower for a larger image."""


def make_deepseek_model(folder: Path, seed: int = 0, *, hybrid: bool = False) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `hybrid`: one with two towers."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens={"image_token": TOKEN})
    tokenizer.chat_template = TEMPLATE
    configs: Any = DeepseekVLHybridConfig if hybrid else DeepseekVLConfig
    config = configs(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": 0},
        vision_config=tower(**SIGLIP),
        image_token_id=tokenizer.convert_tokens_to_ids(TOKEN),
        **({"high_res_vision_config": _HIGH_TOWER} if hybrid else {}),
    )
    torch.manual_seed(seed)
    models: Any = DeepseekVLHybridForConditionalGeneration if hybrid else DeepseekVLForConditionalGeneration
    reference = models(config).eval()
    if hybrid:
        with torch.no_grad():
            reference.model.high_res_vision_alpha.fill_(0.7)  # so that what it weighs is looked at
    reference.save_pretrained(folder)
    sizes: Any = {"size": {"height": SIDE, "width": SIDE}, "min_size": 2}
    images: Any = DeepseekVLImageProcessorPil(**sizes)
    processors: Any = DeepseekVLProcessor
    if hybrid:
        high = {"height": _HIGH_SIDE, "width": _HIGH_SIDE}
        images, processors = DeepseekVLHybridImageProcessorPil(**sizes, high_res_size=high), DeepseekVLHybridProcessor
    processor = processors(images, tokenizer, chat_template=TEMPLATE, num_image_tokens=ROWS)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
