"""The endpoints that generate: they answer with a stream, or with one body."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from services.gateway.api.encoding.lazy_json import LazyEncoder
from services.gateway.api.errors import RequestError, invalid, unsupported
from services.gateway.api.event_ids import EventId
from services.gateway.api.fields.stored_chat import ChatToStore
from services.gateway.api.generation import GenerationRequest, StreamOptions
from services.gateway.api.response import (
    ChoiceState,
    GenerationResponse,
    ResponseHeader,
    ResponseWriter,
    prompt_tokens,
    response_body,
)
from services.gateway.beam_search import BeamSearchRunner, PromptSearch, open_searches
from services.gateway.conversations.chat_store import ChatStore
from services.gateway.core.api_keys import ANONYMOUS
from services.gateway.core.stream_records import StreamRecord
from services.gateway.database.records import DatabaseUnavailable
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyKind, BodyParser
from services.gateway.http.call import Call
from services.gateway.http.overflow import Overflow
from services.gateway.http.resumable import ResumableWriter
from services.gateway.http.streaming import EventWriter, SseFrames, StoredStreamWriter, StreamWriter
from services.gateway.images.encoder_prompts import read_by_encoder
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from services.gateway.tokenizer_client import PromptDetails
from shared.messages.gateway import StreamOpening

log = logging.getLogger(__name__)

EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
FREED_AT_ONCE = 4096
"""Positions of an echoed prompt: 5 ms where each has five tokens."""


class StreamSettings(NamedTuple):
    """Limits of sending a response."""

    keep_alive: float
    """Seconds without an event after which a comment shows that the connection lives."""
    unread_limit: int
    """Bytes that a client may leave unread before its connection is aborted."""
    read_timeout: float
    """Seconds that a client may take to read the end of a response."""


def new_header(
    generation: GenerationRequest, prefix: str, *, identity: str = "", created: float | None = None
) -> ResponseHeader:
    """Returns what an answer begins with. Its id is `prefix` and what the client called the request, or else a number.
    `identity`, `created`: those of an answer that has them already."""
    own = generation.request_id
    return ResponseHeader(
        generation.kind,
        identity or f"{prefix}-{secrets.token_hex(12)}",
        int(time.time() if created is None else created),
        generation.served_name,
        shown_id="" if own is None else f"{prefix}-{own}",
    )


class GeneratingEndpoint:
    """What the endpoints of all APIs share: admission, and the cleanup when the client leaves. The state of each call
    is in its `GenerationResponse`."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
    ) -> None:
        self._table, self._parser, self._access = table, parser, access
        self._streams, self._settings = streams, settings

    async def _read(self, call: Call, kind: BodyKind) -> Any:
        """What the body asks for. Raises RequestError."""
        with self._table.arriving():
            return await self._parser.read(kind, await call.body())

    async def _filled(
        self, call: Call, generation: GenerationRequest, *, releases_body: bool = True
    ) -> GenerationRequest:
        """The request with rows in place of its media. Unless `releases_body` is false, the body, which may be large,
        is then freed, as nobody needs it while the answer is made. Raises RequestError."""
        if not generation.media:
            return generation
        filled = await self._table.images.filled(generation)
        if releases_body:
            call.release_body()
        return filled

    def _admitted(self, call: Call, generation: GenerationRequest) -> GenerationRequest:
        """The request within the limits of its API key. Reserves room for it. Raises RequestError."""
        table = self._table
        call.record.model = generation.served_name
        if generation.model.encoder_decoder is not None and generation.kind != "completion":
            raise invalid("model", "it is an encoder with a decoder, which answers prompts of /v1/completions alone")
        generation = replace(self._access.bound(generation, call.key), trace=call.trace)
        table.admit(generation.sequences, generation.model.name)
        self._access.reserve(call, generation, table.free)
        return generation

    def _log(
        self, call: Call, generation: GenerationRequest, header: ResponseHeader, last: EventId | None = None
    ) -> None:
        call.name_request(header.id)
        extra = {
            "request": header.id,
            "client_request": call.client_id,
            "endpoint": header.kind,
            "model": header.model,
            "choices": generation.sequences,
            "stream": generation.stream is not None,
        }
        log.info("request", extra=extra if last is None else {**extra, "resumed_after": str(last)})

    @asynccontextmanager
    async def _open_for(
        self, call: Call, response: GenerationResponse, record: StreamRecord | None = None
    ) -> AsyncIterator[None]:
        """Ends the response if the client leaves meanwhile, and closes it at the end. With a `record`, generating goes
        on without the client, who can resume the stream if it has received any of it."""
        connection = call.connection
        billed, resumed = 0, False
        try:
            if record is not None:
                billed, resumed, record.begun = record.billed, record.begun, True
                record.readers += 1
            connection.on_lost = lambda: response.end("client left")
            if connection.is_closing():
                response.end("client left")
            yield
        finally:
            connection.on_lost = None
            outcome = response.ended.result() if response.ended.done() else "client left"
            if record is None:
                await self._table.close(response, outcome)
            else:
                known = resumed or call.record.status is not None
                await self._streams.leave(record, response, outcome, known_to_client=known)
            tokens = sum(choice.tokens for choice in response.choices)
            if outcome == "finished" and call.key is not ANONYMOUS and not resumed:
                response.observe_for(self._table.meters.of_key(call.key.name), time.monotonic())
            call.record.outcome = outcome
            call.record.prompt_tokens = 0 if resumed else prompt_tokens(response.choices)
            call.record.output_tokens = max(0, tokens - billed)
            if record is not None:
                record.billed = max(tokens, billed)

    async def _whole(self, call: Call, response: GenerationResponse) -> bool:
        """Waits for the end of a response. Returns whether there is something to answer with. Raises the response's
        error."""
        async with self._open_for(call, response):
            outcome = await response.ended
        if response.error is not None:
            raise response.error
        return outcome == "finished"

    async def _whole_and_kept(
        self, call: Call, generation: GenerationRequest, response: GenerationResponse
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `_whole`, with the `kv_transfer_params` of a prompt that an engine was to keep. They are only known while
        the response is open."""
        async with self._open_for(call, response):
            outcome, transfer = await response.ended, None
            if outcome == "finished" and generation.kv_transfer.keep:
                transfer = await response.kv_transfer_params()
        if response.error is not None:
            raise response.error
        return outcome == "finished", transfer

    async def _streamed(
        self,
        call: Call,
        response: GenerationResponse,
        writer: EventWriter,
        content_type: bytes = EVENT_STREAM,
        ending: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Responds with the events of `writer`. `ending`: waits for something, and then has the writer write the last
        events. Raises the response's error as long as nothing was sent."""
        response.ended.add_done_callback(lambda _: writer.wake())
        async with self._open_for(call, response):
            await writer.first
            if started := writer.waiting:
                await call.start(200, content_type, STREAM_HEADERS)
                writer.start()
            outcome = await response.ended
        if not started and response.error is not None:
            raise response.error
        if outcome == "finished" and ending is not None:
            if not started:
                await call.start(200, content_type, STREAM_HEADERS)
                writer.start()
            started = True
            await ending()
        if outcome == "client too slow":
            call.connection.abort()
        elif started:
            await self._finish(call, call.end())

    async def _answer(self, call: Call, value: Any) -> None:
        """Responds with a whole answer as JSON. Lazy arrays in it are encoded piece by piece, so that other calls get
        their turns."""
        await self._finish(call, call.respond(await LazyEncoder().encode(value)))

    async def _finish(self, call: Call, writing: Awaitable[None]) -> None:
        """Aborts the connection of a client that does not read the response's end."""
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                await writing
        except TimeoutError:
            call.connection.abort()


class GenerationEndpoint(GeneratingEndpoint):
    """Answers `/v1/chat/completions` or `/v1/completions`."""

    def __init__(
        self,
        table: RequestTable,
        kind: Literal["chat", "completion"],
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
        overflow: Overflow | None = None,
        chats: ChatStore | None = None,
    ) -> None:
        """`overflow`: answers what cannot be served here in time. `chats`: None: nothing is stored."""
        super().__init__(table, parser, access, streams, settings)
        self._kind, self._overflow, self._chats = kind, overflow, chats
        self._prefix = "chatcmpl" if kind == "chat" else "cmpl"

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        if last := call.headers.get(b"last-event-id"):
            await self._resume(call, EventId.read(last))
            return
        try:
            await self._generate(call)
        except RequestError as error:
            if self._overflow is None or not await self._overflow.in_place_of(call, self._kind, error):
                raise
            error.__traceback__ = None  # see Endpoint

    async def _generate(self, call: Call) -> None:
        table = self._table
        asked: GenerationRequest = await self._read(call, self._kind)
        if asked.stored is not None and self._chats is None:
            raise unsupported("store", "true where nothing is stored")
        generation = self._admitted(call, asked)
        if self._overflow is not None and await self._overflow.ahead_of(call, self._kind, generation):
            return
        resumable = generation.stream is not None and generation.stream.resumable
        kept = self._overflow is not None or resumable or generation.stored is not None
        generation = await self._filled(call, generation, releases_body=not kept)
        searches, details = None, list[PromptDetails]()
        if generation.beam_search is not None:
            searches = await call.unless_left(open_searches(table.tokenizer, generation))
        else:
            details = await call.unless_left(table.tokenizer.prompt_details(generation))
            generation = await call.unless_left(read_by_encoder(table.images, table.tokenizer, generation))
        response_id, arrival = f"{self._prefix}-{secrets.token_hex(12)}", time.time()
        header = new_header(generation, self._prefix, identity=response_id, created=arrival)
        self._log(call, generation, header)
        if generation.stream is None:
            await self._respond(call, generation, header, details, searches)
        elif generation.stream.resumable:
            opening = StreamOpening(
                stream=response_id,
                key=call.key.name,
                kind=self._kind,
                body=await call.body(),
                choices=generation.sequences,
                seed=secrets.randbits(63),
                arrival=arrival,
            )
            record = await self._streams.open(opening)
            nothing = EventId(response_id, (None,) * generation.sequences)
            await self._stream(call, generation, header, details, generation.stream, record, nothing)
        else:
            await self._stream(call, generation, header, details, generation.stream)

    async def _resume(self, call: Call, last: EventId) -> None:
        """Responds with the rest of a stream that began on another connection. Raises RequestError."""
        table = self._table
        with table.arriving():
            await call.body()  # clients may send their request again; what counts is the one that began the stream
            if not last.stream.startswith(f"{self._prefix}-"):
                raise invalid("Last-Event-ID", f"{last.stream} is the id of a stream of the other endpoint")
            record = await self._streams.take(last.stream, call.key.name)
            opening = record.opening
            if len(last.choices) != opening.choices:
                raise invalid("Last-Event-ID", f"{len(last.choices)} choices; the stream has {opening.choices}")
            generation: GenerationRequest = await self._parser.read(opening.kind, opening.body)
        call.record.model = generation.served_name
        generation = self._access.bound(generation, call.key)
        self._access.reserve(call, generation, table.free)
        generation = await table.images.filled(generation)
        details = await call.unless_left(table.tokenizer.prompt_details(generation))
        generation = await call.unless_left(read_by_encoder(table.images, table.tokenizer, generation))
        header = new_header(generation, self._prefix, identity=opening.stream, created=opening.arrival)
        self._log(call, generation, header, last)
        assert generation.stream is not None
        await self._stream(call, generation, header, details, generation.stream, record, last)

    async def _respond(
        self,
        call: Call,
        generation: GenerationRequest,
        header: ResponseHeader,
        details: list[PromptDetails],
        searches: list[PromptSearch] | None,
    ) -> None:
        """Responds with one body at the end."""
        if searches is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
        else:
            response = self._table.open_empty(generation, header, ResponseWriter())
        async with freed_in_turns(response.choices):
            async with self._open_for(call, response):
                answer = None
                if searches is not None:
                    await BeamSearchRunner(self._table, generation, response, searches).run()
                elif self._overflow is not None and (answer := await self._overflow.beside(call, self._kind, response)):
                    response.end("overflowed")
                outcome, transfer = await response.ended, None
                if outcome == "finished" and generation.kv_transfer.keep:
                    transfer = await response.kv_transfer_params()
            if answer is not None and self._overflow is not None:
                await self._overflow.relay(call, answer)
            elif response.error is not None:
                raise response.error
            elif outcome == "finished":
                body = response_body(
                    header, response.choices, generation.response_options, response.started_at, transfer
                )
                answer_body = await LazyEncoder().encode(body)
                await call.hold_answer(len(answer_body))
                if generation.stored is not None and not await self._store(
                    call, generation.stored, header, answer_body
                ):
                    answer_body = answer_body[:-1] + b',"store":false}'
                await self._finish(call, call.respond(answer_body))

    async def _store(self, call: Call, asked: ChatToStore, header: ResponseHeader, answer: bytes) -> bool:
        """Stores a chat. Returns whether the database has taken it."""
        assert self._chats is not None, "looked at before it was generated"
        try:
            await self._chats.insert(header.id, call.key.name, header.model, asked, answer)
        except DatabaseUnavailable as error:
            log.warning("a chat was not stored", extra={"request": header.id, "error": str(error)})
            return False
        return True

    async def _stream(
        self,
        call: Call,
        generation: GenerationRequest,
        header: ResponseHeader,
        details: list[PromptDetails],
        options: StreamOptions,
        record: StreamRecord | None = None,
        last: EventId | None = None,
    ) -> None:
        """Responds with events as tokens arrive. `record`: of a resumable stream, whose client has everything up to the
        event `last`."""
        plain = StreamWriter if generation.stored is None else StoredStreamWriter
        writer = (plain if last is None else partial(ResumableWriter, last=last))(
            SseFrames(header, options, generation.sequences, generation.response_options),
            call.connection,
            include_usage=options.include_usage,
            keep_alive=self._settings.keep_alive,
            unread_limit=self._settings.unread_limit,
            now=time.monotonic(),
        )
        response = await self._table.open(generation, header, writer, details, record=record)
        response.ended.add_done_callback(lambda _: writer.wake())
        async with freed_in_turns(response.choices if record is None else []):
            async with self._open_for(call, response, record):
                answer = None
                if self._overflow is not None and record is None:
                    answer = await self._overflow.beside(call, self._kind, response)
                if answer is not None:
                    response.end("overflowed")
                await writer.first
                # Until there is something to write, an error is still an error response.
                if started := writer.waiting and answer is None:
                    await call.start(200, EVENT_STREAM, STREAM_HEADERS)
                    writer.start()
                outcome = await response.ended
            if answer is not None and self._overflow is not None:
                await self._overflow.relay(call, answer)
            elif not started and response.error is not None:
                raise response.error
            elif outcome in ("client too slow", "taken over"):
                call.connection.abort()
            elif started:
                if generation.stored is not None and isinstance(writer, StoredStreamWriter) and outcome == "finished":
                    body = response_body(header, response.choices, generation.response_options, response.started_at)
                    await self._store(call, generation.stored, header, await LazyEncoder().encode(body))
                    writer.end(response.choices)
                await self._finish(call, call.end())


@asynccontextmanager
async def freed_in_turns(choices: Sequence[ChoiceState]) -> AsyncIterator[None]:
    """At the end frees what was said of echoed prompts: of a million tokens at once that takes up to a second, in which
    nobody else has a turn."""
    try:
        yield
    finally:
        for choice in choices:
            echo = choice.encoded_echo
            for said in (choice.prompt_logprobs, [] if echo is None else echo.entries):
                while said:
                    del said[-FREED_AT_ONCE:]
                    await asyncio.sleep(0)
