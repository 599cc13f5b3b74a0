"""Tiny random models that read documents (GLM-OCR, PaddleOCR-VL, LightOnOCR, Qianfan-OCR), and the library's own of the
same weights."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import transformers
from transformers import (
    AutoTokenizer,
    Glm46VImageProcessorPil,
    Glm46VProcessor,
    GotOcr2ImageProcessorPil,
    PaddleOCRVLImageProcessorPil,
    PaddleOCRVLProcessor,
    PixtralImageProcessorPil,
    QianfanOCRProcessor,
)

from tests.support.models.tiny_glm_vl import MAX_PIXELS, MIN_PIXELS, SIDE, TEMPLATE, _Processor
from tests.support.models.tiny_glm_vl import SPECIAL as GLM_TOKENS
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_tiles import INTERNVL
from tests.support.models.tiny_towers import PATCH as TILE_PATCH
from tests.support.models.tiny_towers import SIDE as TILE_SIDE
from tests.support.models.tiny_towers import TEXT, tower
from tests.support.paths import DEMO_MODEL

OcrKind = Literal["glm-ocr", "paddle-ocr", "lighton-ocr", "qianfan-ocr"]
PATCH = 14

PADDLE = (
    "<|begin_of_sentence|>{% for message in messages %}{% if message['role'] == 'user' %}User: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% else %}Assistant: {{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
_PADDLE_TOKENS = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|begin_of_sentence|>")
LIGHTON = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|image_pad|>{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What the models' own come to."""
_LIGHTON_TOKENS = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}
_GLM_TEXT: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "max_position_embeddings"},
    "max_position_embeddings": 512,
    "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 30.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 4, 4],
    },
}
_GLM_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_PADDLE_TEXT: dict[str, Any] = {
    **TEXT,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "mrope_section": [4, 4, 4]},
}


def make_ocr_model(folder: Path, kind: OcrKind, seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer."""
    torch.manual_seed(seed)
    makers = {"glm-ocr": _glm, "paddle-ocr": _paddle, "lighton-ocr": _lighton, "qianfan-ocr": _qianfan}
    return makers[kind](folder)


def _glm(folder: Path) -> ImageModel:
    tokenizer = _tokenizer(TEMPLATE, [*GLM_TOKENS, "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"])
    image, start, end, video, video_start, video_end = tokenizer.convert_tokens_to_ids(list(GLM_TOKENS))
    config = transformers.GlmOcrConfig(
        text_config={**_GLM_TEXT, "vocab_size": len(tokenizer)},
        vision_config=_GLM_TOWER,
        image_token_id=image,
        image_start_token_id=start,
        image_end_token_id=end,
        video_token_id=video,
        video_start_token_id=video_start,
        video_end_token_id=video_end,
        tie_word_embeddings=False,
    )
    reference: Any = transformers.GlmOcrForConditionalGeneration(config)
    sizes: Any = {"size": {"shortest_edge": 2 * MIN_PIXELS, "longest_edge": 2 * MAX_PIXELS}, "patch_size": PATCH}
    images = Glm46VImageProcessorPil(**sizes)
    processor = _Processor(images, tokenizer, chat_template=TEMPLATE)
    processor.replace_frame_token_id = MethodType(Glm46VProcessor.replace_frame_token_id, processor)
    bounds = {"shortest_edge": 8 * SIDE**2, "longest_edge": 72 * SIDE**2}
    written = _written(folder, reference, images, processor)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": bounds}))
    return written


def _paddle(folder: Path) -> ImageModel:
    tokenizer = _tokenizer(PADDLE, list(_PADDLE_TOKENS[1:]), image_token=_PADDLE_TOKENS[0])
    image, start, end, _ = tokenizer.convert_tokens_to_ids(list(_PADDLE_TOKENS))
    config = transformers.PaddleOCRVLConfig(
        text_config={**_PADDLE_TEXT, "vocab_size": len(tokenizer)},
        vision_config=tower(4 * PATCH, PATCH),
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=len(tokenizer) - 1,
        tie_word_embeddings=False,
    )
    reference: Any = transformers.PaddleOCRVLForConditionalGeneration(config)
    sizes: Any = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, "patch_size": PATCH}
    images = PaddleOCRVLImageProcessorPil(**sizes)
    return _written(folder, reference, images, PaddleOCRVLProcessor(images, tokenizer, chat_template=PADDLE))


def _lighton(folder: Path) -> ImageModel:
    tokenizer = _tokenizer(LIGHTON, ["<|im_start|>", "<|im_end|>"], **_LIGHTON_TOKENS)
    config = transformers.LightOnOcrConfig(
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 24, "vocab_size": len(tokenizer)},
        vision_config=tower(10 * SIDE, PATCH, head_dim=16, model_type="pixtral"),
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
    )
    reference: Any = transformers.LightOnOcrForConditionalGeneration(config)
    squares = {"height": SIDE, "width": SIDE}
    images = PixtralImageProcessorPil(size={"longest_edge": 6 * SIDE}, patch_size=squares)
    name = "transformers.models.pixtral.image_processing_pixtral"  # asks for torchvision, for a function that this has:
    sys.modules.setdefault(name, import_module("transformers.models.pixtral.image_processing_pil_pixtral"))
    processors = import_module("transformers.models.lighton_ocr.processing_lighton_ocr").LightOnOcrProcessor
    return _written(folder, reference, images, processors(images, tokenizer, chat_template=LIGHTON))


def _qianfan(folder: Path) -> ImageModel:
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    template = INTERNVL.replace("<IMG_CONTEXT>", "<image>")
    tokenizer = _tokenizer(template, ["<|im_start|>", "<|im_end|>"], **tokens)
    config = transformers.QianfanOCRConfig(
        vision_config={
            **tower(),
            "image_size": [TILE_SIDE, TILE_SIDE],
            "patch_size": [TILE_PATCH, TILE_PATCH],
        },
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 24, "vocab_size": len(tokenizer)},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    reference: Any = transformers.QianfanOCRForConditionalGeneration(config)
    images = GotOcr2ImageProcessorPil(size={"height": TILE_SIDE, "width": TILE_SIDE}, max_patches=6)
    processor = QianfanOCRProcessor(images, tokenizer, image_seq_length=4, chat_template=template)
    return _written(folder, reference, images, processor)._replace(settings={"crop_to_patches": True})


def _tokenizer(template: str, special: list[str], **named: str) -> Any:
    more = {"extra_special_tokens": named} if named else {}
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, **more)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def _written(folder: Path, reference: Any, images: Any, processor: Any) -> ImageModel:
    reference.eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")) and "language_model" in name:
                weight.add_(torch.randn_like(weight) * 0.3)  # so that they are looked at
    reference.save_pretrained(folder)
    images.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
