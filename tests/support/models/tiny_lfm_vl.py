"""Tiny random LFM2-VL and LFM3-VL models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlProcessor,
    Lfm3VlConfig,
    Lfm3VlForConditionalGeneration,
    Lfm3VlProcessor,
    Qwen2VLImageProcessorPil,
)

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
    "{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'video' %}<video>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What the models' own comes to."""
LFM3_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
LFM3_TEMPLATE = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>").replace(
    "<video>", "<|vision_start|><|video_pad|><|vision_end|>"
)
_LFM3_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "patch_size": 14,
    "initializer_range": 0.2,
}
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


class _Lfm3VlProcessor(Lfm3VlProcessor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **more)


def make_lfm3_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*LFM3_TOKENS, "<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = LFM3_TEMPLATE
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(LFM3_TOKENS))
    text = {**NESTED["Lfm3Vl"], "vocab_size": len(tokenizer), "initializer_range": 0.2}
    config = Lfm3VlConfig(
        text_config={**text, "max_position_embeddings": 512, "pad_token_id": 0},
        vision_config=_LFM3_TOWER,
        projector_hidden_size=48,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = Lfm3VlForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    sizes: Any = {"size": {"shortest_edge": 2 * 28**2, "longest_edge": 16 * 28**2}, "patch_size": 14}
    images = Qwen2VLImageProcessorPil(**sizes)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, _Lfm3VlProcessor(images, tokenizer, chat_template=LFM3_TEMPLATE))


def lfm_processor(**different: Any) -> Any:
    """The library's own of images."""
    module = "lfm2_vl.image_processing_lfm2_vl"
    return pillow_processor(module, "Lfm2VlImageProcessor", **{**SIZES, **different})
