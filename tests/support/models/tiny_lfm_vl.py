"""Tiny random LFM2-VL models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Lfm2VlConfig, Lfm2VlForConditionalGeneration, Lfm2VlProcessor

from tests.support.models.library_models import NESTED
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import PATCH, SIDE
from tests.support.paths import DEMO_MODEL

SIZES: dict[str, Any] = {
    "encoder_patch_size": PATCH,
    "tile_size": SIDE,
    "max_tiles": 6,
    "min_image_tokens": 2,
    "max_image_tokens": 16,
}
_MARKS = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What the models' own comes to."""
_TOWER: dict[str, Any] = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_patches": 16,
    "patch_size": PATCH,
    "vision_use_head": False,
    "initializer_range": 0.2,
}


def make_lfm_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    places = [f"<|img_row_{line}_col_{column}|>" for line in range(1, 7) for column in range(1, 7)]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *_MARKS, *places]})
    tokenizer.chat_template = TEMPLATE
    text = {**NESTED["Lfm2Vl"], "vocab_size": len(tokenizer), "initializer_range": 0.2}
    config = Lfm2VlConfig(
        text_config={**text, "max_position_embeddings": 512, "pad_token_id": 0},
        vision_config=_TOWER,
        projector_hidden_size=48,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = Lfm2VlForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images = lfm_processor()
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, Lfm2VlProcessor(images, tokenizer, chat_template=TEMPLATE))


def lfm_processor(**different: Any) -> Any:
    """The library's own of images."""
    module = "lfm2_vl.image_processing_lfm2_vl"
    return pillow_processor(module, "Lfm2VlImageProcessor", **{**SIZES, **different})
