"""Gets the rows of a request's images from an encoder, however often one of these dies meanwhile."""

from __future__ import annotations

import asyncio
import secrets

from msgspec.structs import replace

from services.gateway.api.errors import STATUS, RequestError, invalid
from services.gateway.api.generation import GenerationRequest, ImageSource
from services.gateway.images.image_fetcher import ImageFetcher
from services.gateway.images.open_rows import OpenRows
from shared import topics
from shared.bus import Bus, NoResponders, PayloadTooLarge, ReplyError, ReplyTimeout
from shared.ids import ModelName
from shared.messages.encoder import EncodeImage, EncoderReply, ImageRefusal
from shared.messages.generation import MAX_MEDIA_BYTES, PromptEmbeds
from shared.messages.tokenizer import ChatPrompt

ENCODE_TIMEOUT = 120.0
"""Seconds that the rows of an image may take: a new encoder has started by then."""
REPLY_TIMEOUT = 5.0
"""Seconds after which an encoder is asked again: the one that was may have died. Who encodes the image already, and
lives, encodes it once."""
RETRY_INTERVAL = 0.25
MAX_AT_ONCE = 4
"""Images of one request that are on their way at the same time."""


class ImageRowsClient:
    """Fills in where the rows of images are, before a request is dispatched."""

    def __init__(self, bus: Bus, fetcher: ImageFetcher) -> None:
        self._bus, self._fetcher = bus, fetcher
        self.open_rows = OpenRows(bus, self.encoded)
        """Of requests that were filled, what they still need."""

    async def filled(self, generation: GenerationRequest) -> GenerationRequest:
        """The request with rows in place of its images. Raises RequestError: 400 for an image that is none or cannot be
        fetched, 413 for one too large for the bus, 503 where no encoder answers."""
        if not generation.images:
            return generation
        slots, turn = asyncio.Semaphore(MAX_AT_ONCE), generation.key or secrets.token_hex(8)
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._outcome(each, generation, slots, turn)) for each in generation.images]
        found: list[PromptEmbeds] = []
        for task in started:
            if isinstance(outcome := task.result(), RequestError):
                raise outcome
            found.append(outcome)
        (prompt,) = generation.prompts
        assert isinstance(prompt, ChatPrompt), "only chats have images"
        return replace(generation, prompts=(_with_rows(prompt, generation.images, found),), images=())

    async def _outcome(
        self, image: ImageSource, generation: GenerationRequest, slots: asyncio.Semaphore, turn: str
    ) -> PromptEmbeds | RequestError:
        """An error is returned, so that which of several is raised depends on no clock."""
        try:
            async with slots:
                file = image.data if image.url is None else await self._fetcher.fetch(image.url, image.field)
                question, model = EncodeImage(file, generation.cache_salt, turn), generation.model.name
                rows = await self.encoded(image.field, question, model)
                self.open_rows.add(rows, question, model)
                return rows
        except RequestError as error:
            return error

    async def encoded(self, field: str, question: EncodeImage, model: ModelName) -> PromptEmbeds:
        """What stands for the rows of an image, which are kept from now on. Raises RequestError, see `filled`."""
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
            if isinstance(reply, ImageRefusal):
                again = 1.0 if reply.kind == "overloaded" else None
                raise RequestError(STATUS[reply.kind], f"{field}: {reply.message}", param=field, retry_after=again)
            return reply.rows
        raise RequestError(503, f"no encoder answered ({last})", retry_after=1.0)


def _with_rows(prompt: ChatPrompt, images: tuple[ImageSource, ...], found: list[PromptEmbeds]) -> ChatPrompt:
    """Raises RequestError 400 where they do not go together."""
    embeds = list(prompt.embeds)
    for image, rows in zip(images, found, strict=True):
        embeds[image.number] = rows
    field, types = images[-1].field, sorted({each.dtype for each in embeds})
    if len(types) > 1:
        raise invalid(field, f"images have rows of {found[0].dtype}; parts of type prompt_embeds with others are not")
    if len({each.size for each in embeds}) > 1:
        raise invalid(field, f"images of this model have rows of {found[0].size}; parts of type prompt_embeds do not")
    total = sum(each.count * each.row_bytes for each in found)
    if total > MAX_MEDIA_BYTES:
        most = f"{MAX_MEDIA_BYTES} are; this image alone has {found[-1].count * found[-1].row_bytes}"
        raise invalid(field, f"{total} bytes of images' rows are not allowed in one chat; {most}")
    return replace(prompt, embeds=tuple(embeds))
