"""Tiny random Ovis2 models, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    Ovis2ImageProcessorPil,
    Ovis2Processor,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import MOST, SIDE, TEXT, tower
from tests.support.paths import DEMO_MODEL

MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>\n{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The models' own, without tools."""
_TOWER = tower(intermediate_size=48, vocab_size=40, hidden_stride=2, initializer_range=0.4)


def make_ovis_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    special = ["<image>", "<IMG_ATOM>", *MARKS, "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    config = Ovis2Config(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer), "tie_word_embeddings": False},
        vision_config=_TOWER,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(list(MARKS)),
        vocab_size=len(tokenizer),
        hidden_size=TEXT["hidden_size"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = Ovis2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        reference.model.visual_embeddings_table.weight.normal_()
    reference.save_pretrained(folder)
    images: Any = Ovis2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_patches=MOST, crop_to_patches=True)
    processor = Ovis2Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
