"""Tiny random Phi-4 Multimodal models, and the library's own of the same weights and its processors."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalProcessor,
)
from transformers.image_utils import load_image

from tests.support.models.library_models import ARCHITECTURES
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_qwen_audio import Sound
from tests.support.paths import DEMO_MODEL

SIDE, PATCH, MOST = 64, 2, 2
"""Of a crop, which has 32 patches in a line, as the models' own; and most crops."""
TOKENS = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|image|>{% elif content['type'] == 'audio' %}<|audio|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The models' own, without tools."""
_PARTS = {"image_url": "image", "input_audio": "audio"}
_MODULE = "phi4_multimodal.image_processing_phi4_multimodal"


class PhiModel(ImageModel):
    """Whose library's class names neither its image's token nor its rows."""

    @torch.inference_mode()
    def rows(self, image: bytes, several: bool = False) -> Tensor:
        """[tokens, hidden] what stands for an image."""
        made = self.processor.image_processor(load_image(Image.open(io.BytesIO(image))), return_tensors="pt")
        return self._spliced("image", int(made.pop("num_img_tokens")[0]), **made)

    @torch.inference_mode()
    def rows_of_sound(self, sound: Sound, *, beside_images: bool = False) -> Tensor:
        """[tokens, hidden] what stands for a sound."""
        made = self.processor.audio_processor(sound, sampling_rate=16_000, return_tensors="pt")
        more = {"audio_projection_mode": "vision"} if beside_images else {}
        return self._spliced("audio", int(made["audio_embed_sizes"][0]), **made, **more)

    def inputs_of_chat(self, messages: list[dict[str, Any]], images: list[bytes], sounds: list[Sound]) -> Any:
        """What the library's processor makes of a chat. `messages`: with parts as clients give them."""
        said = [
            {**each, "content": [{**part, "type": _PARTS.get(part["type"], part["type"])} for part in each["content"]]}
            for each in messages
        ]
        text = self.processor.apply_chat_template(said, add_generation_prompt=True)
        loaded = [load_image(Image.open(io.BytesIO(each))) for each in images]
        given: dict[str, Any] = {"images": loaded or None, "audio": sounds or None}
        return self.processor(text=text, add_special_tokens=False, return_tensors="pt", **given)

    def _spliced(self, kind: str, count: int, **made: Any) -> Tensor:
        ids = torch.full((1, count), getattr(self.processor, f"{kind}_token_id"))
        embed = getattr(self.reference.model.embed_tokens_extend, f"{kind}_embed")
        found: Tensor = embed(ids, torch.zeros(1, count, self.reference.config.hidden_size), **made)[0]
        return found

    @property
    def row_tokens(self) -> list[int]:
        """That of an image."""
        return [self.processor.image_token_id]


class _Scaling:
    """What the library's processor does by torchvision once pixels are numbers."""

    def resize(self, image: Tensor, size: Any, resample: Any = None, antialias: bool = True) -> Tensor:
        """[3, height, width], as torchvision does it of numbers."""
        assert resample == Image.Resampling.BICUBIC
        assert not antialias
        size = (size.height, size.width)
        return torch.nn.functional.interpolate(image[None], size, mode="bicubic", align_corners=False)[0]


def _scaled(image: Tensor, size: list[int]) -> Tensor:
    """[3, height, width] of bytes, by Pillow in torchvision's place."""
    pixels = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _padded(image: Tensor, sides: list[int], fill: list[int]) -> Tensor:
    assert fill == 3 * [255]
    assert sides[:2] == [0, 0]
    return torch.nn.functional.pad(image, (0, sides[2], 0, sides[3]), value=255)


def phi_images(**settings: Any) -> Any:
    """The library's own processor of images."""
    made: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH, "dynamic_hd": MOST}
    processor = pillow_processor(_MODULE, "Phi4MultimodalImageProcessor", _Scaling, **made | settings)
    processor._preprocess.__func__.__globals__["tvF"] = SimpleNamespace(resize=_scaled, pad=_padded)
    return processor


def make_phi_model(folder: Path, seed: int = 0, **different: Any) -> PhiModel:
    """Writes a model to `folder`, with the demo model's tokenizer. `different`: of the language model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    own = ARCHITECTURES["Phi4Multimodal"]
    tower = {"image_size": SIDE, "crop_size": SIDE, "patch_size": PATCH, "image_token_id": tokenizer.image_token_id}
    tower |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    ear = {"audio_token_id": tokenizer.audio_token_id, "num_blocks": 2, "initializer_range": 0.2}
    ear |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "pad_token_id": 0}
    towers = {"vision_config": {**own["vision_config"], **tower}, "audio_config": {**own["audio_config"], **ear}}
    config = Phi4MultimodalConfig(**{**own, **text, **towers, **different})
    torch.manual_seed(seed)
    # The library's kernels take its tower for a causal one where no patch is white; its plain attention does not.
    reference: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    embeds = reference.model.embed_tokens_extend
    for each in (embeds.image_embed.global_img_feature_extensor, embeds.image_embed.sub_img_feature_extensor):
        torch.nn.init.normal_(each)
    for name, each in embeds.named_modules():
        if "down" in name and isinstance(each, torch.nn.Linear) and "proj" in name and "encoder" not in name:
            torch.nn.init.normal_(each.weight, 0, 0.02)  # rows as long as those of tokens, which texts depend on, too
    reference.save_pretrained(folder)
    processors: Any = Phi4MultimodalProcessor
    processor = processors(phi_images(), Phi4MultimodalFeatureExtractor(), tokenizer)
    processor.chat_template = TEMPLATE
    processor.save_pretrained(folder)
    return PhiModel(folder, reference, processor)
