"""Which models are shown videos, and how, by their files; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field

from shared.messages.encoder import MAX_FRAMES
from shared.messages.model_card import FrameSampling, VideoModel
from shared.models.image_models import (
    EXAONE_4_5,
    GEMMA4,
    GLM4V,
    GLM4V_MOE,
    GLM46V,
    GLM_5_NEXT,
    GLM_OCR,
    INTERNVL,
    LFM3_VL,
    LLAVA_NEXT_VIDEO,
    LLAVA_ONEVISION,
    QWEN3_5,
    QWEN3_OMNI,
    QWEN_OMNI,
    SMOL_VLM,
    known_config,
    read_image_model,
)
from shared.models.processor_files import known_processor

_QWEN2 = "Qwen2VLForConditionalGeneration"
_QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
_QWEN3 = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", *QWEN3_5)
_PACED = (GLM46V, GLM_OCR)
_FEW_FRAMES = (INTERNVL, LLAVA_NEXT_VIDEO)
_GLM = (GLM4V, GLM4V_MOE, *_PACED, GLM_5_NEXT)
_QWEN_FRAME = "<{time:.1f} seconds>{rows}"
_LFM_FRAME = "<{time:.1f} seconds><|vision_start|>{rows}<|vision_end|>"
"""What its templates write around a video stays, unlike Qwen's: frames have marks of their own."""
_INTERN_FRAME = "\nFrame{number}: <img>{rows}</img>"
_SMOL_INTRO = "You are provided the following series of {count} frames from a {lasts} [H:MM:SS] video.\n"
_SMOL_FRAME = "\nFrame from {clock}:<fake_token_around_image><global-img>{rows}<fake_token_around_image>"
_SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is string %}"
    "{{': ' + message['content']}}{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}"
    "{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""That of the library's processor for chats with videos, which published templates leave out."""
_GEMMA_FRAME = " {clock} {rows}"
_GLM_FRAMES = {
    GLM4V: "{rows}{second}",
    GLM4V_MOE: "{rows}{second}",
    **dict.fromkeys((*_PACED, GLM_5_NEXT), "{rows}{time:.1f} seconds"),
}
_GLM_STARTS = {GLM_OCR: 59_256, GLM_5_NEXT: 154_830}
_VIDEOS = {LFM3_VL: (125_029, _LFM_FRAME), EXAONE_4_5: (68, "{rows}"), LLAVA_NEXT_VIDEO: (32_000, "{rows}")}
"""The token of a video where no file says, and what is written for frames."""
_GLM_SECONDS = 300.0
"""That a video of GLM's is looked at, where no file says."""
_SHARES = 32
"""As many frames of a whole video as LLaVA-OneVision was trained with; Gemma 4 has as many where no file says."""
_FEW = 8
"""The same of InternVL and LLaVA-NeXT-Video, whose contexts have little room, as the library's examples have it."""


class VideoTokens(Struct, frozen=True):
    """The tokens that stand for a video in prompts."""

    video: int | str
    """What a chat template writes: a token, or text."""
    row: int
    """What stands for a row."""
    start: int | None
    end: int | None
    """What template or processor write before and behind rows that follow each other. None: nothing that is not part of
    `frame`."""
    frame: str
    """What is written for frames that become rows together: of these `rows`, their `number` in the video, from 1 on,
    their `time`, its whole `second`, and the time by a `clock` (minutes and seconds). White space that comes first is
    left out before a video's first frame."""
    intro: str = ""
    """What is written before the first frame: the `count` of frames in words, and how long the video `lasts`."""
    outro: str = ""
    """What is written behind the last one."""
    template: str | None = None
    """Of chats with videos, whatever the files have for others; None: the same."""


class FrameSize(Struct, frozen=True):
    """The pixels that frames are given, at least and at most, by what prepares them."""

    shortest_edge: int
    longest_edge: int


_N = TypeVar("_N", int, float)

