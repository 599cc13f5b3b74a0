"""Tiny random Gemma 4 models with their vision tower, and the library's own of the same weights."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedProcessor,
    ProcessorMixin,
)
from transformers.video_utils import VideoMetadata

from tests.support.models.library_models import ARCHITECTURES
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_qwen_audio import Sound
from tests.support.models.torchvision_stub import import_without_torchvision
from tests.support.paths import DEMO_MODEL

Gemma4Kind = Literal["small", "large", "unified"]
"""small: layers read of a token more than its embedding. large: an image's tokens see each other, before experts.
unified: the same without experts and towers."""
PATCH, POOLED, MOST, FRAMES = 4, 2, 70, 2
"""Pixels of a patch, patches of a row on each side, rows of an image or a frame at most, and frames of a video."""
MARKS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
VIDEO = "<|video|>"
_HEARD = "<heard>"
"""Stands for a row of a sound while the library's processor, which is given no sounds here, looks for those."""
TEMPLATE = (
    "{% for message in messages %}<|turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<|image|>"
    "{% elif item['type'] == 'audio' %}<|audio|>{% elif item['type'] == 'video' %}<|video|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
"""The models' own, without tools and thoughts."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": PATCH,
    "pooling_kernel_size": POOLED,
    "position_embedding_size": 512,
    "initializer_range": 0.2,
}


_EAR: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 24,
    "initializer_range": 0.2,
}


_UNIFIED_EYE: dict[str, Any] = {
    "patch_size": PATCH,
    "pooling_kernel_size": POOLED,
    "mm_embed_dim": 32,
    "mm_posemb_size": 512,
    "output_proj_dims": 32,
    "initializer_range": 0.2,
}
_NOT_UNIFIED = ("vocab_size_per_layer_input", "hidden_size_per_layer_input", "enable_moe_block", "num_experts")
_EXPERTS = ("top_k_experts", "moe_intermediate_size")


class _Processor(Gemma4Processor):
    """Without the processors of videos, which asks for torchvision, and of sounds."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for name in MARKS:
            setattr(self, name, getattr(tokenizer, name))
            setattr(self, f"{name}_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)))
        self.video_token, self.video_token_id = VIDEO, tokenizer.convert_tokens_to_ids(VIDEO)


class _UnifiedProcessor(_Processor):
    """Of sounds, a token for each piece."""

    replace_audio_token = Gemma4UnifiedProcessor.replace_audio_token


class _Scaling:
    """What the library's processor of images asks torchvision for."""

    def aspect_ratio_preserving_resize(self, image: Tensor, resample: Any, **bounds: int) -> Tensor:
        """[3, height, width] of bytes."""
        module = import_without_torchvision("transformers.models.gemma4.video_processing_gemma4")
        return _scaled(image[None], module, bounds)[0]


def _unified_images() -> Any:
    sizes = {"patch_size": PATCH, "pooling_kernel_size": POOLED, "max_soft_tokens": MOST}
    module = "gemma4_unified.image_processing_gemma4_unified"
    return pillow_processor(module, "Gemma4UnifiedImageProcessor", _Scaling, **sizes)


def make_gemma4_model(folder: Path, kind: Gemma4Kind = "small", seed: int = 0, *, hears: bool = False) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `hears`: it takes sounds, too."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=MARKS)
    tokenizer.add_special_tokens({"additional_special_tokens": [VIDEO, *([_HEARD] if hears else [])]})
    tokenizer.chat_template = TEMPLATE
    unified, sizes = kind == "unified", {"patch_size": PATCH, "pooling_kernel_size": POOLED, "max_soft_tokens": MOST}
    images = _unified_images() if unified else Gemma4ImageProcessorPil(**cast("Any", sizes))
    processors: Any = _UnifiedProcessor if unified else _Processor
    processor: Any = processors(images, tokenizer, chat_template=TEMPLATE)
    image, begin, end = tokenizer.convert_tokens_to_ids([MARKS[f"{each}_token"] for each in ("image", "boi", "eoi")])
    own = dict(ARCHITECTURES["Gemma4Text" if kind == "small" else "Gemma4Text (experts)"])
    words = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), "pad_token_id": 0}
    if unified:
        own["sliding_window"] = MOST
    for name in (*_NOT_UNIFIED, *_EXPERTS) if unified else ():
        own.pop(name)
        words.pop(name, None)
    configs: Any = Gemma4UnifiedConfig if unified else Gemma4Config
    heard = {"audio_embed_dim": 640} if unified else _EAR
    config = configs(
        text_config={**own, **words, "max_position_embeddings": 512, "initializer_range": 0.2},
        vision_config=_UNIFIED_EYE if unified else _TOWER,
        image_token_id=image,
        boi_token_id=begin,
        eoi_token_id=end,
        video_token_id=processor.video_token_id,
        audio_token_id=processor.audio_token_id,
        audio_config=heard if hears else None,
        boa_token_id=processor.boa_token_id,
        eoa_token_index=processor.eoa_token_id,
    )
    torch.manual_seed(seed)
    models: Any = Gemma4UnifiedForConditionalGeneration if unified else Gemma4ForConditionalGeneration
    reference: Any = models(config).eval()
    with torch.no_grad():
        if unified:
            reference.model.embed_vision.pos_embedding.normal_()
        for parameter in (each for each in reference.parameters() if each.ndim == 1):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if hears:
            reference.model.embed_audio.embedding_projection.weight.mul_(30)  # so that what is heard changes words
    reference.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": FRAMES, "max_soft_tokens": MOST}))
    if hears:
        both = {name: json.loads(each.to_json_string()) for name, each in _parts(images, kind).items()}
        (folder / "processor_config.json").write_text(json.dumps(both))
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)


