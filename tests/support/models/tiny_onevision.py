"""Tiny random LLaVA-OneVision models, and the library's own of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import PATCH, SIDE, TEXT, tower
from tests.support.paths import DEMO_MODEL

SIZES = [[SIDE * height, SIDE * width] for height in (1, 2, 3) for width in (1, 2, 3)]
MOST = "anyres_max_4"
"""Beyond so many tiles, and a fifth more, rows are scaled down."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ '\n' + message['content'] }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + content['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The models' own, which shows a message's images first."""

_TOWER = tower(vision_use_head=False, initializer_range=0.02)


class _Processor(LlavaOnevisionProcessor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **more)


def make_onevision_model(folder: Path, seed: int = 0, **different: Any) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `different`: of the language model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>", "<video>"]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_TOWER),
        text_config=Qwen2Config(vocab_size=len(tokenizer), **{**TEXT, **different}),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=SIZES,
        vision_aspect_ratio=MOST,
    )
    reference: Any = LlavaOnevisionForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images = LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=SIZES)
    processor = _Processor(
        images,
        tokenizer,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=MOST,
        chat_template=TEMPLATE,
    )
    images.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({"num_frames": 4, "size": {"height": SIDE, "width": SIDE}})
    )
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor, heeds_others=True)
