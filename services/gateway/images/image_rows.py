"""Gets the rows of a request's images and videos from an encoder, however often one of these dies meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from services.gateway.api.errors import STATUS, RequestError, invalid
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.media.source import IMAGE, SOUND, VIDEO, MediaSource
from services.gateway.images.image_fetcher import ImageFetcher
from services.gateway.images.open_rows import OpenRows
from services.gateway.videos.video_decoder import VideoDecoder
from services.gateway.videos.video_rows import MediaEmbeds, video_embeds
from shared import topics
from shared.bus import Bus, NoResponders, PayloadTooLarge, ReplyError, ReplyTimeout
from shared.ids import ModelName
from shared.messages.encoder import EncodeInput, EncoderRefusal, EncoderReply, EncoderRows, FrameGroup, TokenTimes
from shared.messages.generation import MAX_MEDIA_BYTES, PromptEmbeds
from shared.messages.model_card import SoundModel
from shared.messages.tokenizer import ChatPrompt, VideoParts

ENCODE_TIMEOUT = 120.0
"""Seconds that the rows of an image may take: a new encoder has started by then."""
REPLY_TIMEOUT = 5.0
"""Seconds after which an encoder is asked again: the one that was may have died. Who encodes the image already, and
lives, encodes it once."""
RETRY_INTERVAL = 0.25
CROWD_INTERVAL = 1.0
"""Seconds until encoders that had no room are asked again."""
DECODE_TIMEOUT = 10.0
_A = TypeVar("_A")

MAX_AT_ONCE = 4
"""Images of one request that are on their way at the same time."""


class ImageRowsClient:
    """Fills in where the rows of images and videos are, before a request is dispatched."""

    def __init__(
        self,
        bus: Bus,
        fetcher: ImageFetcher | None = None,
        decoder: VideoDecoder | None = None,
        samples: Callable[[bytes, SoundModel, str], Awaitable[bytes]] | None = None,
    ) -> None:
        """`fetcher`: None: files come in bodies only. `samples`: of a sound's file, for a field of the client's, which
        raises RequestError; None: chats have no sounds."""
        self._samples = samples
        self._bus, self._fetcher = bus, fetcher or ImageFetcher((), 1.0)
        self._decoder = decoder or VideoDecoder(DECODE_TIMEOUT)
        self.open_rows = OpenRows(bus, self.encoded)
        """Of requests that were filled, what they still need."""

    async def filled(self, generation: GenerationRequest) -> GenerationRequest:
        """The request with rows in place of its images and videos. Raises RequestError: 400 for one that is none or
        cannot be fetched, 413 for one too large for the bus, 503 where no encoder answers."""
        if not generation.media:
            return generation
        slots, turn = asyncio.Semaphore(MAX_AT_ONCE), generation.key or secrets.token_hex(8)
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._outcome(each, generation, slots, turn)) for each in generation.media]
        found: list[MediaEmbeds] = []
        for task in started:
            if isinstance(outcome := task.result(), RequestError):
                raise outcome
            found.append(outcome)
        (prompt,) = generation.prompts
        assert isinstance(prompt, ChatPrompt), "only chats have images"
        return replace(generation, prompts=(_with_rows(prompt, generation.media, found),), media=())

    async def _outcome(
        self, source: MediaSource, generation: GenerationRequest, slots: asyncio.Semaphore, turn: str
    ) -> MediaEmbeds | RequestError:
        """An error is returned, so that which of several is raised depends on no clock."""

        async def encode(source: MediaSource, file: bytes, frames: FrameGroup | None) -> PromptEmbeds:
            model, others = generation.model.name, _images(generation) - (source.kind == IMAGE)
            question = EncodeInput(
                file,
                generation.cache_salt,
                turn,
                frames,
                max_side=source.max_side,
                several=source.kind != VIDEO and others > 0,
                sound=source.kind == SOUND,
            )
            rows = await self.encoded(source.field, question, model)
            self.open_rows.add(rows, question, model)
            return rows

        try:
            async with slots:
                file = source.data
                if source.url is not None:
                    file = await self._fetcher.fetch(source.url, source.field, source.kind)
                if source.kind == SOUND:
                    sounds = generation.model.sounds
                    assert self._samples is not None, "a gateway decodes sounds"
                    assert sounds is not None, "checked when it was read"
                    file = await self._samples(file, sounds, source.field)
                if source.kind != VIDEO:
                    return MediaEmbeds([await encode(source, file, None)])
            how = generation.model.shown_videos
            assert how is not None, "checked when it was read"
            return await video_embeds(self._decoder, file, source, how, slots, encode)
        except RequestError as error:
            return error

    async def awaited(self, field: str, question: EncodeInput, model: ModelName) -> PromptEmbeds:
        """As `encoded`, kept as rows of an open request; a crowd at the encoders is waited for."""
        rows = await _patiently(lambda: self.encoded(field, question, model))
        self.open_rows.add(rows, question, model)
        return rows

    async def times(self, field: str, question: EncodeInput, model: ModelName) -> tuple[float, ...]:
        """When each token ends that was written down of a window; a crowd at the encoders is waited for. Raises
        RequestError."""
        reply = await _patiently(lambda: self._answered(field, question, model))
        assert isinstance(reply, TokenTimes), "what was written is answered by its times"
        return reply.times

    async def encoded(self, field: str, question: EncodeInput, model: ModelName) -> PromptEmbeds:
        """What stands for the rows of an image, which are kept from now on. Raises RequestError, see `filled`."""
        reply = await self._answered(field, question, model)
        assert isinstance(reply, EncoderRows), "images are answered by their rows"
        return reply.rows

    async def _answered(self, field: str, question: EncodeInput, model: ModelName) -> EncoderRows | TokenTimes:
        topic, loop = topics.image_requests(model), asyncio.get_running_loop()
        last, end = "", loop.time() + ENCODE_TIMEOUT
        while (left := end - loop.time()) > 0:
            try:
                reply: EncoderReply = await self._bus.request(topic, question, EncoderReply, min(REPLY_TIMEOUT, left))
            except PayloadTooLarge as error:
                raise RequestError(413, f"{field}: {error}", param=field, code="too_large") from None
            except (NoResponders, ReplyTimeout, ReplyError) as error:
                last = type(error).__name__
                await asyncio.sleep(RETRY_INTERVAL)
                continue
            if isinstance(reply, EncoderRefusal):
                again = 1.0 if reply.kind == "overloaded" else None
                raise RequestError(STATUS[reply.kind], f"{field}: {reply.message}", param=field, retry_after=again)
            return reply
        raise RequestError(503, f"no encoder answered ({last})", retry_after=1.0)


async def _patiently(ask: Callable[[], Awaitable[_A]]) -> _A:
    """What encoders answer, once they have room. Raises RequestError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + ENCODE_TIMEOUT
    while True:
        try:
            return await ask()
        except RequestError as error:
            if error.status != 429 or loop.time() > end:
                raise
        await asyncio.sleep(CROWD_INTERVAL)


