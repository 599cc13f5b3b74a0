"""Tiny random Kimi K2.5 models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Kimi_K25Processor,
    ProcessorMixin,
)

from tests.support.models.library_models import NESTED
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.paths import DEMO_MODEL

PATCH, MOST, MOST_OF_A_SIDE = 7, 120, 32
"""Pixels of a patch, patches of an image, and of a side of it."""
PAD = "<|media_pad|>"
_MARKS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' or item['type'] == 'image_url' %}"
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
"""What the model's own comes to."""
_TOWER: dict[str, Any] = {
    "patch_size": PATCH,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


class _Processor(Kimi_K25Processor):
    """Without the processor of videos."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, None, chat_template=chat_template)
        self.image_token, self.image_token_id = PAD, tokenizer.convert_tokens_to_ids(PAD)
        self.video_token, self.video_token_id = "<|no_video|>", None


def make_kimi_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [PAD, *_MARKS]})
    tokenizer.chat_template = TEMPLATE
    text = {**NESTED["Kimi_K25"], "vocab_size": len(tokenizer), "initializer_range": 0.2}
    config = Kimi_K25Config(
        text_config={**text, "max_position_embeddings": 256, "pad_token_id": 0},
        vision_config=_TOWER,
        projection_hidden_size=32,
        image_token_id=tokenizer.convert_tokens_to_ids(PAD),
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = Kimi_K25ForConditionalGeneration(config).eval()
    with torch.no_grad():
        reference.model.vision_tower.patch_embed.pos_emb.position_embeddings.normal_(0, 0.2)
    reference.save_pretrained(folder)
    images = kimi_processor()
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, _Processor(images, tokenizer, chat_template=TEMPLATE))


def kimi_processor() -> Any:
    """The library's own of images."""
    module, sides = "kimi_k25.image_processing_kimi_k25", {"max_height": MOST_OF_A_SIDE, "max_width": MOST_OF_A_SIDE}
    return pillow_processor(module, "Kimi_K25ImageProcessor", size=sides, max_patches=MOST, patch_size=PATCH)
