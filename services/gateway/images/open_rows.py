"""Keeps the rows of open requests where they are, and has them made again where they are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import ModelName, RequestId, RowsName
from shared.media.rows_reader import RowsLost, RowsReleased, read_rows
from shared.messages.encoder import ROWS_LEASE, EncodeInput, RenewRows
from shared.messages.generation import MAX_PROMPT_EMBEDS_BYTES, PromptEmbeds
from shared.messages.tokenizer import Tokenize, embeds_of, kept_rows, rows_bytes, with_embeds

log = logging.getLogger(__name__)

RENEW_INTERVAL = 20.0
"""Seconds: a message may be lost, and a few of them fit a lease."""
MAX_FILES_BYTES = 256 * 2**20
"""Of the images of open requests; beyond, those of the oldest cannot be encoded again, should their rows be lost."""
FIELD = "messages"


class _ImageFile(NamedTuple):
    question: EncodeInput
    model: ModelName
    since: float


class OpenRows:
    """Owns the files of images of open requests, for as long as somebody might want their rows again."""

    def __init__(self, bus: Bus, encode: Callable[[str, EncodeInput, ModelName], Awaitable[PromptEmbeds]]) -> None:
        """`encode`: has an image encoded; it raises RequestError."""
        self._bus, self._encode = bus, encode
        self._files: OrderedDict[RowsName, _ImageFile] = OrderedDict()
        self._bytes = 0
        self._renewed_at = time.monotonic()
        self._lost: set[RequestId] = set()
        """Requests whose rows are lost, until their next attempt."""
        self._to_remake: asyncio.Queue[tuple[Tokenize, Callable[[Tokenize], Awaitable[None]]]] = asyncio.Queue()

    def add(self, rows: PromptEmbeds, question: EncodeInput, model: ModelName) -> None:
        """An image whose rows a request has that will be open."""
        for each in rows.kept:
            self._remove(each.name)
            self._files[each.name] = _ImageFile(question, model, time.monotonic())
            self._bytes += len(question.content)
        while self._bytes > MAX_FILES_BYTES and self._files:
            self._remove(next(iter(self._files)))

    async def renew(self, open_requests: Iterable[Tokenize]) -> None:
        """Says which rows these need, now and then; forgets the files of others."""
        now = time.monotonic()
        if not self._files or now - self._renewed_at < RENEW_INTERVAL:
            return
        self._renewed_at = now
        needed: defaultdict[ModelName, set[RowsName]] = defaultdict(set)
        for tokenize in open_requests:
            needed[tokenize.model].update(each.name for each in kept_rows(tokenize.prompt))
        for model, names in needed.items():
            if names:
                await self._bus.publish(topics.rows_leases(model), RenewRows(tuple(sorted(names))))
        wanted = set[RowsName]().union(*needed.values())
        for name in [n for n, file in self._files.items() if n not in wanted and now - file.since > ROWS_LEASE]:
            self._remove(name)

    def record_lost(self, request: RequestId) -> None:
        """An engine found the rows of a request nowhere; its failure follows."""
        self._lost.add(request)

    def remake(self, tokenize: Tokenize, dispatch: Callable[[Tokenize], Awaitable[None]]) -> bool:
        """Whether the rows of a request have to be made again before it is dispatched, which is then done later."""
        if tokenize.request not in self._lost:
            return False
        self._lost.discard(tokenize.request)
        self._to_remake.put_nowait((tokenize, dispatch))
        return True

    async def run(self) -> None:
        """Has lost rows made again, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._remake(*await self._to_remake.get()))

    async def _remake(self, tokenize: Tokenize, dispatch: Callable[[Tokenize], Awaitable[None]]) -> None:
        """Dispatches it as it was where that cannot be: it fails again, and its attempts are counted."""
        try:
            embeds = [await self._again(each) for each in embeds_of(tokenize.prompt)]
            tokenize = replace(tokenize, prompt=with_embeds(tokenize.prompt, tuple(embeds)))
        except RequestError as error:
            log.warning("rows not made again", extra={"request": tokenize.request, "reason": error.message})
        await dispatch(tokenize)

    async def _again(self, embeds: PromptEmbeds) -> PromptEmbeds:
        """Raises RequestError."""
        file = self._files.get(embeds.kept[0].name) if embeds.kept else None
        if file is None:
            return embeds
        made = await self._encode(FIELD, file.question, file.model)
        self.add(made, file.question, file.model)
        return made

    async def with_rows(self, tokenize: Tokenize) -> Tokenize | None:
        """The request as another cluster can take it, with its rows; None where that is too much, or they are lost."""
        if not kept_rows(tokenize.prompt):
            return tokenize
        if rows_bytes(tokenize.prompt) > MAX_PROMPT_EMBEDS_BYTES:
            return None
        try:
            embeds = [await self._read(each) for each in embeds_of(tokenize.prompt)]
        except (RowsLost, RowsReleased, BusError) as error:
            log.warning("rows not read", extra={"request": tokenize.request, "reason": str(error)})
            return None
        return replace(tokenize, prompt=with_embeds(tokenize.prompt, tuple(embeds)))

    async def _read(self, embeds: PromptEmbeds) -> PromptEmbeds:
        if not embeds.kept:
            return embeds
        (kept,) = embeds.kept
        rows = await read_rows(self._bus, topics.kept_rows(kept.owner), kept.name, kept.count * embeds.row_bytes)
        return replace(embeds, rows=bytes(rows), media=())

    def _remove(self, name: RowsName) -> None:
        if (file := self._files.pop(name, None)) is not None:
            self._bytes -= len(file.question.content)