class GemmaVideos:
    """The library's processor of videos, with Pillow's scaling in place of torchvision's."""

    model_input_names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")

    def __init__(self, videos: list[tuple[Tensor, tuple[float, ...]]], *, unified: bool = False) -> None:
        """`videos`: [frames, height, width, 3] those that are looked at, and when each is shown, in seconds."""
        self._videos, self._kind = videos, "unified" if unified else ""

    def __call__(self, videos: Any, **settings: Any) -> dict[str, Any]:
        """What it makes of them."""
        module = import_without_torchvision("transformers.models.gemma4.video_processing_gemma4")
        own = SimpleNamespace(
            aspect_ratio_preserving_resize=lambda video, resample, **bounds: _scaled(video, module, bounds),
            rescale_and_normalize=lambda video, rescales, factor, *more: video.float() / (1.0 / factor),
        )
        sizes = {"patch_size": PATCH, "pooling_kernel_size": POOLED, "max_soft_tokens": MOST}
        how = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
        unused = {"resample": None, "image_mean": None, "image_std": None}
        given = [frames.permute(0, 3, 1, 2) for frames, _ in self._videos]
        processor = module.Gemma4VideoProcessor
        if self._kind:
            name = "transformers.models.gemma4_unified.video_processing_gemma4_unified"
            processor = import_without_torchvision(name).Gemma4UnifiedVideoProcessor
        made = processor._preprocess(own, given, return_tensors="pt", **sizes, **how, **unused)
        seen = [VideoMetadata(0, fps=1.0, frames_indices=cast("Any", list(times))) for _, times in self._videos]
        return {**made, "video_metadata": seen}


def _scaled(video: Tensor, module: Any, bounds: dict[str, int]) -> Tensor:
    height, width = module.get_aspect_ratio_preserving_size(*video.shape[2:], **bounds)
    frames = (Image.fromarray(each.permute(1, 2, 0).numpy()) for each in video)
    made = [np.asarray(each.resize((width, height), Image.Resampling.BICUBIC)) for each in frames]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


def _parts(images: Any, kind: Gemma4Kind) -> dict[str, Any]:
    """What the library saves in one file."""
    return {"image_processor": images, "feature_extractor": _extractor(kind == "unified")}


def _extractor(unified: bool) -> Any:
    return Gemma4UnifiedAudioFeatureExtractor() if unified else Gemma4AudioFeatureExtractor()


def inputs_of_chat(
    model: ImageModel, messages: list[dict[str, Any]], images: list[bytes], sounds: list[Sound]
) -> dict[str, Any]:
    """What the model is given of a chat with images and sounds. `messages`: with parts as clients give them."""
    kinds = {"image_url": "image", "input_audio": "audio"}
    extractor = _extractor(isinstance(model.processor, _UnifiedProcessor))
    shown = [
        {**each, "content": [{**part, "type": kinds.get(part["type"], part["type"])} for part in each["content"]]}
        for each in messages
    ]
    text = model.processor.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    heard = extractor(sounds, return_tensors="pt") if sounds else {}
    tokenizer, audio = model.processor.tokenizer, MARKS["audio_token"]
    for number in range(len(sounds)):
        written = model.processor.replace_audio_token(heard, number).replace(audio, _HEARD)
        text = text.replace(audio, written, 1)
    loaded = [[Image.open(io.BytesIO(each)).convert("RGB") for each in images]] if images else None
    made: dict[str, Any] = model.processor(text=text, images=loaded, add_special_tokens=False, return_tensors="pt")
    ids, token = made["input_ids"], tokenizer.convert_tokens_to_ids(_HEARD)
    return {**made, **heard, "input_ids": ids.where(ids != token, tokenizer.convert_tokens_to_ids(audio))}