def _images(generation: GenerationRequest) -> int:
    return sum(source.kind == IMAGE for source in generation.media)


def _with_rows(prompt: ChatPrompt, media: tuple[MediaSource, ...], found: list[MediaEmbeds]) -> ChatPrompt:
    """Further rows of a video have places behind all others. Raises RequestError 400 where they do not go together."""
    embeds, videos = list(prompt.embeds), list[VideoParts]()
    for source, (rows, times, seconds) in zip(media, found, strict=True):
        embeds[source.number] = rows[0]
        if source.kind == VIDEO:
            parts = (source.number, *range(len(embeds), len(embeds) + len(rows) - 1))
            videos.append(VideoParts(parts, times, seconds))
            embeds += rows[1:]
    field, types = media[-1].field, sorted({each.dtype for each in embeds})
    own = found[0].rows[0]
    if len(types) > 1:
        raise invalid(field, f"images have rows of {own.dtype}; parts of type prompt_embeds with others are not")
    if len({each.size for each in embeds}) > 1:
        raise invalid(field, f"images of this model have rows of {own.size}; parts of type prompt_embeds do not")
    sizes = [sum(each.count * each.row_bytes for each in own.rows) for own in found]
    if sum(sizes) > MAX_MEDIA_BYTES:
        most = f"{MAX_MEDIA_BYTES} are; this {media[-1].kind.noun} alone has {sizes[-1]}"
        raise invalid(field, f"{sum(sizes)} bytes of images' and videos' rows are not allowed in one chat; {most}")
    return replace(prompt, embeds=tuple(embeds), videos=tuple(videos))