_OF_TWO = FrameSize(128 * 28**2, 768 * 28**2)
"""Of Qwen2-VL's kind, as `qwen_vl_utils` and the library have it where no file says."""
_OF_ALL = FrameSize(128 * 32**2, 768 * 32**2)
"""Of Qwen3-VL's kind, of all frames together; of Qwen3-Omni's, of two."""
_OF_GLM = FrameSize(112**2, 60_000 * 28**2)
_SIZES: dict[FrameSampling, FrameSize] = {"ends": _OF_ALL, "seconds": _OF_GLM, "paces": _OF_GLM}


class _RawVision(Struct):
    tokens_per_second: float = 4.0


class _RawSize(Struct):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _RawModel(Struct):
    architectures: tuple[str, ...] = ()
    image_start_token_id: int | None = None
    image_end_token_id: int | None = None
    boi_token_id: int = 255_999
    eoi_token_id: int = 258_882
    video_token_id: int | None = None
    video_token_index: int | None = None
    position_id_per_seconds: float = 25.0
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    vision_config: _RawVision = field(default_factory=_RawVision)


class _RawVideoSampling(Struct):
    fps: float
    max_frames: int


class _RawProcessor(Struct):
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_duration: float | None = None
    num_frames: int | None = None
    size: _RawSize | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_sampling: _RawVideoSampling | None = None
    """SmolVLM's, which goes before its other words for the same."""


def read_video_model(folder: Path) -> VideoModel | None:
    """What the files in `folder` say; None where there are none, or the model takes no videos. What else may be wrong
    with them is for those to say who read all of them."""
    raw = _read_model(folder)
    if raw is None:
        return None
    processor, named = _processor(folder), raw.architectures
    fps = processor.fps or VideoModel().fps
    if LLAVA_ONEVISION in named:
        most = _bounded(processor.num_frames or _SHARES)
        return VideoModel(max_frames=most, sampling="shares", together=1, closed=True)
    if _is(named, GEMMA4):
        most = _bounded(processor.num_frames or _SHARES)
        return VideoModel(max_frames=most, sampling="shares", together=1, timed=True, stamp="first")
    if _is(named, _FEW_FRAMES):
        most = _bounded(processor.num_frames or _FEW)
        sampling: FrameSampling = "middles" if INTERNVL in named else "shares"
        return VideoModel(max_frames=most, sampling=sampling, together=1, timed=INTERNVL in named, stamp="first")
    if SMOL_VLM in named:
        own = processor.video_sampling or _RawVideoSampling(
            processor.fps or 1.0, _said(processor.num_frames, MAX_FRAMES)
        )
        return VideoModel(
            fps=own.fps,
            max_frames=_bounded(own.max_frames),
            sampling="inner",
            together=1,
            timed=True,
            stamp="first",
        )
    if GLM_5_NEXT in named:
        lasts, most = processor.max_duration or 0, _said(processor.max_frames, MAX_FRAMES)
        most = _bounded(min(most, lasts * fps) if lasts > 0 else most)
        return VideoModel(fps=fps, max_frames=most, sampling="pace", timed=True, stamp="first")
    if _is(named, _PACED):
        return VideoModel(sampling="paces", timed=True, stamp="first")
    if _is(named, _GLM):
        most = _bounded(_said(processor.max_duration, _GLM_SECONDS) * fps)
        return VideoModel(fps=fps, max_frames=most, sampling="seconds", timed=True, stamp="first")
    timed, seconds = _is(named, (*_QWEN3, LFM3_VL)), raw.vision_config.tokens_per_second if _QWEN2_5 in named else None
    if _is(named, QWEN_OMNI):
        seconds = raw.position_id_per_seconds
    return VideoModel(
        fps=fps,
        min_frames=_bounded(_said(processor.min_frames, VideoModel().min_frames)),
        max_frames=_bounded(_said(processor.max_frames, MAX_FRAMES)),
        sampling="ends" if timed else "steps",
        positions_per_second=seconds,
        timed=timed,
    )


