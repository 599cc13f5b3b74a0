"""A tiny random Gemma 3 with its vision tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import SIGLIP, tower
from tests.support.paths import DEMO_MODEL

PATCH, SIDE, TOKENS = 14, 112, 16
IMAGE, BEGIN, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"

TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""The models' own without system messages: a mark for each image, around which their processor writes the rest."""

_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_TOWER = tower(SIDE, PATCH, **SIGLIP)


def make_gemma_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(
        DEMO_MODEL, extra_special_tokens={"image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END}
    )
    tokenizer.chat_template = TEMPLATE
    image, begin, end = tokenizer.convert_tokens_to_ids([IMAGE, BEGIN, END])
    config = Gemma3Config(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None},
        vision_config=_TOWER,
        mm_tokens_per_image=TOKENS,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    torch.manual_seed(seed)
    reference = Gemma3ForConditionalGeneration(config).eval()
    torch.nn.init.normal_(reference.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    reference.save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=TOKENS)
    processor.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
