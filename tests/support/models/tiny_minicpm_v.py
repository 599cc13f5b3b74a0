"""Tiny random MiniCPM-V 4.6 models with their tower, and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessorPil,
    MiniCPMV4_6Processor,
    ProcessorMixin,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_lfm_vl import TEMPLATE as LFM
from tests.support.models.tiny_models import DELTA
from tests.support.models.tiny_towers import TEXT, tower
from tests.support.paths import DEMO_MODEL

PATCH, SIDE = 7, 56
"""Pixels of a patch, of which a row takes four by four, and of a tile."""
TEMPLATE = LFM.replace("<image>", "<|image_pad|>")
"""What the model's own comes to."""
_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


class _Processor(MiniCPMV4_6Processor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        checked, ProcessorMixin.__init__ = ProcessorMixin.__init__, _unchecked  # type: ignore[method-assign]
        try:
            none = SimpleNamespace(slice_mode=False, downsample_mode="16x")
            super().__init__(image_processor, none, tokenizer, chat_template=chat_template)
        finally:
            ProcessorMixin.__init__ = checked  # type: ignore[method-assign]


def _unchecked(self: Any, image_processor: Any, video_processor: Any, tokenizer: Any, **more: Any) -> None:
    self.image_processor, self.video_processor, self.tokenizer = image_processor, video_processor, tokenizer
    self.chat_template = more["chat_template"]


def make_minicpm_model(folder: Path, seed: int = 0, **different: Any) -> ImageModel:
    """Writes the model to `folder`, with the demo model's tokenizer. `different`: of what prepares images."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    sizes = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "head_dim": 16, "vocab_size": len(tokenizer)}
    config = MiniCPMV4_6Config(
        text_config={**TEXT, **DELTA, **sizes, "pad_token_id": 0},
        vision_config=tower(SIDE, PATCH, num_hidden_layers=3),
        insert_layer_id=1,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = MiniCPMV4_6ForConditionalGeneration(config).eval()
    with torch.no_grad():
        merger = reference.model.vision_tower.vit_merger
        for weight in (merger.linear_1.weight, merger.linear_2.weight, merger.self_attn.q_proj.weight):
            weight.normal_(0, 0.2)  # the library's own are so large that nothing else would be seen
    reference.save_pretrained(folder)
    images: Any = MiniCPMV4_6ImageProcessorPil(
        **{"scale_resolution": SIDE, "patch_size": PATCH, "max_slice_nums": 6, **different}
    )
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, _Processor(images, tokenizer, chat_template=TEMPLATE))