def read_video_tokens(folder: Path) -> VideoTokens | None:
    """See `read_video_model`."""
    raw = _read_model(folder)
    if raw is None:
        return None
    named = raw.architectures
    if (frame := next((_GLM_FRAMES[each] for each in named if each in _GLM_FRAMES), None)) is not None:
        images = read_image_model(folder)
        assert images is not None, "they take images, too"
        first = images.token_id
        video = first + 1 if raw.video_token_id is None else raw.video_token_id
        own = next((token for each, token in _GLM_STARTS.items() if each in named), 151_339)
        around = _said(raw.image_start_token_id, own), _said(raw.image_end_token_id, own + 1)
        return VideoTokens(video, first, *around, frame)
    if INTERNVL in named:
        images = read_image_model(folder)
        row = 151_667 if images is None else images.token_id
        return VideoTokens("<video>", row, None, None, _INTERN_FRAME)
    if SMOL_VLM in named:
        row = 49_190 if (images := read_image_model(folder)) is None else images.token_id
        return VideoTokens("<video>", row, None, None, _SMOL_FRAME, _SMOL_INTRO, "\n\n", _SMOL_TEMPLATE)
    if _is(named, tuple(_VIDEOS)):
        default, frame = _VIDEOS[next(each for each in named if each in _VIDEOS)]
        video = _said(raw.video_token_id, _said(raw.video_token_index, default))
        return VideoTokens(video, video, None, None, frame)
    if _is(named, GEMMA4):
        video = _said(raw.video_token_id, 258_884)
        return VideoTokens(video, video, raw.boi_token_id, raw.eoi_token_id, _GEMMA_FRAME)
    default = _said(raw.video_token_index, 151_656 if _is(named, QWEN_OMNI) else 151_647)
    video = _said(raw.video_token_id, default)
    start, end = raw.vision_start_token_id, raw.vision_end_token_id
    first = 248_053 if _is(named, QWEN3_5) else 151_652
    start, end = first if start is None else start, first + 1 if end is None else end
    return VideoTokens(video, video, start, end, _QWEN_FRAME)


def read_frame_size(folder: Path, sampling: FrameSampling) -> FrameSize:
    """Of two frames, or of all of a video's where these are timed; what no file says is as models of its kind, of that
    `sampling`, have it."""
    processor, own = _processor(folder), _SIZES.get(sampling, _OF_TWO)
    if (model := _read_model(folder)) is not None and _is(model.architectures, QWEN_OMNI):
        # the library's processor of chats has it so, whatever files say
        return _OF_ALL if _is(model.architectures, QWEN3_OMNI) else _OF_TWO
    size, least, most = processor.size, own.shortest_edge, own.longest_edge
    if size is not None and size.shortest_edge is not None and size.longest_edge is not None:
        least, most = size.shortest_edge, size.longest_edge
    if sampling != "steps":
        return FrameSize(least, most)
    return FrameSize(_said(processor.min_pixels, least), _said(processor.max_pixels, most))


def _read_model(folder: Path) -> _RawModel | None:
    """Of a model that takes videos. One of Qwen2's kind does where its configuration names their token."""
    raw = known_config(folder, _RawModel)
    if raw is None:
        return None
    if _is(raw.architectures, (*_GLM, LLAVA_ONEVISION, *GEMMA4, *QWEN_OMNI, *_VIDEOS, INTERNVL, SMOL_VLM)):
        return raw
    return raw if _is(raw.architectures, (_QWEN2, _QWEN2_5, *_QWEN3)) and raw.video_token_id is not None else None


def _is(named: tuple[str, ...], architectures: tuple[str, ...]) -> bool:
    return any(each in architectures for each in named)


def _said(number: _N | None, instead: _N) -> _N:
    return instead if number is None else number


def _bounded(frames: float) -> int:
    return int(max(1, min(frames, MAX_FRAMES)))


def _processor(folder: Path) -> _RawProcessor:
    """Of videos."""
    return known_processor(folder, "video_processor", _RawProcessor) or _RawProcessor()
