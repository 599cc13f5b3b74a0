"""`/v1/chat/completions` and `/v1/completions`: from body to answer, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from services.gateway.answers.bodies import body
from services.gateway.answers.exchange import Exchange
from services.gateway.answers.frames import Frames
from services.gateway.answers.heading import Heading
from services.gateway.answers.outlets import Stream, Whole
from services.gateway.api.job import Job, Limits, StreamOptions
from services.gateway.desk import Desk
from services.gateway.http.call import Call
from services.gateway.http.connection import connection_of
from services.gateway.questions import PromptTold
from services.gateway.searching import Searching, open_searches
from shared.messages.lifecycle import ModelCard

log = logging.getLogger(__name__)

EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class StreamSettings(NamedTuple):
    keep_alive: float
    """Seconds of silence after which a comment shows that the connection lives."""
    unread_limit: int
    """Bytes that a client may leave unread before it is cut off."""
    read_timeout: float
    """Seconds that a client may take to read the end of an answer."""


class Generate:
    """Owns nothing; each call's state is in its exchange."""

    def __init__(
        self,
        desk: Desk,
        read: Callable[[bytes, list[ModelCard], Limits], Job],
        settings: StreamSettings,
        max_body: int,
    ) -> None:
        self._desk, self._read, self._settings, self._max_body = desk, read, settings, max_body

    async def __call__(self, call: Call) -> None:
        """Raises ApiError as long as no response was started."""
        desk = self._desk
        desk.admit(1)
        job = self._read(await call.body(self._max_body), desk.ring.models(), desk.limits)
        desk.admit(job.size)
        if job.beams is not None:
            await self._search(call, job)
            return
        told = await desk.questions.told(job)
        heading = desk.heading(job)
        _log_start(heading, job, call)
        if job.stream is None:
            await self._whole(call, job, heading, told)
        else:
            await self._stream(call, job, heading, told, job.stream)

    async def _search(self, call: Call, job: Job) -> None:
        """The best hypotheses of each prompt, as one body."""
        searches = await open_searches(self._desk.questions, job)
        heading = self._desk.heading(job)
        _log_start(heading, job, call)
        exchange = self._desk.begin(job, heading, Whole())
        async with self._attended(call, exchange):
            await Searching(self._desk, job, exchange, searches, call.trace).run()
            outcome = await exchange.ended
        if exchange.error is not None:
            raise exchange.error
        if outcome == "finished":
            await self._finish(call, call.respond(body(heading, exchange.choices, job.telling)))

    async def _whole(self, call: Call, job: Job, heading: Heading, told: list[PromptTold]) -> None:
        exchange = await self._desk.open(job, heading, Whole(), told, call.trace)
        async with self._attended(call, exchange):
            outcome = await exchange.ended
        if exchange.error is not None:
            raise exchange.error
        if outcome == "finished":
            answer = body(heading, exchange.choices, job.telling)
            await self._finish(call, call.respond(answer))

    async def _stream(
        self, call: Call, job: Job, heading: Heading, told: list[PromptTold], options: StreamOptions
    ) -> None:
        stream = Stream(
            Frames(heading, options, job.size, job.telling),
            connection_of(call.scope),
            include_usage=options.include_usage,
            keep_alive=self._settings.keep_alive,
            unread_limit=self._settings.unread_limit,
            now=time.monotonic(),
        )
        exchange = await self._desk.open(job, heading, stream, told, call.trace)
        exchange.ended.add_done_callback(lambda _: stream.wake())
        async with self._attended(call, exchange):
            await stream.first
            # Until something is there to be written, an error is still an error response.
            if started := stream.waiting:
                await call.start(200, EVENT_STREAM, STREAM_HEADERS)
                stream.start()
            outcome = await exchange.ended
        if not started and exchange.error is not None:
            raise exchange.error
        if outcome == "client too slow":
            connection_of(call.scope).abort()
        elif started:
            await self._finish(call, call.end())

    @asynccontextmanager
    async def _attended(self, call: Call, exchange: Exchange) -> AsyncIterator[None]:
        """While it lasts, a client that leaves ends the exchange; behind it the exchange is closed."""
        connection = connection_of(call.scope)
        try:
            connection.on_lost = exchange.client_left
            if connection.transport.is_closing():
                exchange.client_left()
            yield
        finally:
            connection.on_lost = None
            outcome = exchange.ended.result() if exchange.ended.done() else "client left"
            await self._desk.close(exchange, outcome)

    async def _finish(self, call: Call, writing: Awaitable[None]) -> None:
        """A client that does not read its answer's end is cut off."""
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                await writing
        except TimeoutError:
            connection_of(call.scope).abort()


def _log_start(heading: Heading, job: Job, call: Call) -> None:
    log.info(
        "request",
        extra={
            "request": heading.id,
            "client_request": call.given_id,
            "endpoint": heading.kind,
            "model": heading.model,
            "choices": job.size,
            "stream": job.stream is not None,
        },
    )
