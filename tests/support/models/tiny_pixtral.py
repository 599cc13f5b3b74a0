"""Tiny random models with Pixtral's tower (Mistral 3, LLaVA), and the library's own of the same weights."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    MistralConfig,
    PixtralImageProcessorPil,
    PixtralVisionConfig,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_towers import TEXT, tower
from tests.support.paths import DEMO_MODEL

PixtralKind = Literal["mistral3", "ministral3", "mistral4", "llava"]
PATCH, MAX_SIDE = 14, 280
IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""Mistral Small 3.1's, without its system prompt and its tools."""

_TEXT = {**TEXT, "head_dim": 24, "sliding_window": None}
_TOWER = tower(MAX_SIDE, PATCH, head_dim=16)
_MISTRAL4: dict[str, Any] = {
    **{key: TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 30.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
_LANGUAGE_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral4": (Mistral4Config, _MISTRAL4),
    "ministral3": (Ministral3Config, {**_TEXT, "rope_parameters": _MISTRAL4["rope_parameters"]}),
}


def library_processor() -> Any:
    """The library's class, whose module asks for torchvision, for a function that Pillow's module has as well."""
    package = "transformers.models.pixtral"
    name = f"{package}.image_processing_pixtral"
    sys.modules.setdefault(name, importlib.import_module(f"{package}.image_processing_pil_pixtral"))
    return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor


def make_pixtral_model(folder: Path, kind: PixtralKind = "mistral3", seed: int = 0) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. Mistral 3 makes a row of four patches."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, BREAK, END, "[INST]", "[/INST]"]})
    tokenizer.chat_template = TEMPLATE
    merged = 1 if kind == "llava" else 2
    texts, sizes = _LANGUAGE_MODELS.get(kind, (MistralConfig, _TEXT))
    parts: dict[str, Any] = {
        "vision_config": PixtralVisionConfig(**_TOWER),
        "text_config": texts(vocab_size=len(tokenizer), **copy.deepcopy(sizes)),
        "image_token_index": tokenizer.convert_tokens_to_ids(IMAGE),
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    reference: Any
    if kind != "llava":
        reference = Mistral3ForConditionalGeneration(Mistral3Config(spatial_merge_size=merged, **parts))
    else:
        reference = LlavaForConditionalGeneration(LlavaConfig(vision_feature_select_strategy="full", **parts))
    reference.eval().save_pretrained(folder)
    images = PixtralImageProcessorPil(size={"longest_edge": MAX_SIDE}, patch_size={"height": PATCH, "width": PATCH})
    processor = library_processor()(
        images, tokenizer, patch_size=PATCH, spatial_merge_size=merged, chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    squares = {"height": merged * PATCH, "width": merged * PATCH}
    return ImageModel(folder, reference, processor, {"patch_size": squares})
