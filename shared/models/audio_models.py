"""Which models write down what is said, by their configuration. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from shared.messages.model_card import AudioModel

SAMPLE_BYTES = 4
"""Samples travel as float32, little-endian, of one channel."""
TRANSCRIPTION_ARG = "transcription"
"""What requests ask for the rules of its answers by, in `vllm_xargs`."""
WHISPER = "WhisperForConditionalGeneration"

_R = TypeVar("_R", bound=Struct)


class _RawWhisper(Struct):
    architectures: tuple[str, ...] = ()
    d_model: int = 0
    max_source_positions: int = 1500
    eos_token_id: int = 50_257
    decoder_start_token_id: int = 50_258


class _RawWhisperFeatures(Struct):
    sampling_rate: int = 16_000
    chunk_length: int = 30


class _RawWhisperGeneration(Struct):
    no_timestamps_token_id: int = 50_363
    lang_to_id: dict[str, int] = field(default_factory=dict)
    task_to_id: dict[str, int] = field(default_factory=dict)
    prev_sot_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = ()
    begin_suppress_tokens: tuple[int, ...] | None = ()
    max_initial_timestamp_index: int | None = None


def read_audio_model(folder: Path) -> AudioModel | None:
    """What `config.json` and what stands beside it say; None where there is no such file, or the model hears nothing.
    What else may be wrong with the files is for those to say who read all of them."""
    raw = _read(folder / "config.json", _RawWhisper)
    if raw is None or WHISPER not in raw.architectures:
        return None
    features = _read(folder / "preprocessor_config.json", _RawWhisperFeatures) or _RawWhisperFeatures()
    generation = _read(folder / "generation_config.json", _RawWhisperGeneration) or _RawWhisperGeneration()
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


def _read(path: Path, kind: type[_R]) -> _R | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
