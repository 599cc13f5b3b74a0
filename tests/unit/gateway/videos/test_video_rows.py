"""Videos whose frames have no place in a prompt are refused before any becomes rows."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest

from services.gateway.api.errors import RequestError
from services.gateway.api.media.source import VIDEO, MediaSource
from services.gateway.videos.video_decoder import VideoDecoder
from services.gateway.videos.video_rows import video_embeds
from shared.messages.encoder import FrameGroup
from shared.messages.generation import EMBEDDING_BYTES, PromptEmbeds
from shared.messages.model_card import VideoModel
from tests.support.models.tiny_videos import noise, video

FIELD = "messages[0].content[0].video_url"


async def rows_of(rate: Fraction, how: VideoModel) -> list[int | None]:
    async def encode(source: MediaSource, pixels: bytes, frames: FrameGroup) -> PromptEmbeds:
        rows = bytes(4 * EMBEDDING_BYTES["float32"])
        return PromptEmbeds(dtype="float32", size=4, rows=rows, runs=((0, 1),), grids=((1, 1, 1),))

    decoder, source = VideoDecoder(timeout=60), MediaSource(0, FIELD, kind=VIDEO)
    file = video(noise(16, (64, 64)), rate, codec="mpeg4")
    found = await video_embeds(decoder, file, source, how, asyncio.Semaphore(2), encode)
    return [each.offsets[0] if each.offsets else None for each in found.rows]


async def test_a_video_that_says_it_lasts_for_days_is_refused_where_its_seconds_are_positions() -> None:
    """Of a few thousand bytes: the message would be no prompt, which nobody answers."""
    seconds = VideoModel(positions_per_second=2.0)
    assert await rows_of(Fraction(1, 100), seconds) == [None, *range(400, 3200, 400)]
    with pytest.raises(RequestError, match=r"a video of 900000 s is not allowed; 524288 s are") as refused:
        await rows_of(Fraction(1, 60_000), seconds)
    assert (refused.value.status, refused.value.param) == (400, FIELD)
    assert await rows_of(Fraction(1, 60_000), VideoModel()) == [None, *range(1, 8)]
