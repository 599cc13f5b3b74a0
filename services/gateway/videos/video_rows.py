"""Makes rows of a video: one or two of its frames become rows as an image does, at an encoder."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.api.errors import RequestError, invalid
from services.gateway.api.media.source import MediaSource
from services.gateway.videos.video_decoder import VideoDecoder
from services.gateway.videos.video_process import VideoShape
from shared.messages.encoder import FrameGroup
from shared.messages.generation import MAX_FRAME_OFFSET, PromptEmbeds
from shared.messages.model_card import VideoModel

Encode = Callable[[MediaSource, bytes, FrameGroup], Awaitable[PromptEmbeds]]


class MediaEmbeds(NamedTuple):
    """What an image or a video is in a prompt."""

    rows: list[PromptEmbeds]
    """Of an image one; of a video those of the frames that become rows together."""
    times: tuple[float, ...] = ()
    """Seconds from a video's beginning to each of these."""
    seconds: float = 0.0
    """That a video lasts."""


async def video_embeds(
    decoder: VideoDecoder, file: bytes, source: MediaSource, how: VideoModel, slots: asyncio.Semaphore, encode: Encode
) -> MediaEmbeds:
    """`slots`: how many are encoded at the same time; frames are decoded no further ahead. Raises RequestError."""
    tasks: list[asyncio.Task[PromptEmbeds | RequestError]] = []
    shape: VideoShape | None = None
    try:
        async with aclosing(decoder.groups(file, source.field, how)) as groups:
            async for each in groups:
                if isinstance(each, VideoShape):
                    shape = each
                    _check_length(shape, source.field, how)
                    continue
                assert shape is not None, "it comes first"
                group = _group(shape, len(tasks), how)
                await slots.acquire()
                tasks.append(asyncio.create_task(_outcome(encode(source, each.pixels, group), slots)))
                if any(task.done() and isinstance(task.result(), RequestError) for task in tasks):
                    break
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert shape is not None, "a decoder says it or raises"
    found: list[PromptEmbeds] = []
    for outcome in outcomes:
        if isinstance(outcome, RequestError):
            raise outcome
        found.append(outcome)
    offsets = frame_offsets(len(found), shape.seconds_of_two, how)
    rows = [
        each if offset is None or not any(each.grids) else replace(each, offsets=(offset,))
        for each, offset in zip(found, offsets, strict=True)
    ]
    return MediaEmbeds(rows, group_times(shape.times, how), shape.seconds)


def _check_length(shape: VideoShape, field: str, how: VideoModel) -> None:
    """Raises RequestError for a video whose last frame, by what the file says of its times, has no position."""
    last = frame_offsets(how.groups(len(shape.times)), shape.seconds_of_two, how)[-1]
    if how.positions_per_second is not None and last is not None and last > MAX_FRAME_OFFSET:
        allowed = MAX_FRAME_OFFSET / how.positions_per_second
        raise invalid(field, f"a video of {shape.times[-1]:.0f} s is not allowed; {allowed:.0f} s are")


def _group(shape: VideoShape, number: int, how: VideoModel) -> FrameGroup:
    """Those frames of a video, counted from 0."""
    frames = len(shape.times)
    last = how.closed and number + 1 == how.groups(frames)
    return FrameGroup(shape.width, shape.height, max(how.together, frames), how.together, last)


async def _outcome(rows: Awaitable[PromptEmbeds], slots: asyncio.Semaphore) -> PromptEmbeds | RequestError:
    """An error is returned, so that which of several is raised depends on no clock."""
    try:
        return await rows
    except RequestError as error:
        return error
    finally:
        slots.release()


def frame_offsets(groups: int, seconds: float, how: VideoModel) -> list[int | None]:
    """Of frames that become rows together, how far they are behind the first ones on the axis of frames; None: they are
    images of their own, or the first. `seconds`: between every second frame. As `get_rope_index` of the library's
    Qwen2.5-VL has it, in float32."""
    if how.timed:
        return [None] * groups
    step = 1.0 if how.positions_per_second is None else _float32(_float32(seconds) * how.positions_per_second)
    return [None, *(int(_float32(place * step)) for place in range(1, groups))]


def group_times(times: tuple[float, ...], how: VideoModel) -> tuple[float, ...]:
    """Of frames that become rows together: in the middle of them, the last of an odd number with itself, or the first
    one's."""
    first = times[:: how.together]
    if how.stamp == "first":
        return first
    last = (*times[how.together - 1 :: how.together], times[-1])[: len(first)]
    return tuple((begin + end) / 2 for begin, end in zip(first, last, strict=True))


def _float32(number: float) -> float:
    found: float
    (found,) = struct.unpack("<f", struct.pack("<f", number))
    return found
