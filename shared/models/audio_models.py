"""Which models write down what is said, and which take sounds beside text, by their files. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shared.messages.encoder import MAX_IMAGE_BYTES
from shared.messages.model_card import AudioModel, SoundModel, TranscriptionChat
from shared.models.image_models import (
    AUDIO_FLAMINGO3,
    GEMMA4,
    GLM_ASR,
    GRANITE_SPEECH,
    PHI4_MULTIMODAL,
    QWEN2_5_OMNI,
    QWEN2_AUDIO,
    QWEN3_ASR,
    QWEN3_OMNI,
    VOXTRAL,
    known_config,
)
from shared.models.processor_files import known_json, known_processor

SAMPLE_BYTES = 4
"""Samples travel as float32, little-endian, of one channel."""
TRANSCRIPTION_ARG = "transcription"
"""What requests ask for the rules of its answers by, in `vllm_xargs`."""
WHISPER = "WhisperForConditionalGeneration"


class _RawWhisper(Struct):
    architectures: tuple[str, ...] = ()
    d_model: int = 0
    max_source_positions: int = 1500
    eos_token_id: int = 50_257
    decoder_start_token_id: int = 50_258


class _RawFeatures(Struct):
    sampling_rate: Annotated[int, Meta(ge=1)] = 16_000
    chunk_length: Annotated[int, Meta(ge=1)] = 30


class _RawWhisperGeneration(Struct):
    no_timestamps_token_id: int = 50_363
    lang_to_id: dict[str, int] = field(default_factory=dict)
    task_to_id: dict[str, int] = field(default_factory=dict)
    prev_sot_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = ()
    begin_suppress_tokens: tuple[int, ...] | None = ()
    max_initial_timestamp_index: int | None = None


_SIZES = {
    QWEN2_AUDIO: 4096,
    **dict.fromkeys(QWEN2_5_OMNI, 3584),
    **dict.fromkeys(QWEN3_OMNI, 2048),
    **dict.fromkeys(GEMMA4, 2304),
    VOXTRAL: 4096,
    QWEN3_ASR: 4096,
    AUDIO_FLAMINGO3: 4096,
    GLM_ASR: 2048,
    GRANITE_SPEECH: 4096,
    PHI4_MULTIMODAL: 3072,
}
"""Elements of a row, as `transformers` has it where a configuration does not say."""
_MAX_SECONDS: dict[str, int | None] = {
    VOXTRAL: None,
    QWEN3_ASR: None,
    GRANITE_SPEECH: None,
    PHI4_MULTIMODAL: None,
    AUDIO_FLAMINGO3: 600,
    GLM_ASR: 655,
}
"""Seconds that their processors take of a sound, in as many windows as it has, where a file does not say; None: all."""


_QWEN_LANGUAGES = {
    "ar": "Arabic",
    "yue": "Cantonese",
    "zh": "Chinese",
    "cs": "Czech",
    "da": "Danish",
    "nl": "Dutch",
    "en": "English",
    "fil": "Filipino",
    "fi": "Finnish",
    "fr": "French",
    "de": "German",
    "el": "Greek",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "fa": "Persian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "es": "Spanish",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
_VOXTRAL_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")

_CHATS = {
    VOXTRAL: TranscriptionChat(
        window_s=0,
        answer="lang:{language}[TRANSCRIBE]",
        unsaid="[TRANSCRIBE]",
        languages=tuple((each, each) for each in _VOXTRAL_LANGUAGES),
    ),
    QWEN3_ASR: TranscriptionChat(
        window_s=0,
        prompt="system",
        answer="language {language}<asr_text>",
        mark="<asr_text>",
        languages=tuple(_QWEN_LANGUAGES.items()),
    ),
    GRANITE_SPEECH: TranscriptionChat(
        window_s=0,
        behind="can you transcribe the speech into a written format?",
        prompt="user",
        shown="<|audio|>",
    ),
    AUDIO_FLAMINGO3: TranscriptionChat(window_s=0, before="Transcribe the input speech.", prompt="user"),
    GLM_ASR: TranscriptionChat(window_s=0, behind="Please transcribe this audio into text", prompt="user"),
}
"""As the library's processors ask, Voxtral's as Mistral's `encode_transcription` does; Granite's is that of its model
card and of vLLM, as the library has none."""


class _RawSoundText(Struct):
    hidden_size: int | None = None


class _RawSoundModel(Struct):
    architectures: tuple[str, ...] = ()
    hidden_size: int | None = None
    text_config: _RawSoundText = field(default_factory=_RawSoundText)
    audio_config: dict[str, Any] | None = None


class _RawSoundProcessor(Struct):
    max_audio_len: Annotated[int, Meta(ge=1)] | None = None
    default_transcription_prompt: str | None = None


def read_audio_model(folder: Path) -> AudioModel | None:
    """What `config.json` and what stands beside it say; None where there is no such file, or the model hears nothing.
    What else may be wrong with the files is for those to say who read all of them."""
    raw = known_json(folder / "config.json", _RawWhisper)
    if raw is None or WHISPER not in raw.architectures:
        return None
    features = known_processor(folder, "feature_extractor", _RawFeatures) or _RawFeatures()
    generation = known_json(folder / "generation_config.json", _RawWhisperGeneration) or _RawWhisperGeneration()
    return AudioModel(
        row_size=raw.d_model,
        rows=raw.max_source_positions,
        sample_rate=features.sampling_rate,
        window_s=features.chunk_length,
        begin=raw.decoder_start_token_id,
        end=raw.eos_token_id,
        no_timestamps=generation.no_timestamps_token_id,
        languages=tuple((name.strip("<|>"), token) for name, token in generation.lang_to_id.items()),
        tasks=tuple(generation.task_to_id.items()),
        previous=generation.prev_sot_token_id,
        suppressed=generation.suppress_tokens or (),
        suppressed_first=generation.begin_suppress_tokens or (),
        max_first_timestamp=generation.max_initial_timestamp_index,
    )


def read_sound_model(folder: Path) -> SoundModel | None:
    """The same of the sounds that its chats may have; None where there are none."""
    raw = known_config(folder, _RawSoundModel)
    named = None if raw is None else next((each for each in raw.architectures if each in _SIZES), None)
    if raw is None or named is None or (named in GEMMA4 and raw.audio_config is None):
        return None
    features = known_processor(folder, "feature_extractor", _RawFeatures) or _RawFeatures()
    processor = known_json(folder / "processor_config.json", _RawSoundProcessor) or _RawSoundProcessor()
    size, most = (
        (raw.hidden_size if named == PHI4_MULTIMODAL else raw.text_config.hidden_size) or _SIZES[named],
        MAX_IMAGE_BYTES // (SAMPLE_BYTES * features.sampling_rate),
    )
    longest, window_s = features.chunk_length, min(features.chunk_length, most)
    if named in _MAX_SECONDS:  # in whole windows
        said = processor.max_audio_len or _MAX_SECONDS[named]
        longest = most if said is None else max(said // longest * longest, longest)
    chat = _CHATS.get(named)
    if chat is not None and chat.prompt == "user":
        own = processor.default_transcription_prompt
        chat = _asking(own, chat) if own else chat
    chat = None if chat is None else replace(chat, window_s=window_s)
    return SoundModel(size or _SIZES[named], features.sampling_rate, min(longest, most), chat)


def _asking(text: str, chat: TranscriptionChat) -> TranscriptionChat:
    return replace(chat, before=text) if chat.before else replace(chat, behind=text)
