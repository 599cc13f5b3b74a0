"""Which models take images beside text, by their configuration; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct, field

GEMMA = "Gemma3ForConditionalGeneration"
QWEN2_AUDIO = "Qwen2AudioForConditionalGeneration"
LLAVA, LLAVA_NEXT = "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"
LLAVA_ONEVISION = "LlavaOnevisionForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"
GLM4V, GLM4V_MOE = "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"
GLM46V = "Glm46VForConditionalGeneration"
LLAMA4 = "Llama4ForConditionalGeneration"
GEMMA4 = "Gemma4ForConditionalGeneration"
AYA_VISION = "AyaVisionForConditionalGeneration"
COHERE2_VISION = "Cohere2VisionForConditionalGeneration"
TILED = (
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "InternVLForConditionalGeneration",
)
"""Those that cut an image into tiles, each of which the tower sees alone."""
KIMI_K2_5 = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
"""As published files have it, and as `transformers` writes it."""
DEEPSEEK_VL = "DeepseekVLForConditionalGeneration"
LFM2_VL = "Lfm2VlForConditionalGeneration"
OVIS2 = "Ovis2ForConditionalGeneration"
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
IMAGE_ARCHITECTURES = (
    GEMMA,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MISTRAL3,
    *TILED,
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    *QWEN3_5,
    GLM4V,
    GLM4V_MOE,
    GLM46V,
    *KIMI_K2_5,
    DEEPSEEK_VL,
    OVIS2,
    LFM2_VL,
    QWEN2_AUDIO,
)
"""Those that are served with their tower, of sight or, of the last one, of hearing, before a language model that
Baton's own code computes."""
LIBRARY_IMAGE_ARCHITECTURES = (LLAMA4, GEMMA4, AYA_VISION, COHERE2_VISION)
"""The same of those whose language model `transformers` computes."""

_TOKENS = {
    LLAVA_ONEVISION: 151_646,
    GLM4V: 151_343,
    GLM46V: 151_343,
    GLM4V_MOE: 151_363,
    **dict.fromkeys(QWEN3_5, 248_056),
    **dict.fromkeys(KIMI_K2_5, 163_605),
    DEEPSEEK_VL: 100_015,
    OVIS2: 151_665,
    LFM2_VL: 396,
}
"""Of an image, as `transformers` has it where a configuration does not say."""


class ImageModel(Struct, frozen=True):
    """What a model's configuration says of its images."""

    token_id: int
    """The token that stands for a row, and that a chat template writes where an image stands."""
    shown: str | None = None
    """What a chat template writes there; None: that token."""
    frame: tuple[int, int] | None = None
    """Where templates write another token in its place: that one, which stands before an image, and the one that stands
    behind it, each with an empty line on its outer side."""
    mutual: bool = False
    """Whether an image's tokens see each other."""
    by_library: bool = False
    """Whether its language model is computed by `transformers`."""
    hears: bool = False
    """Whether it takes sounds in place of images (`shared/models/sound_models.py`)."""


class _RawLanguageModel(Struct):
    use_bidirectional_attention: str | bool | None = None


class _RawImageModel(Struct):
    architectures: tuple[str, ...] = ()
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    image_token_id: int | None = None
    image_token_index: int | None = None
    media_placeholder_token_id: int | None = None
    audio_token_index: int = 151_646
    text_config: _RawLanguageModel = field(default_factory=_RawLanguageModel)


class _RawArchitectureNames(Struct):
    architectures: tuple[str, ...] = ()


def nests_language_model(folder: Path) -> bool:
    """Whether the tensors of the model in `folder` are named as those of a language model within another one."""
    try:
        raw = msgspec.json.decode((folder / "config.json").read_bytes(), type=_RawArchitectureNames)
    except (OSError, msgspec.MsgspecError):
        return False
    return any(each in (*IMAGE_ARCHITECTURES, *LIBRARY_IMAGE_ARCHITECTURES) for each in raw.architectures)


def read_image_model(folder: Path) -> ImageModel | None:
    """What `config.json` in `folder` says; None where there is no such file, or the model takes no images. What else
    may be wrong with the file is for those to say who read all of it."""
    try:
        raw = msgspec.json.decode((folder / "config.json").read_bytes(), type=_RawImageModel)
    except (OSError, msgspec.MsgspecError):
        return None
    if not any(each in (*IMAGE_ARCHITECTURES, *LIBRARY_IMAGE_ARCHITECTURES) for each in raw.architectures):
        return None
    said = (raw.image_token_index, raw.image_token_id, raw.media_placeholder_token_id)
    token = next((each for each in said if each is not None), None)
    if GEMMA in raw.architectures:
        return ImageModel(
            262_144 if token is None else token, frame=(raw.boi_token_index, raw.eoi_token_index), mutual=True
        )
    if LLAMA4 in raw.architectures:
        return ImageModel(200_092 if token is None else token, shown="<|image|>", by_library=True)
    if GEMMA4 in raw.architectures:
        mutual = raw.text_config.use_bidirectional_attention == "vision"
        return ImageModel(258_880 if token is None else token, mutual=mutual, by_library=True)
    if AYA_VISION in raw.architectures:
        return ImageModel(255_036 if token is None else token, shown="<image>", by_library=True)
    if COHERE2_VISION in raw.architectures:
        return ImageModel(255_036 if token is None else token, by_library=True)
    if QWEN2_AUDIO in raw.architectures:
        return ImageModel(raw.audio_token_index, hears=True)
    if token is None:
        token = next((default for each, default in _TOKENS.items() if each in raw.architectures), None)
    return None if token is None else ImageModel(token, shown="<image>" if OVIS2 in raw.architectures else None)
