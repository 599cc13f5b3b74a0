"""Tiny random Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 models, some with experts, with the library's own of their
weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.paths import DEMO_MODEL

PATCH, MERGED = 14, 2
SIDE = PATCH * MERGED
"""Pixels of a row's square."""
MIN_PIXELS, MAX_PIXELS = 2 * SIDE**2, 12 * SIDE**2
"""Of an image: 2 to 12 rows."""
VIDEO_SIZES = {
    "qwen2": {"shortest_edge": 2 * SIDE**2, "longest_edge": 12 * SIDE**2},
    "qwen3": {"shortest_edge": 8 * SIDE**2, "longest_edge": 72 * SIDE**2},
}
"""Of a frame, and of all that are looked at: up to 12 rows for two of six."""
PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIAL = (PAD, START, END, "<|video_pad|>")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The models' own: a message's parts in their order."""

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
}
_SHARED: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.2}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2": {**_SHARED, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2.5": {
        **_SHARED,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "qwen3": {
        **_SHARED,
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
_MODELS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2.5": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3-moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
TOWERS["qwen3-moe"] = TOWERS["qwen3"]
_PLAIN = {key: value for key, value in TOWERS["qwen3"].items() if key != "deepstack_visual_indexes"}
TOWERS |= {"qwen3.5": _PLAIN, "qwen3.5-moe": _PLAIN}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 30.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
}
"""Of a layer with states and two that attend, half of whose heads' elements are rotated."""
_MIXTURE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}


class QwenProcessor:
    """What the library's `Qwen2VLProcessor` makes of a chat, which asks for torchvision even where no video is."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def apply_chat_template(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """The chat as text, with one token for each image."""
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **more)
        return text

    def __call__(self, text: str, images: Any, **more: Any) -> dict[str, Any]:
        """Token ids, an image's as often as it has rows; which tokens are images'; patches and how they lie."""
        prepared = dict(self.image_processor(images, return_tensors="pt")) if images else {}
        first, *behind = text.split(PAD)
        for grid, part in zip(prepared.get("image_grid_thw", ()), behind, strict=True):
            first += PAD * (int(grid.prod()) // MERGED**2) + part
        ids = self.tokenizer(first, **more)["input_ids"]
        kinds = (ids == self.tokenizer.convert_tokens_to_ids(PAD)).int()
        return {"input_ids": ids, "mm_token_type_ids": kinds, **prepared}


def make_qwen_model(folder: Path, kind: str = "qwen2.5", seed: int = 0, **different: Any) -> ImageModel:
    """Writes a model of that kind to `folder`, with the demo model's tokenizer. `different`: of the language model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    pad, start, end, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    config_of, model_of = _MODELS[kind]
    if kind.startswith("qwen3.5"):
        different = _DELTA | different
    elif kind.startswith("qwen3"):
        different = {"num_hidden_layers": 3, "head_dim": 16} | different
    if kind == "qwen3-moe":
        different = {**_MIXTURE, "mlp_only_layers": [1]} | different
    if kind == "qwen3.5-moe":
        different = {**_MIXTURE, "shared_expert_intermediate_size": 40} | different
    config = config_of(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None} | different,
        vision_config=TOWERS[kind],
        image_token_id=pad,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(seed)
    reference = model_of(config).eval()
    reference.save_pretrained(folder)
    if kind == "qwen3-moe":
        _publish_experts(folder / "model.safetensors", layer=0)
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGED, size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    )
    images.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"fps": 2, "size": VIDEO_SIZES[kind[:5]]}))
    return ImageModel(folder, reference, QwenProcessor(images, tokenizer))


def _publish_experts(file: Path, layer: int) -> None:
    """Writes one layer's experts as published files have them, inputs before outputs; the others stay as the library
    writes them."""
    tensors = load_file(file)
    for name in (f"model.language_model.layers.{layer}.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")):
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
