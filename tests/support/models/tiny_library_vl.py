"""Tiny random models with images whose language model `transformers` computes (Aria, EXAONE 4.5, HyperCLOVA X Vision
2), and the library's own of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessorPil,
    AriaProcessor,
    AutoTokenizer,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    HyperCLOVAXVisionV2Config,
    HyperCLOVAXVisionV2ForConditionalGeneration,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
)

from tests.support.models.library_models import LANGUAGE_MODELS
from tests.support.models.tiny_glm_vl import MAX_PIXELS, MIN_PIXELS
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_lfm_vl import TEMPLATE as LFM
from tests.support.models.tiny_towers import TEXT, tower
from tests.support.paths import DEMO_MODEL

TEMPLATE = LFM.replace("<image>", "<fim_prefix><|img|><fim_suffix>")
"""Of Aria's: what the model's own comes to."""
EXAONE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>")
EXAONE_TEMPLATE = LFM.replace("<image>", "<vision><|image_pad|></vision>").replace(
    "<video>", "<vision><|video_pad|></vision>"
)
SIDE, PATCH, ROWS = 980, 140, 12
"""Pixels of Aria's image, which may not be fewer but 490, and of a patch; and rows of an image."""
_EXAONE_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "patch_size": 14,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.2,
}


class _Processor(Exaone4_5_Processor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.video_token = EXAONE_TOKENS[:2]
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(list(EXAONE_TOKENS[:2]))
        self.video_processor = None
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """What the library is to look for."""
        return ["image_processor", "tokenizer"]


def _exaone_tokenizer() -> tuple[Any, int, int]:
    """The demo model's, with EXAONE's tokens; those of an image's and of a video's rows."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*EXAONE_TOKENS, "<|im_start|>", "<|im_end|>"]})
    image, video = tokenizer.convert_tokens_to_ids(list(EXAONE_TOKENS[:2]))
    return tokenizer, image, video


def _written_with_patches(folder: Path, reference: Any, tokenizer: Any) -> ImageModel:
    sizes: Any = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, "patch_size": 14}
    images = Qwen2VLImageProcessorPil(**sizes)
    return _written(folder, reference, images, _Processor(images, tokenizer, EXAONE_TEMPLATE))


def make_exaone_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes an EXAONE 4.5 to `folder`, with the demo model's tokenizer."""
    tokenizer, image, video = _exaone_tokenizer()
    config = Exaone4_5_Config(
        text_config={**LANGUAGE_MODELS["Exaone4_5_"], "vocab_size": len(tokenizer), "max_position_embeddings": 512},
        vision_config=_EXAONE_TOWER,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(seed)
    reference: Any = Exaone4_5_ForConditionalGeneration(config)
    return _written_with_patches(folder, reference, tokenizer)


def make_hyperclovax_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes a HyperCLOVA X Vision 2 to `folder`, with the demo model's tokenizer. Its library's processor is EXAONE
    4.5's but for what it writes of videos."""
    tokenizer, image, video = _exaone_tokenizer()
    multipliers = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.5}
    config = HyperCLOVAXVisionV2Config(
        text_config={**TEXT, **multipliers, "model_type": "hyperclovax", "vocab_size": len(tokenizer)},
        vision_config={**_EXAONE_TOWER, "model_type": "qwen2_5_vl_vision", "out_hidden_size": 48},
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    reference: Any = HyperCLOVAXVisionV2ForConditionalGeneration(config)
    return _written_with_patches(folder, reference, tokenizer)


def make_aria_model(folder: Path, seed: int = 0) -> ImageModel:
    """Writes an Aria to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens={"image_token": "<|img|>"})
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<fim_prefix>", "<fim_suffix>"]}
    )
    patches = (SIDE // PATCH) ** 2
    config = AriaConfig(
        text_config={**LANGUAGE_MODELS["Aria"], "vocab_size": len(tokenizer), "max_position_embeddings": 512},
        vision_config={**tower(SIDE, PATCH), "model_type": "idefics3_vision"},
        projector_patch_to_query_dict={patches: ROWS},
        image_token_index=tokenizer.image_token_id,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    reference: Any = AriaForConditionalGeneration(config)
    torch.nn.init.normal_(reference.model.multi_modal_projector.query)
    images = AriaImageProcessorPil()
    processor = AriaProcessor(images, tokenizer, chat_template=TEMPLATE, size_conversion={SIDE: ROWS})
    return _written(folder, reference, images, processor)


def _written(folder: Path, reference: Any, images: Any, processor: Any) -> ImageModel:
    processor.tokenizer.chat_template = processor.chat_template
    reference.eval().save_pretrained(folder)
    images.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return ImageModel(folder, reference, processor)
