"""Tiny random VideoLLaMA 3 models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    ProcessorMixin,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
    VideoLlama3ImageProcessorPil,
    VideoLlama3Processor,
)

from tests.support.models.tiny_glm_vl import MAX_PIXELS, MIN_PIXELS
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_lfm_vl import TEMPLATE as LFM
from tests.support.models.tiny_towers import TEXT
from tests.support.paths import DEMO_MODEL

PATCH = 14
TEMPLATE = LFM.replace("<image>", "<|image_pad|>\n")
"""What the model's own comes to."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}


class _Processor(VideoLlama3Processor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = tokenizer.video_token, tokenizer.video_token_id
        self.video_processor = None
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """What the library is to look for."""
        return ["image_processor", "tokenizer"]


def make_video_llama_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    config = VideoLlama3Config(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=_TOWER,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    torch.manual_seed(seed)
    reference: Any = VideoLlama3ForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images = VideoLlama3ImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS // 4})
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, _Processor(images, tokenizer, chat_template=TEMPLATE))
