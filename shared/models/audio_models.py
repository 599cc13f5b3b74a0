"""Which models write down what is said, and which take sounds beside text, by their files. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from shared.messages.encoder import MAX_IMAGE_BYTES
from shared.messages.model_card import AudioModel, SoundModel
from shared.models.image_models import GEMMA4, QWEN2_5_OMNI, QWEN2_AUDIO, QWEN3_OMNI, known_config
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


_SIZES = {QWEN2_AUDIO: 4096, **dict.fromkeys(QWEN2_5_OMNI, 3584), **dict.fromkeys(QWEN3_OMNI, 2048), GEMMA4: 2304}
"""Elements of a row, as `transformers` has it where a configuration does not say."""


class _RawSoundText(Struct):
    hidden_size: int | None = None


class _RawSoundModel(Struct):
    architectures: tuple[str, ...] = ()
    text_config: _RawSoundText = field(default_factory=_RawSoundText)
    audio_config: dict[str, Any] | None = None


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
    if raw is None or named is None or (named == GEMMA4 and raw.audio_config is None):
        return None
    features = known_processor(folder, "feature_extractor", _RawFeatures) or _RawFeatures()
    size = raw.text_config.hidden_size or _SIZES[named]
    window_s = min(features.chunk_length, MAX_IMAGE_BYTES // (SAMPLE_BYTES * features.sampling_rate))
    return SoundModel(size, features.sampling_rate, window_s)
