"""Tiny random Llama 4 models with their tower, and the library's own of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4Processor,
)
from transformers.image_transforms import split_to_tiles
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.support.models.library_models import ARCHITECTURES
from tests.support.models.tiny_images import ImageModel
from tests.support.models.torchvision_stub import import_without_torchvision
from tests.support.paths import DEMO_MODEL

PATCH, SIDE, MOST = 7, 28, 6
"""Of a tile: 16 patches, of which four are a row; and most tiles."""
SPECIAL = (
    "<|image|>",
    "<|patch|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
)
TEMPLATE = (
    "{% for message in messages %}<|header_start|>{{ message['role'] }}<|header_end|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|image|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
"""The models' own, without tools."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
    "initializer_range": 0.2,
}


MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]  # the library's own Llama 4 looks there


class LibraryTiles:
    """The library's processor of images, by its own functions and Pillow's scaling."""

    model_input_names = ("pixel_values", "aspect_ratios")

    def __init__(self) -> None:
        self._own = import_without_torchvision("transformers.models.llama4.image_processing_llama4")

    def fetch_images(self, images: Any) -> Any:
        """They are here."""
        return images

    def __call__(self, images: Any, **settings: Any) -> dict[str, Any]:
        """Of one image or several."""
        made = [self._tiles(each) for each in (images if isinstance(images, list) else [images])]
        tiles, ratios = zip(*made, strict=True)
        return {"pixel_values": torch.cat(tiles).float(), "aspect_ratios": torch.tensor(ratios)}

    def size(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The canvas of an image, and its own size on it; all height before width."""
        self._own.find_supported_resolutions.cache_clear()
        side: Any = type("Side", (), {"height": SIDE, "width": SIDE, "__hash__": lambda self: SIDE})()
        found = torch.tensor(self._own.find_supported_resolutions(MOST, side))
        canvas = self._own.get_best_fit(size, found)
        room = tuple(min(max(own, SIDE), most) for own, most in zip(size, canvas, strict=True))
        scaled = self._own.get_max_res_without_distortion(size, room)
        return tuple(canvas.tolist()), tuple(max(int(each), 1) for each in scaled)

    def _tiles(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        canvas, (height, width) = self.size((image.height, image.width))
        laid = np.zeros((*canvas, 3), np.uint8)
        laid[:height, :width] = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        ratio = canvas[0] // SIDE, canvas[1] // SIDE
        tiles = split_to_tiles(self._numbers(laid)[None], *ratio)[0]
        if ratio == (1, 1):
            return tiles, ratio
        whole = self._numbers(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
        return torch.cat((tiles, whole[None])), ratio

    def _numbers(self, pixels: Any) -> torch.Tensor:
        own = torch.tensor(pixels).permute(2, 0, 1).to(torch.bfloat16) * (1 / 255)
        return own.sub_(0.5).div_(0.5).contiguous()


def make_llama4_model(folder: Path, seed: int = 0, **different: Any) -> ImageModel:
    """Writes a model to `folder`, with the demo model's tokenizer. `different`: of the language model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    text = {**ARCHITECTURES["Llama4Text"], "vocab_size": len(tokenizer), "pad_token_id": 0, **different}
    patch = tokenizer.convert_tokens_to_ids("<|patch|>")
    config = Llama4Config(text_config=text, vision_config=_TOWER, image_token_index=patch)
    torch.manual_seed(seed)
    reference: Any = Llama4ForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST})
    )
    processor: Any = Llama4Processor(CLIPImageProcessorPil(), tokenizer, patch_size=PATCH, chat_template=TEMPLATE)
    processor.image_processor = LibraryTiles()
    return ImageModel(folder, reference, processor)
