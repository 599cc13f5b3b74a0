"""Makes rows of a video: each two of its frames become rows as an image does, at an encoder."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.media.source import MediaSource
from services.gateway.videos.video_decoder import VideoDecoder
from services.gateway.videos.video_process import VideoShape
from shared.messages.encoder import FramePair
from shared.messages.generation import PATCHED_FRAMES, PromptEmbeds
from shared.messages.model_card import VideoModel

Encode = Callable[[MediaSource, bytes, FramePair], Awaitable[PromptEmbeds]]


class MediaEmbeds(NamedTuple):
    """What an image or a video is in a prompt."""

    rows: list[PromptEmbeds]
    """Of an image one; of a video those of each two frames."""
    times: tuple[float, ...] = ()
    """Seconds from a video's beginning to each of these."""


async def video_embeds(
    decoder: VideoDecoder, file: bytes, source: MediaSource, how: VideoModel, slots: asyncio.Semaphore, encode: Encode
) -> MediaEmbeds:
    """`slots`: how many are encoded at the same time; frames are decoded no further ahead. Raises RequestError."""
    tasks: list[asyncio.Task[PromptEmbeds | RequestError]] = []
    shape: VideoShape | None = None
    try:
        async with aclosing(decoder.pairs(file, source.field, how)) as pairs:
            async for each in pairs:
                if isinstance(each, VideoShape):
                    shape = each
                    continue
                assert shape is not None, "it comes first"
                pair = FramePair(shape.width, shape.height, max(PATCHED_FRAMES, len(shape.times)))
                await slots.acquire()
                tasks.append(asyncio.create_task(_outcome(encode(source, each.pixels, pair), slots)))
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
    return MediaEmbeds(rows, pair_times(shape.times))


async def _outcome(rows: Awaitable[PromptEmbeds], slots: asyncio.Semaphore) -> PromptEmbeds | RequestError:
    """An error is returned, so that which of several is raised depends on no clock."""
    try:
        return await rows
    except RequestError as error:
        return error
    finally:
        slots.release()


def frame_offsets(pairs: int, seconds: float, how: VideoModel) -> list[int | None]:
    """Of each two frames, how far they are behind the first ones on the axis of frames; None: they are images of their
    own, or the first. `seconds`: between every second frame. As `get_rope_index` of the library's Qwen2.5-VL has it, in
    float32."""
    if how.timed:
        return [None] * pairs
    step = 1.0 if how.positions_per_second is None else _float32(_float32(seconds) * how.positions_per_second)
    return [None, *(int(_float32(place * step)) for place in range(1, pairs))]


def pair_times(times: tuple[float, ...]) -> tuple[float, ...]:
    """In the middle of each two frames, the last of an odd number with itself."""
    whole = times if len(times) % PATCHED_FRAMES == 0 else (*times, times[-1])
    return tuple((whole[i] + whole[i + 1]) / 2 for i in range(0, len(whole), PATCHED_FRAMES))


def _float32(number: float) -> float:
    found: float
    (found,) = struct.unpack("<f", struct.pack("<f", number))
    return found
