"""Tiny random models of 2026 with their towers (Mistral Large 4, GLM-5-Next, Qwen4, MiniMax-M3), and the library's own
of the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import (
    AutoTokenizer,
    Glm5NextImageProcessorPil,
    Glm5NextProcessor,
    PixtralImageProcessorPil,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
)

from tests.support.models import tiny_glm_vl, tiny_pixtral, tiny_qwen_vl
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_lfm_vl import TEMPLATE as LFM
from tests.support.models.tiny_models import make_config, randomize
from tests.support.models.tiny_towers import tower
from tests.support.models.torchvision_stub import import_without_torchvision
from tests.support.paths import DEMO_MODEL

NewestKind = Literal["mistral-large-4", "glm-5-next", "qwen4", "minimax-m3"]
PATCH, SIDE = 14, 28
"""Pixels of a patch, and of the square of a row."""
BOUNDS = {"shortest_edge": 2 * SIDE**2, "longest_edge": 12 * SIDE**2}
_MINIMAX = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")


class _Kind(NamedTuple):
    """What the whole is made of, but for its language model."""

    name: str
    """Of the library's classes, without what they end with."""
    vision: dict[str, Any]
    tokens: tuple[str, ...]
    """Of an image first."""
    keys: tuple[str, ...]
    """What the configuration calls those."""
    template: str
    more: Mapping[str, Any] = MappingProxyType({})
    text: Mapping[str, Any] = MappingProxyType({})

    @property
    def config(self) -> Any:
        """The library's class."""
        return getattr(transformers, f"{self.name}Config")

    @property
    def architecture(self) -> str:
        """As files have it."""
        return f"{self.name.replace('M3VL', 'M3Sparse')}ForConditionalGeneration"


_GLM_KEYS = ("image", "image_start", "image_end", "video", "video_start", "video_end")
_GRID: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.2}
_SEES = {**_GRID, "out_hidden_size": 48, "intermediate_size": 48}
KINDS: dict[str, _Kind] = {
    "mistral-large-4": _Kind(
        "MistralLarge4",
        {"model_type": "pixtral", **tower(tiny_pixtral.MAX_SIDE, PATCH, head_dim=16)},
        (tiny_pixtral.IMAGE, tiny_pixtral.BREAK, tiny_pixtral.END, "[INST]", "[/INST]"),
        ("image_token_index",),
        tiny_pixtral.TEMPLATE,
    ),
    "glm-5-next": _Kind(
        "Glm5Next",
        {**_SEES, "projection_intermediate_size": 48, "image_size": 4 * PATCH},
        (*tiny_glm_vl.SPECIAL, "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        tuple(f"{each}_token_id" for each in _GLM_KEYS),
        tiny_glm_vl.TEMPLATE,
    ),
    "qwen4": _Kind(
        "Qwen4Exp",
        {**_SEES, "num_position_embeddings": 64},
        tiny_qwen_vl.SPECIAL,
        ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id"),
        tiny_qwen_vl.TEMPLATE,
        text={
            "indexer_budget": 512,
            "rope_parameters": {"rope_theta": 30.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    ),
    "minimax-m3": _Kind(
        "MiniMaxM3VL",
        tower(4 * PATCH, PATCH),
        (*_MINIMAX, "<|im_start|>", "<|im_end|>"),
        ("image_token_index", "video_token_index"),
        LFM.replace("<image>", _MINIMAX[0]),
        {"projector_hidden_size": 40},
    ),
}


def make_newest_model(folder: Path, kind: NewestKind, seed: int = 0, **different: Any) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `different`: of the language model."""
    own = KINDS[kind]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(own.tokens)})
    tokenizer.chat_template = own.template
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, **own.text, **different}
    config: Any = make_config(kind, **sizes)
    config = own.config(
        text_config=getattr(config, "text_config", config).to_dict(),
        vision_config=own.vision,
        tie_word_embeddings=False,
        **dict(zip(own.keys, tokenizer.convert_tokens_to_ids(list(own.tokens)), strict=False)),
        **own.more,
    )
    torch.manual_seed(seed)
    reference: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomize(reference)
    reference.eval().save_pretrained(folder)
    reference.generation_config.eos_token_id = None
    images = _images(kind)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "glm-5-next":
        rows = {"min_image_tokens": 8, "max_image_tokens": 20}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(rows))
    return _model(kind, folder, reference, images, tokenizer)


def _images(kind: NewestKind) -> Any:
    if kind == "mistral-large-4":
        sides = {"height": PATCH, "width": PATCH}
        return PixtralImageProcessorPil(size={"longest_edge": tiny_pixtral.MAX_SIDE}, patch_size=sides)
    if kind == "glm-5-next":
        return Glm5NextImageProcessorPil(patch_size=PATCH, min_image_tokens=2, max_image_tokens=12)  # type: ignore[call-arg]
    if kind == "minimax-m3":
        module = "minimax_m3_vl.image_processing_minimax_m3_vl"
        return pillow_processor(module, "MiniMaxM3VLImageProcessor", size=dict(BOUNDS), patch_size=PATCH)
    return Qwen2VLImageProcessorPil(patch_size=PATCH, size=dict(BOUNDS))  # type: ignore[arg-type]


def _model(kind: NewestKind, folder: Path, reference: Any, images: Any, tokenizer: Any) -> ImageModel:
    if kind == "qwen4":
        return ImageModel(folder, reference, tiny_qwen_vl.QwenProcessor(images, tokenizer))
    template = KINDS[kind].template
    if kind == "mistral-large-4":
        processor = tiny_pixtral.library_processor()(
            images, tokenizer, patch_size=PATCH, spatial_merge_size=2, chat_template=template
        )
        squares = {"patch_size": {"height": SIDE, "width": SIDE}}
        return ImageModel(folder, reference, processor, squares)
    if kind == "glm-5-next":
        return ImageModel(folder, reference, _Glm(images, tokenizer, chat_template=template))
    return ImageModel(folder, reference, _minimax(images, tokenizer, template))


class _Glm(Glm5NextProcessor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **more)

    def create_mm_token_type_ids(self, input_ids: Any) -> list[list[int]]:
        """As the library's, which makes arrays of tensors in a way that NumPy warns of."""
        kinds: list[list[int]] = super().create_mm_token_type_ids(torch.as_tensor(input_ids).tolist())
        return kinds


def _minimax(images: Any, tokenizer: Any, template: str) -> Any:
    """The library's, without its processor of videos, which asks for torchvision."""
    module = import_without_torchvision("transformers.models.minimax_m3_vl.processing_minimax_m3_vl")

    def __init__(self: Any, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        self.image_token, self.image_token_id = _MINIMAX[0], tokenizer.convert_tokens_to_ids(_MINIMAX[0])
        self.video_token, self.video_token_id = _MINIMAX[1], tokenizer.convert_tokens_to_ids(_MINIMAX[1])
        ProcessorMixin.__init__(self, image_processor, tokenizer, None, **more)

    own = type("MiniMaxM3VLProcessor", (module.MiniMaxM3VLProcessor,), {"__init__": __init__})
    return own(images, tokenizer, chat_template=template)
