"""Tiny random GLM-4.1V, GLM-4.5V and GLM-4.6V models, with the library's own of their weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessorPil,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    Glm46VProcessor,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.paths import DEMO_MODEL

PATCH, MERGED = 14, 2
SIDE = PATCH * MERGED
"""Pixels of a row's square."""
MIN_PIXELS, MAX_PIXELS = 2 * SIDE**2, 12 * SIDE**2
"""Of an image: 2 to 12 rows."""
SPECIAL = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")

TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'video' or 'video' in item %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% elif item['type'] == 'image' or 'image' in item %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The models' own, without tools and thoughts."""

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 30.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 2, 1],
    },
}
_MIXTURE: dict[str, Any] = {
    "head_dim": 24,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {**_TEXT["rope_parameters"], "mrope_section": [2, 2, 2]},
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
    "image_size": 4 * PATCH,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


_MODELS: dict[str, tuple[Any, Any]] = {
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration),
    "glm4v-moe": (Glm4vMoeConfig, Glm4vMoeForConditionalGeneration),
    "glm46v": (Glm46VConfig, Glm46VForConditionalGeneration),
}


class _Processor(Glm4vProcessor):
    """Without the processor of videos, which asks for torchvision. Of each model, but for how it writes a frame."""

    def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **more)

    def create_mm_token_type_ids(self, input_ids: Any) -> list[list[int]]:
        """As the library's, which makes arrays of tensors in a way that NumPy warns of."""
        kinds: list[list[int]] = super().create_mm_token_type_ids(torch.as_tensor(input_ids).tolist())
        return kinds


def make_glm_model(folder: Path, kind: str = "glm4v", seed: int = 0, **different: Any) -> ImageModel:
    """Writes a model to `folder`, with the demo model's tokenizer. `kind`: glm4v; glm4v-moe: GLM-4.5V, whose first
    layer has no experts; or glm46v, with either's language model, here that with experts. `different`: of the language
    model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*SPECIAL, "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    image, start, end, video, video_start, video_end = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    configs, models = _MODELS[kind]
    text = {**_TEXT, **({} if kind == "glm4v" else _MIXTURE), "vocab_size": len(tokenizer), **different}
    if kind == "glm46v":
        text["model_type"] = "glm4v_moe_text"
    config = configs(
        text_config=text,
        vision_config=_TOWER,
        image_token_id=image,
        image_start_token_id=start,
        image_end_token_id=end,
        video_token_id=video,
        video_start_token_id=video_start,
        video_end_token_id=video_end,
    )
    torch.manual_seed(seed)
    reference: Any = models(config).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if name.endswith(("_proj.bias", "norm.weight")) and "language_model" in name:
                weight.add_(torch.randn_like(weight) * 0.3)  # so that they are looked at
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes: Any = {"size": {"shortest_edge": 2 * MIN_PIXELS, "longest_edge": 2 * MAX_PIXELS}, "patch_size": PATCH}
    images = Glm4vImageProcessorPil(**sizes)
    images.save_pretrained(folder)
    bounds = {"shortest_edge": 8 * SIDE**2, "longest_edge": 72 * SIDE**2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": bounds}))
    processor = _Processor(images, tokenizer, chat_template=TEMPLATE)
    if kind == "glm46v":
        processor.replace_frame_token_id = MethodType(Glm46VProcessor.replace_frame_token_id, processor)
    return ImageModel(folder, reference, processor)
