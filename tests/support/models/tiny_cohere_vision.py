"""Tiny random Aya Vision and Command A Vision models, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoTokenizer,
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    AyaVisionProcessor,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionProcessor,
    GotOcr2ImageProcessorPil,
)

from tests.support.models.library_models import ARCHITECTURES
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import MOST, PATCH, SIDE, SIGLIP, tower
from tests.support.paths import DEMO_MODEL

CohereKind = Literal["aya", "command"]
TOKENS = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_SPECIAL = ("<image>", "TILE", "TILE_GLOBAL", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
TEMPLATE = (
    "{% for message in messages %}<|START_OF_TURN_TOKEN|>{{ message['role'] }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}IMAGE{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|>assistant{% endif %}"
)
"""What the models' own come to, with another name of a role."""
_TOWER = tower(**SIGLIP)


def make_cohere_model(folder: Path, kind: CohereKind, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    aya = kind == "aya"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "<image>" if aya else TOKENS["image_token"])
    configs: Any
    configs, models = (
        (AyaVisionConfig, AyaVisionForConditionalGeneration)
        if aya
        else (Cohere2VisionConfig, Cohere2VisionForConditionalGeneration)
    )
    own = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0}
    image = tokenizer.convert_tokens_to_ids(TOKENS["image_token"])
    config: Any = configs(
        text_config={**ARCHITECTURES["Cohere2"], "model_type": "cohere2", **own},
        vision_config=_TOWER,
        **{"image_token_index" if aya else "image_token_id": image},
        **({} if aya else {"alignment_intermediate_size": 48}),
    )
    torch.manual_seed(seed)
    reference: Any = models(config).eval()
    reference.save_pretrained(folder)
    sizes: Any = {"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST}
    if aya:
        images: Any = GotOcr2ImageProcessorPil(**sizes)
        settings = {"patch_size": PATCH, "downsample_factor": 2, "img_size": SIDE}
        processor: Any = AyaVisionProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **settings)
    else:
        images = command_processor()
        processor = Cohere2VisionProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
        processor.patch_size = 2  # the root of a tile's rows
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor, {"crop_to_patches": True})


def command_processor() -> Any:
    """The library's own of Command A Vision's images."""
    module = "cohere2_vision.image_processing_cohere2_vision"
    sizes = {"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST}
    return pillow_processor(module, "Cohere2VisionImageProcessor", **sizes)
