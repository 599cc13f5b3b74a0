"""Which models take images beside text, by their configuration; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field, structs

from shared.messages.generation import MAX_MEDIA_BYTES
from shared.messages.model_card import CrossImageModel
from shared.models.processor_files import known_processor

GEMMA = "Gemma3ForConditionalGeneration"
QWEN2_AUDIO, VOXTRAL = "Qwen2AudioForConditionalGeneration", "VoxtralForConditionalGeneration"
QWEN3_ASR, GLM_ASR = "Qwen3ASRForConditionalGeneration", "GlmAsrForConditionalGeneration"
AUDIO_FLAMINGO3 = "AudioFlamingo3ForConditionalGeneration"
GRANITE_SPEECH = "GraniteSpeechForConditionalGeneration"
SOUND_TOKENS = {
    QWEN2_AUDIO: 151_646,
    VOXTRAL: 24,
    QWEN3_ASR: 151_676,
    GLM_ASR: 59_260,
    AUDIO_FLAMINGO3: 151_669,
    GRANITE_SPEECH: 49_155,
}
"""Those that hear and see nothing, and the token of a sound, where a configuration does not say."""
LLAVA, LLAVA_NEXT = "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"
LLAVA_ONEVISION = "LlavaOnevisionForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"
GLM4V, GLM4V_MOE = "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"
GLM46V = "Glm46VForConditionalGeneration"
GLM_OCR, PADDLE_OCR = "GlmOcrForConditionalGeneration", "PaddleOCRVLForConditionalGeneration"
LIGHTON_OCR, QIANFAN_OCR = "LightOnOcrForConditionalGeneration", "QianfanOCRForConditionalGeneration"
DEEPSEEK_OCR2, VIDEO_LLAMA3 = "DeepseekOcr2ForConditionalGeneration", "VideoLlama3ForConditionalGeneration"
MINICPM_V = "MiniCPMV4_6ForConditionalGeneration"
LLAMA4 = "Llama4ForConditionalGeneration"
GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
"""With a tower, and without one (12B)."""
GEMMA3N = "Gemma3nForConditionalGeneration"
AYA_VISION = "AyaVisionForConditionalGeneration"
COHERE2_VISION = "Cohere2VisionForConditionalGeneration"
PHI4_MULTIMODAL = "Phi4MultimodalForCausalLM"
INTERNVL = "InternVLForConditionalGeneration"
SMOL_VLM = "SmolVLMForConditionalGeneration"
TILED = ("Idefics3ForConditionalGeneration", SMOL_VLM, INTERNVL)
"""Those that cut an image into tiles, each of which the tower sees alone."""
KIMI_K2_5 = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
"""As published files have it, and as `transformers` writes it."""
DEEPSEEK_VL = ("DeepseekVLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration")
"""Of one tower, and of two."""
LFM2_VL = "Lfm2VlForConditionalGeneration"
OVIS2 = "Ovis2ForConditionalGeneration"
QWEN2_5_OMNI = (
    "Qwen2_5OmniModel",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
)
"""As published files have it, as `transformers` writes it, and that part of it which writes text alone."""
QWEN3_OMNI = ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration")
QWEN_OMNI = (*QWEN2_5_OMNI, *QWEN3_OMNI)
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
MINIMAX_M3_VL, LFM3_VL = "MiniMaxM3SparseForConditionalGeneration", "Lfm3VlForConditionalGeneration"
MISTRAL_LARGE_4 = "MistralLarge4ForConditionalGeneration"
GLM_5_NEXT, QWEN4_VL = "Glm5NextForConditionalGeneration", "Qwen4ExpForConditionalGeneration"
VIP_LLAVA, GOT_OCR2 = "VipLlavaForConditionalGeneration", "GotOcr2ForConditionalGeneration"
LLAVA_NEXT_VIDEO, IDEFICS2 = "LlavaNextVideoForConditionalGeneration", "Idefics2ForConditionalGeneration"
GRANITE4_VISION = "Granite4VisionForConditionalGeneration"
GRANITE_DOCLING = "GraniteDoclingForConditionalGeneration"
HYPERCLOVAX_V2 = "HyperCLOVAXVisionV2ForConditionalGeneration"
ARIA, EXAONE_4_5 = "AriaForConditionalGeneration", "Exaone4_5_ForConditionalGeneration"
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
    *DEEPSEEK_VL,
    OVIS2,
    LFM2_VL,
    LFM3_VL,
    GLM_OCR,
    PADDLE_OCR,
    LIGHTON_OCR,
    QIANFAN_OCR,
    DEEPSEEK_OCR2,
    VIDEO_LLAMA3,
    MINICPM_V,
    MISTRAL_LARGE_4,
    MINIMAX_M3_VL,
    GLM_5_NEXT,
    QWEN4_VL,
    VIP_LLAVA,
    LLAVA_NEXT_VIDEO,
    GOT_OCR2,
    IDEFICS2,
    GRANITE4_VISION,
    GRANITE_DOCLING,
    *QWEN_OMNI,
    *SOUND_TOKENS,
)
"""Those that are served with their tower, of sight or, of the last ones, of hearing, before a language model that
Baton's own code computes."""
MLLAMA = "MllamaForConditionalGeneration"
NESTING_ARCHITECTURES = (*IMAGE_ARCHITECTURES, MLLAMA)
"""Those whose configuration has that of a language model in it which Baton's own code computes; of the last one where
it is served for texts alone."""
LIBRARY_IMAGE_ARCHITECTURES = (
    *(LLAMA4, *GEMMA4, AYA_VISION, COHERE2_VISION, ARIA, EXAONE_4_5, HYPERCLOVAX_V2, PHI4_MULTIMODAL, MLLAMA),
)
"""The same of those whose language model `transformers` computes; of the last one where it is served with images."""

