"""Which models are shown videos, and how, by their files; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from shared.messages.encoder import MAX_FRAMES
from shared.messages.model_card import VideoModel
from shared.models.image_models import QWEN3_5

_QWEN2 = "Qwen2VLForConditionalGeneration"
_QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
_QWEN3 = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", *QWEN3_5)

_R = TypeVar("_R", bound=Struct)


class VideoTokens(Struct, frozen=True):
    """The tokens that stand for a video in prompts."""

    video: int
    """What a chat template writes, and stands for a row."""
    start: int
    end: int
    """What template or processor write before and behind rows that follow each other."""


class FrameSize(Struct, frozen=True):
    """The pixels that frames are given, at least and at most, by what prepares them."""

    shortest_edge: int
    longest_edge: int


class _RawVision(Struct):
    tokens_per_second: float = 4.0


class _RawModel(Struct):
    architectures: tuple[str, ...] = ()
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    vision_config: _RawVision = field(default_factory=_RawVision)


class _RawProcessor(Struct):
    fps: float | None = None
    min_frames: int = 4
    max_frames: int = 768
    size: FrameSize | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class _RawProcessors(Struct):
    video_processor: _RawProcessor | None = None


def read_video_model(folder: Path) -> VideoModel | None:
    """What the files in `folder` say; None where there are none, or the model takes no videos. What else may be wrong
    with them is for those to say who read all of them."""
    raw = _read_model(folder)
    if raw is None:
        return None
    processor = _processor(folder)
    timed = any(each in _QWEN3 for each in raw.architectures)
    return VideoModel(
        fps=processor.fps or VideoModel().fps,
        min_frames=min(processor.min_frames, MAX_FRAMES),
        max_frames=min(processor.max_frames, MAX_FRAMES),
        sampling="ends" if timed else "steps",
        positions_per_second=raw.vision_config.tokens_per_second if _QWEN2_5 in raw.architectures else None,
        timed=timed,
    )


def read_video_tokens(folder: Path) -> VideoTokens | None:
    """See `read_video_model`."""
    raw = _read_model(folder)
    if raw is None or raw.video_token_id is None:
        return None
    start, end = raw.vision_start_token_id, raw.vision_end_token_id
    first = 248_053 if any(each in QWEN3_5 for each in raw.architectures) else 151_652
    return VideoTokens(raw.video_token_id, first if start is None else start, first + 1 if end is None else end)


def read_frame_size(folder: Path) -> FrameSize | None:
    """Of two frames, or of all of a video's where these are timed. None: what a model of its kind has."""
    processor = _processor(folder)
    if processor.min_pixels is not None and processor.max_pixels is not None:
        return FrameSize(processor.min_pixels, processor.max_pixels)
    return processor.size


def _read_model(folder: Path) -> _RawModel | None:
    raw = _read(folder / "config.json", _RawModel)
    known = raw is not None and any(each in (_QWEN2, _QWEN2_5, *_QWEN3) for each in raw.architectures)
    return raw if known and raw is not None and raw.video_token_id is not None else None


def _processor(folder: Path) -> _RawProcessor:
    """Of videos, wherever releases of the library have written it."""
    own = _read(folder / "video_preprocessor_config.json", _RawProcessor)
    if own is not None:
        return own
    both = _read(folder / "processor_config.json", _RawProcessors)
    return (None if both is None else both.video_processor) or _RawProcessor()


def _read(path: Path, kind: type[_R]) -> _R | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
