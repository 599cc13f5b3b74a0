"""Tiny random models whose images are cut into tiles (Idefics3, SmolVLM, InternVL), and the library's own of the same
weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import (
    AutoTokenizer,
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_pixtral import PixtralKind, make_pixtral_model
from tests.support.models.tiny_towers import PATCH, SIDE, TEXT, tower
from tests.support.paths import DEMO_MODEL

TileKind = Literal["idefics3", "smolvlm", "internvl"]

IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
INTERNVL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The models' own."""

_TOWER = tower()


class _SmolVLM(SmolVLMProcessor):
    """Without the processor of videos, which asks for torchvision."""

    video_processor = SimpleNamespace(num_frames=1, fps=1)

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        vars(processing_smolvlm).update(num2words={4: "four"}.__getitem__)  # of a package that is not installed
        super().__init__(image_processor, tokenizer, None, **more)


class _InternVL(InternVLProcessor):
    """The same."""

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **more)


def make_written_model(folder: Path, kind: PixtralKind | TileKind) -> ImageModel:
    """Of one of the kinds that have text around and among the rows of an image."""
    return make_pixtral_model(folder, kind) if kind in ("mistral3", "llava") else make_tile_model(folder, kind)


def make_tile_model(folder: Path, kind: TileKind, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer; SmolVLM's has names of tiles among its special
    tokens, Idefics3's has not."""
    torch.manual_seed(seed)
    return _internvl(folder) if kind == "internvl" else _idefics(folder, kind)


def _idefics(folder: Path, kind: TileKind) -> ImageModel:
    smol = kind == "smolvlm"
    names = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)] if smol else []
    special = ["<|im_start|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", *names]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *(["<global-img>"] if smol else [])]})
    tokenizer.chat_template = IDEFICS
    configs: Any
    configs, models = (
        (SmolVLMConfig, SmolVLMForConditionalGeneration) if smol else (Idefics3Config, Idefics3ForConditionalGeneration)
    )
    config: Any = configs(
        vision_config={**_TOWER},
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": 0},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    reference: Any = models(config).eval()
    reference.save_pretrained(folder)
    sizes: Any = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    images = SmolVLMImageProcessorPil(**sizes) if smol else Idefics3ImageProcessorPil(**sizes)
    processors: Any = _SmolVLM if smol else Idefics3Processor
    processor = processors(images, tokenizer, image_seq_len=4, chat_template=IDEFICS)
    _save(folder, processor, images, tokenizer)
    if smol:
        sampled = {"fps": 3, "max_frames": 4, "video_size": {"longest_edge": 2 * SIDE}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_sampling": sampled}))
    return ImageModel(folder, reference, processor)


def _internvl(folder: Path) -> ImageModel:
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens={**tokens, "video_token": "<video>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = INTERNVL
    config = InternVLConfig(
        vision_config={**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    reference: Any = InternVLForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_patches=6)
    processor = _InternVL(images, tokenizer, image_seq_length=4, chat_template=INTERNVL)
    _save(folder, processor, images, tokenizer)
    (folder / "video_preprocessor_config.json").write_text('{"num_frames": 5}')
    return ImageModel(folder, reference, processor, {"crop_to_patches": True})


def _save(folder: Path, processor: Any, images: Any, tokenizer: Any) -> None:
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