DEFAULT_IMAGE_TOKENS = {
    LLAVA_ONEVISION: 151_646,
    GLM4V: 151_343,
    GLM46V: 151_343,
    GLM4V_MOE: 151_363,
    **dict.fromkeys(QWEN3_5, 248_056),
    **dict.fromkeys(KIMI_K2_5, 163_605),
    **dict.fromkeys(DEEPSEEK_VL, 100_015),
    OVIS2: 151_665,
    LFM2_VL: 396,
    LFM3_VL: 125_030,
    GLM_OCR: 59_280,
    PADDLE_OCR: 100_295,
    LIGHTON_OCR: 151_655,
    QIANFAN_OCR: 151_667,
    DEEPSEEK_OCR2: 128_815,
    VIDEO_LLAMA3: 151_655,
    MISTRAL_LARGE_4: 10,
    MINIMAX_M3_VL: 200_025,
    GLM_5_NEXT: 154_854,
    QWEN4_VL: 248_056,
    VIP_LLAVA: 32_000,
    LLAVA_NEXT_VIDEO: 32_001,
    IDEFICS2: 32_001,
    GRANITE4_VISION: 32_000,
    GRANITE_DOCLING: 100_337,
    HYPERCLOVAX_V2: 128_060,
    GOT_OCR2: 151_859,
    ARIA: 9,
    EXAONE_4_5: 67,
    **dict.fromkeys(QWEN_OMNI, 151_655),
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
    numbered: str | None = None
    """What is written for an image: its `number` in the chat, before its `rows`; or a mark, which templates may write
    themselves (Voxtral's, of a sound)."""
    bounded: str | None = None
    """What stands on both sides of an image, once where two touch, with a space between it and a word behind it."""
    followed: str | None = None
    """What stands behind an image that ends with a row: text, which becomes tokens with what comes behind it."""
    mutual: bool = False
    """Whether an image's tokens see each other."""
    by_library: bool = False
    """Whether its language model is computed by `transformers`."""
    beside: bool = False
    """Whether rows stand beside the prompt, which has one token for each image (`PromptEmbeds.encoded`)."""
    hears: bool = False
    """Whether it takes sounds in place of images (`shared/models/audio_models.py`)."""
    sound: int | None = None
    """The token that stands for a row of a sound, where it takes these beside images."""


class _RawLanguageModel(Struct):
    use_bidirectional_attention: str | bool | UnsetType | None = UNSET


class _RawImageModel(Struct):
    architectures: tuple[str, ...] = ()
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    image_token_id: int | None = None
    image_token_index: int | None = None
    media_placeholder_token_id: int | None = None
    audio_token_index: int | None = None
    audio_token_id: int | None = None
    vision_config: Any = None
    audio_config: dict[str, Any] | None = None
    text_config: _RawLanguageModel = field(default_factory=_RawLanguageModel)


class _RawNumbers(Struct):
    use_image_id: bool = True


class _RawCrossText(Struct):
    hidden_size: int = 4096


class _RawTowerSizes(Struct):
    architectures: tuple[str, ...] = ()
    vision_config: dict[str, Any] = field(default_factory=dict)


class _RawCrossImages(_RawTowerSizes):
    text_config: _RawCrossText = field(default_factory=_RawCrossText)


_CROSS_VISION = {"image_size": 448, "patch_size": 14, "max_num_tiles": 4}
"""Llama 3.2 Vision's, where nothing is said."""
_TOWER_SIZES = (*_CROSS_VISION, "spatial_merge_size", "temporal_patch_size", "hidden_size", "num_attention_heads")


CROSS_IMAGES = 4
"""Images of a prompt for whose rows, of all tiles, there is room."""
_MIN_BYTES = 2
"""Of an element of a row."""


class _RawArchitectureNames(Struct):
    architectures: tuple[str, ...] = ()
    thinker_config: Raw = Raw()


SERVED_WITH_MEDIA = (*IMAGE_ARCHITECTURES, *LIBRARY_IMAGE_ARCHITECTURES)
"""Those that are shown images, or hear sounds."""
_R = TypeVar("_R", bound=Struct)


def read_config(folder: Path, kind: type[_R]) -> _R:
    """What `config.json` in `folder` says, as a struct with `architectures`; of Qwen-Omni, what it says of the part
    that writes text. Raises OSError and msgspec's errors."""
    content = (folder / "config.json").read_bytes()
    whole = msgspec.json.decode(content, type=_RawArchitectureNames)
    if whole.thinker_config and any(each in QWEN_OMNI for each in whole.architectures):
        return structs.replace(msgspec.json.decode(whole.thinker_config, type=kind), architectures=whole.architectures)
    return msgspec.json.decode(content, type=kind)


def known_config(folder: Path, kind: type[_R]) -> _R | None:
    """The same; None where there is no such file, or it is wrong, which is for those to say who read all of it."""
    try:
        return read_config(folder, kind)
    except (OSError, msgspec.MsgspecError):
        return None


def nests_language_model(folder: Path) -> bool:
    """Whether the tensors of the model in `folder` are named as those of a language model within another one."""
    raw = known_config(folder, _RawArchitectureNames)
    return raw is not None and any(map(SERVED_WITH_MEDIA.__contains__, raw.architectures))


def hears_alone(folder: Path) -> bool:
    """Whether the model in `folder` takes sounds in place of images."""
    model = read_image_model(folder)
    return model is not None and model.hears


def read_image_model(folder: Path) -> ImageModel | None:
    """What `config.json` in `folder` says; None where there is no such file, or the model takes no images. What else
    may be wrong with the file is for those to say who read all of it."""
    raw = known_config(folder, _RawImageModel)
    if raw is None or not any(map(SERVED_WITH_MEDIA.__contains__, raw.architectures)):
        return None
    tokens = (raw.image_token_index, raw.image_token_id, raw.media_placeholder_token_id)
    token = next((each for each in tokens if each is not None), None)
    if GEMMA in raw.architectures:
        return ImageModel(
            262_144 if token is None else token, frame=(raw.boi_token_index, raw.eoi_token_index), mutual=True
        )
    if LLAMA4 in raw.architectures:
        return ImageModel(200_092 if token is None else token, shown="<|image|>", by_library=True)
    if any(each in raw.architectures for each in GEMMA4):
        said = raw.text_config.use_bidirectional_attention
        mutual = said == "vision" or (said is UNSET and GEMMA4[1] in raw.architectures)
        return ImageModel(
            258_880 if token is None else token,
            mutual=mutual,
            by_library=True,
            sound=None if raw.audio_config is None else raw.audio_token_id or 258_881,
        )
    if PHI4_MULTIMODAL in raw.architectures:
        eye = raw.vision_config if isinstance(raw.vision_config, dict) else {}
        seen = eye.get("image_token_id", 200_010)
        heard = (raw.audio_config or {}).get("audio_token_id", 200_011)
        return ImageModel(seen, by_library=True, sound=heard) if _is_size(seen) and _is_size(heard) else None
    if MLLAMA in raw.architectures:
        return ImageModel(128_256 if token is None else token, by_library=True, beside=True)
    if AYA_VISION in raw.architectures:
        return ImageModel(255_036 if token is None else token, shown="<image>", by_library=True)
    if COHERE2_VISION in raw.architectures:
        return ImageModel(255_036 if token is None else token, by_library=True)
    sound = raw.audio_token_index if raw.audio_token_id is None else raw.audio_token_id
    heard = next((default for each, default in SOUND_TOKENS.items() if each in raw.architectures), None)
    if heard is not None:
        begun = "[BEGIN_AUDIO]{rows}" if VOXTRAL in raw.architectures else None
        return ImageModel(heard if sound is None else sound, hears=True, numbered=begun)
    if token is None:
        token = next((default for each, default in DEFAULT_IMAGE_TOKENS.items() if each in raw.architectures), None)
    if any(each in QWEN_OMNI for each in raw.architectures):
        assert token is not None, "one of them is the default"
        return ImageModel(token, sound=151_646 if sound is None else sound)
    if MINICPM_V in raw.architectures:
        images = known_processor(folder, "image_processor", _RawNumbers) or _RawNumbers()
        numbered = "<image_id>{number}</image_id>{rows}" if images.use_image_id else None
        return None if token is None else ImageModel(token, numbered=numbered)
    if any(each in raw.architectures for each in (ARIA, EXAONE_4_5, HYPERCLOVAX_V2)):
        return None if token is None else ImageModel(token, by_library=True)
    if IDEFICS2 in raw.architectures:
        return None if token is None else ImageModel(token, bounded="<fake_token_around_image>")
    if GRANITE_DOCLING in raw.architectures:
        return None if token is None else ImageModel(token, followed="\n")
    shown = "<image>" if any(each in raw.architectures for each in (OVIS2, QIANFAN_OCR)) else None
    return None if token is None else ImageModel(token, shown=shown)


def read_cross_images(folder: Path) -> CrossImageModel | None:
    """What the files of a model in `folder` say whose tokens attend to images beside its prompt; None for others."""
    images, raw = read_image_model(folder), known_config(folder, _RawCrossImages)
    if images is None or not images.beside or raw is None:
        return None
    said = {**_CROSS_VISION, **raw.vision_config}
    numbers = (said[each] if _is_size(said[each]) else own for each, own in _CROSS_VISION.items())
    (image, patch, tiles), size = numbers, max(1, raw.text_config.hidden_size)
    rows = tiles * ((image // patch) ** 2 + 1)
    most = MAX_MEDIA_BYTES // (_MIN_BYTES * size)
    return CrossImageModel(token=images.token_id, row_size=size, rows=max(1, min(CROSS_IMAGES * rows, most)))


def check_tower_sizes(folder: Path) -> None:
    """Raises ValueError for a size in what `config.json` in `folder` says of a tower which no tower has. A list is one
    for each side, which the library's tower of Llama 3.2 Vision does not take."""
    raw = known_config(folder, _RawTowerSizes)
    if raw is None or not any(map(SERVED_WITH_MEDIA.__contains__, raw.architectures)):
        return  # what other models say of one is nobody's here
    for name in _TOWER_SIZES:
        if (value := raw.vision_config.get(name)) is None:
            continue
        sides = [value] if MLLAMA in raw.architectures or not isinstance(value, list) else value
        if not all(map(_is_size, sides)):
            raise ValueError(f"config.json: vision_config.{name} {value!r} is not allowed; a whole number from 1 on is")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
