"""Tiny random models that are nearly LLaVA or LLaVA-NeXT (VipLLaVA, LLaVA-NeXT-Video, GOT-OCR 2, Idefics2), and the
library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    GotOcr2Processor,
    Granite4VisionProcessor,
    GraniteDoclingImageProcessorPil,
    GraniteDoclingProcessor,
    Idefics2ImageProcessorPil,
    Idefics2Processor,
    LlavaNextImageProcessorPil,
    LlavaNextVideoProcessor,
    LlavaProcessor,
    ProcessorMixin,
)

from tests.support.models.tiny_images import TEMPLATE as LLAVA
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_lfm_vl import TEMPLATE as LFM
from tests.support.models.tiny_towers import PATCH, SIDE, TEXT, tower
from tests.support.paths import DEMO_MODEL

_VIDEOS = "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
NEXT_VIDEO = LLAVA.replace(_VIDEOS, _VIDEOS.replace("'text'", "'video'") + "{{ '<video>\\n' }}{% endfor %}" + _VIDEOS)
LlavaLikeKind = Literal["vip-llava", "llava-next-video", "got-ocr2", "idefics2", "granite4-vision", "granite-docling"]
IDEFICS2 = (
    "{% for message in messages %}{{ message['role'] | capitalize + ':' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<image>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
GOT = LFM.replace("<image>", "<img><imgpad></img>\n")
"""What the models' own come to; GOT-OCR 2's is what its processor writes."""
_GOT_SIDE, _GOT_PATCH, _GOT_ROWS = 64, 4, 16
_GRANITE = {
    **TEXT,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_TILES = [[2 * SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, 2 * SIDE]]


class _NextVideo(LlavaNextVideoProcessor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, **named: Any) -> None:
        self.patch_size, self.num_additional_image_tokens = PATCH, 1
        self.vision_feature_select_strategy, self.video_processor = "default", None
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
        ProcessorMixin.__init__(self, image_processor, tokenizer, **named)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """What the library is to look for."""
        return ["image_processor", "tokenizer"]


class _Got(GotOcr2Processor):
    """Takes chats without images, too."""

    def __call__(self, images: Any = None, text: Any = None, **more: Any) -> Any:
        """See the library's."""
        return super().__call__(images, text, **more) if images else self.tokenizer([text], **more)


def make_llava_like_model(folder: Path, kind: LlavaLikeKind, seed: int = 0, *, splits: bool = True) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `splits`: Idefics2 sees quarters, too."""
    torch.manual_seed(seed)
    makers = {
        "vip-llava": _vip,
        "llava-next-video": _next_video,
        "got-ocr2": _got,
        "idefics2": _idefics2,
        "granite4-vision": _granite,
        "granite-docling": _docling,
    }
    reference, processor = makers[kind]()
    if kind == "idefics2":
        processor.image_processor.do_image_splitting = splits
    reference.eval().save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    if kind == "llava-next-video":
        (folder / "video_preprocessor_config.json").write_text('{"num_frames": 5}')
    return ImageModel(folder, reference, processor)


def _tokenizer(template: str, *special: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def _clip(tokenizer: Any) -> dict[str, Any]:
    """Of configurations with a tower of CLIP's before a Llama."""
    return {
        "vision_config": {**tower(num_hidden_layers=3), "model_type": "clip_vision_model"},
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }


def _vip() -> tuple[Any, Any]:
    tokenizer = _tokenizer(LLAVA, "<image>")
    config = transformers.VipLlavaConfig(**_clip(tokenizer), vision_feature_layer=[-2, -3, 1])
    sizes: Any = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    return transformers.VipLlavaForConditionalGeneration(config), processor


def _next_video() -> tuple[Any, Any]:
    tokenizer = _tokenizer(NEXT_VIDEO, "<image>", "<video>")
    config = transformers.LlavaNextVideoConfig(
        **_clip(tokenizer), video_token_index=tokenizer.convert_tokens_to_ids("<video>"), image_grid_pinpoints=_TILES
    )
    sizes: Any = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=_TILES)
    processor = _NextVideo(images, tokenizer, chat_template=NEXT_VIDEO)
    return transformers.LlavaNextVideoForConditionalGeneration(config), processor


def _granite() -> tuple[Any, Any]:
    tokenizer = _tokenizer(LLAVA, "<image>")
    config = transformers.Granite4VisionConfig(
        vision_config={**tower(hidden_size=64), "model_type": "clip_vision_model"},
        text_config={**_GRANITE, "num_hidden_layers": 6, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_TILES,
        downsample_rate="1/2",
        deepstack_layer_map=[[-2, 2], [-1, 0]],
        spatial_target_layers=[1, 3, 4, 5],
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32},
    )
    sizes: Any = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = Granite4VisionProcessor(
        image_processor=LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=_TILES),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        downsample_rate="1/2",
        chat_template=LLAVA,
    )
    return transformers.Granite4VisionForConditionalGeneration(config), processor


def _docling() -> tuple[Any, Any]:
    tokenizer = _tokenizer(LFM, "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>")
    config = transformers.GraniteDoclingConfig(
        vision_config={**tower(), "scale_factor": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        text_config={**_GRANITE, "vocab_size": len(tokenizer), "pad_token_id": 0},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = GraniteDoclingImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_patches=6)
    processor = GraniteDoclingProcessor(images, tokenizer, image_seq_len=4, chat_template=LFM)
    return transformers.GraniteDoclingForConditionalGeneration(config), processor


def _got() -> tuple[Any, Any]:
    tokenizer = _tokenizer(GOT, "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>")
    config = transformers.GotOcr2Config(
        vision_config={
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _GOT_SIDE,
            "patch_size": _GOT_PATCH,
            "global_attn_indexes": [1],
            "window_size": 6,
            "mlp_dim": 32,
            "initializer_range": 0.2,
        },
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
    )
    processor = _Got(
        GotOcr2ImageProcessorPil(size={"height": _GOT_SIDE, "width": _GOT_SIDE}), tokenizer, chat_template=GOT
    )
    processor.num_image_tokens = _GOT_ROWS
    return transformers.GotOcr2ForConditionalGeneration(config), processor


def _idefics2() -> tuple[Any, Any]:
    marks = ("<end_of_utterance>", "<fake_token_around_image>", "<image>")
    tokenizer = _tokenizer(IDEFICS2, *marks)
    config = transformers.Idefics2Config(
        vision_config=tower(4 * SIDE, PATCH),
        perceiver_config={
            "hidden_size": 64,
            "rms_norm_eps": 1e-5,
            "resampler_n_latents": 3,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
            "initializer_range": 0.2,
        },
        text_config={**TEXT, "model_type": "mistral", "vocab_size": len(tokenizer), "sliding_window": None},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    sizes: Any = {"size": {"shortest_edge": SIDE, "longest_edge": 3 * SIDE}}
    images = Idefics2ImageProcessorPil(**sizes)
    processor = Idefics2Processor(images, tokenizer, image_seq_len=3, chat_template=IDEFICS2)
    reference = transformers.Idefics2ForConditionalGeneration(config)
    torch.nn.init.normal_(reference.model.connector.perceiver_resampler.latents)
    return reference, processor
