"""Tiny random models that take images, images of a few pixels, and what `transformers` makes of both: the reference."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    MistralConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.image_utils import load_image

from tests.support.models.tiny_towers import TEXT, tower
from tests.support.paths import DEMO_MODEL

SIDE, PATCH = 56, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
POSITIONS = 512

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""LLaVA 1.5's, which shows a message's images first."""

_TEXT = {**TEXT, "max_position_embeddings": POSITIONS}
_TOWER = tower(SIDE, PATCH, num_hidden_layers=3)


_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
"""What the library's processors say of each token."""


class ImageModel(NamedTuple):
    """A model that was written to a folder, and the library's own of the same weights."""

    path: Path
    reference: Any
    processor: Any
    settings: Mapping[str, Any] = {}
    """What the whole processor asks that of images for."""
    heeds_others: bool = False
    """Whether an image alone in a chat has other rows than one of several."""

    def ids_and_rows(self, messages: list[dict[str, Any]], images: list[bytes]) -> dict[str, Any]:
        """What the library's processor makes of a chat: token ids and pixels."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        loaded = [load_image(Image.open(io.BytesIO(each))) for each in images]
        given = [loaded] if self.heeds_others and loaded else loaded
        made: dict[str, Any] = self.processor(
            text=text, images=given or None, add_special_tokens=False, return_tensors="pt"
        )
        return made

    @torch.inference_mode()
    def greedy(self, messages: list[dict[str, Any]], images: list[bytes], count: int) -> list[int]:
        """`count` tokens as the library's `generate` draws them."""
        inputs = self.ids_and_rows(messages, images)
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = self.reference.generate(**inputs, generation_config=settings)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    def text(self, messages: list[dict[str, Any]], images: list[bytes], count: int) -> str:
        """The same as text."""
        decoded: str = self.processor.tokenizer.decode(self.greedy(messages, images, count), skip_special_tokens=True)
        return decoded

    @torch.inference_mode()
    def rows(self, image: bytes, several: bool = False) -> torch.Tensor:
        """[tokens, hidden] what stands for an image. `several`: its chat has others, here itself once more."""
        loaded = load_image(Image.open(io.BytesIO(image)))
        if several and self.heeds_others:
            pixels = self.processor.image_processor([[loaded, loaded]], return_tensors="pt")
            return self.reference.get_image_features(**pixels).pooler_output[0]
        pixels = self.processor.image_processor(loaded, return_tensors="pt", **self.settings)
        for name in ("num_crops", "num_patches", "rows", "cols", "aspect_ratios", "grids", "num_soft_tokens_per_image"):
            pixels.pop(name, None)
        owner = self.reference if hasattr(self.reference, "get_image_features") else self.reference.model
        features = owner.get_image_features(**pixels)
        if self.reference.config.model_type == "llama4":  # which projects them elsewhere
            return self.reference.multi_modal_projector(features.last_hidden_state.flatten(0, 1))
        if features.pooler_output is None:  # Granite 4 Vision's, which join layers by number
            levels = [packed[0] for _, packed in features.deepstack_features]
            return torch.cat((torch.zeros_like(levels[0]), *levels), dim=1)
        rows = torch.cat(tuple(features.pooler_output))
        if (marks := getattr(features, "visual_indicator_features", None)) is not None:
            return self._among_marks(rows, marks, image)
        return torch.cat((rows, *(level[0] for level in getattr(features, "deepstack_features", None) or ())), dim=1)

    def _among_marks(self, rows: torch.Tensor, marks: torch.Tensor, image: bytes) -> torch.Tensor:
        """[tokens, hidden] of a chat that shows Ovis2 nothing but `image`, from the first mark to the last."""
        ids = self.ids_and_rows([{"role": "user", "content": [{"type": "image"}]}], [image])["input_ids"][0].tolist()
        known, own = self.row_tokens, iter(rows)
        return torch.stack(
            [marks[known.index(each) - 1] if each != known[0] else next(own) for each in ids if each in known]
        )

    @property
    def row_tokens(self) -> list[int]:
        """Those that have rows: of an image, and Ovis2's marks."""
        config = self.reference.config
        return [config.image_token_id, *getattr(config, "visual_indicator_token_ids", ())]

    def grid(self, image: bytes) -> tuple[int, int, int] | None:
        """Frames, rows and columns of these, where the model's positions tell."""
        pixels = self.processor.image_processor(load_image(Image.open(io.BytesIO(image))), return_tensors="pt")
        if "image_grid_thw" not in pixels or not hasattr(self.processor.image_processor, "temporal_patch_size"):
            return None
        frames, height, width = pixels["image_grid_thw"][0].tolist()
        merged = self.processor.image_processor.merge_size
        return frames, height // merged, width // merged


def make_image_model(folder: Path, text: str = "llama", tower: str = "clip", seed: int = 0) -> ImageModel:
    """Writes a LLaVA of that language model and tower to `folder`, with the demo model's tokenizer. `tower`: tiles:
    LLaVA-NeXT, whose images have rows by their size."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    texts: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
    towers: dict[str, Any] = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig, "tiles": CLIPVisionConfig}
    tiles = {"image_grid_pinpoints": [[2 * SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, 2 * SIDE]]}
    configs: Any = LlavaNextConfig if tower == "tiles" else LlavaConfig
    config = configs(
        vision_config=towers[tower](**_TOWER),
        text_config=texts[text](vocab_size=len(tokenizer), **_TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="full" if tower == "siglip" else "default",
        **(tiles if tower == "tiles" else {}),
    )
    torch.manual_seed(seed)
    models: Any = LlavaNextForConditionalGeneration if tower == "tiles" else LlavaForConditionalGeneration
    reference = models(config).eval()
    reference.save_pretrained(folder)
    sizes: Any = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    images = LlavaNextImageProcessorPil(**sizes, **tiles) if tower == "tiles" else CLIPImageProcessorPil(**sizes)
    processors: Any = LlavaNextProcessor if tower == "tiles" else LlavaProcessor
    processor = processors(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(tower != "siglip"),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return ImageModel(folder, reference, processor)


@torch.inference_mode()
def logits_behind(reference: Any, inputs: Mapping[str, Any], output: list[int]) -> torch.Tensor:
    """[tokens, words] those that each token of `output` is drawn from, behind the prompt of `inputs`."""
    prompt, behind = inputs["input_ids"], torch.tensor([output[:-1]], dtype=torch.long)
    more = {
        name: torch.cat((inputs[name], inputs[name].new_zeros(behind.shape)), 1)
        for name in _OF_TOKENS
        if name in inputs
    }
    whole = {**inputs, **more, "input_ids": torch.cat((prompt, behind), 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    found: torch.Tensor = reference(**whole).logits[0, prompt.shape[1] - 1 :]
    return found


def picture(
    seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG", mode: str = "RGB", **more: Any
) -> bytes:
    """The file of an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(file, kind, **more)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """The file of an image that says it has so many pixels, all black, in a few bytes: a decompression bomb."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 0, 0, 0, 0))
    rows = zlib.compress(bytes(min(height * (width + 1), 2**20)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def data_uri(image: bytes, kind: str = "png") -> str:
    """As a client sends it."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def image_part(image: bytes, kind: str = "png") -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": data_uri(image, kind)}}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": text}


def shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the library's processor takes them."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [{"type": "image"} if part["type"] == "image_url" else part for part in content]
        found.append({**message, "content": content})
    return found
