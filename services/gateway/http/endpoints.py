"""What answers each route: generation, streamed or as one body, and everything else; API keys and errors of all.

Endpoints are plain ASGI: Starlette only routes to them, and nothing of it lies between a token and its socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import RequestError, abbreviated, invalid
from services.gateway.api.event_ids import EventId
from services.gateway.api.generation import GenerationRequest, StreamOptions
from services.gateway.api.openapi import openapi_page
from services.gateway.api.response import (
    GenerationResponse,
    ResponseHeader,
    ResponseWriter,
    prompt_tokens,
    response_body,
)
from services.gateway.beam_search import BeamSearchRunner, PromptSearch, open_searches
from services.gateway.core.api_keys import KeyScope
from services.gateway.core.stream_records import StreamRecord
from services.gateway.http.access import AccessControl, check_model
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import BodyLimits, Call
from services.gateway.http.overflow import Overflow
from services.gateway.http.resumable import ResumableWriter
from services.gateway.http.streaming import SseFrames, StreamWriter
from services.gateway.metrics import MergedPages
from services.gateway.overflow_provider import OverflowProvider
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from services.gateway.tokenizer_client import PromptDetails
from shared.ids import ModelName
from shared.messages.gateway import StreamOpening
from shared.messages.lifecycle import LoraCard, ModelCard
from shared.messages.tokenizer import DecodeReply, EncodeReply
from shared.packing import unpack

log = logging.getLogger(__name__)

EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
VERSION = version("baton-serve")


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """One route as an ASGI application. An `RequestError` becomes an error response. A bug is logged and becomes a
    500, as one client's request must not end the streams of all others."""

    def __init__(
        self, handler: Handler, path: str, scope: KeyScope | None, access: AccessControl, limits: BodyLimits
    ) -> None:
        """`path`: the route's, for audit lines. `scope`: what a client's key must allow; None: everybody may call it,
        and there are no audit lines."""
        self._handler, self._path, self._scope = handler, path, scope
        self._access, self._limits = access, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, as ASGI defines it."""
        call, began = Call(scope, receive, send, self._limits), time.monotonic()
        try:
            if self._scope is not None:
                self._access.admit(call, self._scope)
            await self._handler(call)
        except RequestError as error:
            await call.refuse(error)
        finally:
            call.close()
            if self._scope is not None:
                self._access.finish(call, self._path, began)


class StreamSettings(NamedTuple):
    """Limits of sending a response."""

    keep_alive: float
    """Seconds without an event after which a comment shows that the connection lives."""
    unread_limit: int
    """Bytes that a client may leave unread before its connection is aborted."""
    read_timeout: float
    """Seconds that a client may take to read the end of a response."""


class GenerationEndpoint:
    """Answers `/v1/chat/completions` or `/v1/completions`. Each call's state is in its `GenerationResponse`."""

    def __init__(
        self,
        table: RequestTable,
        kind: Literal["chat", "completion"],
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
        overflow: Overflow | None = None,
    ) -> None:
        """`overflow`: answers what cannot be served here in time."""
        self._table, self._kind, self._parser, self._settings = table, kind, parser, settings
        self._access, self._streams, self._overflow = access, streams, overflow
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

    async def _generate(self, call: Call) -> None:
        table = self._table
        with table.arriving():
            body = await call.body()
            generation: GenerationRequest = await self._parser.read(self._kind, body)
        call.record.model = generation.served_name
        generation = self._access.bound(generation, call.key)
        table.admit(generation.sequences, generation.model.name)
        self._access.reserve(call, generation, table.free)
        if self._overflow is not None and await self._overflow.ahead_of(call, self._kind, generation):
            return
        searches, details = None, list[PromptDetails]()
        if generation.beam_search is not None:
            searches = await open_searches(table.tokenizer, generation)
        else:
            details = await table.tokenizer.prompt_details(generation)
        response_id, arrival = f"{self._prefix}-{secrets.token_hex(12)}", time.time()
        header = ResponseHeader(generation.kind, response_id, int(arrival), generation.served_name)
        self._log(call, generation, header)
        if generation.stream is None:
            await self._respond(call, generation, header, details, searches)
        elif generation.stream.resumable:
            opening = StreamOpening(
                stream=response_id,
                key=call.key.name,
                kind=self._kind,
                body=body,
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
        details = await table.tokenizer.prompt_details(generation)
        header = ResponseHeader(generation.kind, opening.stream, int(opening.arrival), generation.served_name)
        self._log(call, generation, header, last)
        assert generation.stream is not None
        await self._stream(call, generation, header, details, generation.stream, record, last)

    def _log(
        self, call: Call, generation: GenerationRequest, header: ResponseHeader, last: EventId | None = None
    ) -> None:
        call.record.request = header.id
        extra = {
            "request": header.id,
            "client_request": call.client_id,
            "endpoint": header.kind,
            "model": header.model,
            "choices": generation.sequences,
            "stream": generation.stream is not None,
        }
        log.info("request", extra=extra if last is None else {**extra, "resumed_after": str(last)})

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
        async with self._open_for(call, response):
            answer = None
            if searches is not None:
                await BeamSearchRunner(self._table, generation, response, searches).run()
            elif self._overflow is not None and (answer := await self._overflow.beside(call, self._kind, response)):
                response.end("overflowed")
            outcome = await response.ended
        if answer is not None and self._overflow is not None:
            await self._overflow.relay(call, answer)
        elif response.error is not None:
            raise response.error
        elif outcome == "finished":
            body = response_body(header, response.choices, generation.response_options)
            await self._finish(call, call.respond(body))

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
        writer = (StreamWriter if last is None else partial(ResumableWriter, last=last))(
            SseFrames(header, options, generation.sequences, generation.response_options),
            call.connection,
            include_usage=options.include_usage,
            keep_alive=self._settings.keep_alive,
            unread_limit=self._settings.unread_limit,
            now=time.monotonic(),
        )
        response = await self._table.open(generation, header, writer, details, record=record)
        response.ended.add_done_callback(lambda _: writer.wake())
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
            await self._finish(call, call.end())

    @asynccontextmanager
    async def _open_for(
        self, call: Call, response: GenerationResponse, record: StreamRecord | None = None
    ) -> AsyncIterator[None]:
        """Ends the response when the client leaves meanwhile; closes it at the end. With a `record` generating goes on
        without the client, which can resume the stream once it has read of it."""
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
            call.record.outcome = outcome
            call.record.prompt_tokens = 0 if resumed else prompt_tokens(response.choices)
            call.record.output_tokens = max(0, tokens - billed)
            if record is not None:
                record.billed = max(tokens, billed)

    async def _finish(self, call: Call, writing: Awaitable[None]) -> None:
        """Aborts the connection of a client that does not read the response's end."""
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                await writing
        except TimeoutError:
            call.connection.abort()


class InfoEndpoints:
    """Answers everything but generation: models, tokens, health, metrics, version."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        peers: GatewayPeers,
        provider: OverflowProvider | None = None,
    ) -> None:
        """`provider`: what answers requests that cannot be served here."""
        self._table, self._parser, self._access, self._peers = table, parser, access, peers
        self._provider = provider

    async def live(self, call: Call) -> None:
        """`/live`: 200 as long as the process answers at all."""
        await call.respond_json({"status": "alive"})

    async def health(self, call: Call) -> None:
        """`/health`: 503 with the reason while new requests are refused as nobody can serve them, otherwise 200."""
        await self._respond_status(call, self._table.not_serving())

    async def ready(self, call: Call) -> None:
        """`/ready`: 503 with the reason while new requests are refused, otherwise 200; so while the overflow provider
        answers them."""
        reason = self._table.not_serving() if self._table.accepting else "this gateway is draining"
        if reason is not None and self._table.accepting and self._provider is not None and self._provider.usable:
            await call.respond_json({"status": "ok", "served_by": "overflow", "reason": reason})
            return
        await self._respond_status(call, reason)

    async def _respond_status(self, call: Call, reason: str | None) -> None:
        if reason is None:
            await call.respond_json({"status": "ok"})
        else:
            await call.respond_json({"status": "unavailable", "reason": reason}, 503, [(b"retry-after", b"1")])

    async def metrics(self, call: Call) -> None:
        """`/metrics`: of all gateways that share the port, in Prometheus' text format."""
        page = MergedPages(await self._peers.metrics_pages())
        await call.respond(page.text(), content_type=CONTENT_TYPE_LATEST.encode())

    async def version(self, call: Call) -> None:
        """`/version`: of the installed package."""
        await call.respond_json({"version": VERSION})

    async def keys(self, call: Call) -> None:
        """`/admin/keys`: the keys by name, and what each may do."""
        await call.respond_json(self._access.keys())

    async def openapi(self, call: Call) -> None:
        """`/openapi.json`: the description of this API."""
        await call.respond(openapi_page(VERSION))

    async def models(self, call: Call) -> None:
        """`/v1/models`: all models that are served and that the client may use."""
        cards = self._table.cluster.models()
        bodies = [
            body for card in cards for body in (_model_body(card), *(_lora_body(card, each) for each in card.loras))
        ]
        data = [body for body in bodies if call.key.allows_model(body["id"])]
        await call.respond_json({"object": "list", "data": data})

    async def model(self, call: Call) -> None:
        """`/v1/models/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        cards = self._table.cluster.models()
        found = [_model_body(card) for card in cards if card.name == name]
        found += [_lora_body(card, each) for card in cards for each in card.loras if each.name == name]
        if not found or not call.key.allows_model(ModelName(name)):
            message = f"The model `{abbreviated(name)[1:-1]}` does not exist."
            raise RequestError(404, message, param="model", code="model_not_found")
        await call.respond_json(found[0])

    async def tokenize(self, call: Call) -> None:
        """`/tokenize`: the token ids of a text or of messages. Raises RequestError."""
        table = self._table
        with table.arriving():
            card, question = await self._parser.read("tokenize", await call.body())
        call.record.model = card.name
        check_model(card.name, call.key)
        encoded = await table.tokenizer.ask(card, question, EncodeReply)
        tokens = unpack(encoded.tokens)
        await call.respond_json(
            {
                "count": len(tokens),
                "max_model_len": card.max_model_len,
                "tokens": tokens,
                "token_strs": encoded.strings,
            }
        )

    async def detokenize(self, call: Call) -> None:
        """`/detokenize`: the text of token ids. Raises RequestError."""
        with self._table.arriving():
            card, question = await self._parser.read("detokenize", await call.body())
        call.record.model = card.name
        check_model(card.name, call.key)
        decoded = await self._table.tokenizer.ask(card, question, DecodeReply)
        await call.respond_json({"prompt": decoded.text})


def _model_body(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _lora_body(card: ModelCard, lora: LoraCard) -> dict[str, Any]:
    """As vLLM shows an adapter: its parent is the model that it belongs to."""
    return {**_model_body(card), "id": lora.name, "root": lora.name, "parent": card.name}
