"""`/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from msgspec.structs import replace

from services.gateway.api.errors import RequestError, invalid, unsupported
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.api.responses.events import ResponseEvents
from services.gateway.api.responses.request import ResponseRequest, continuation
from services.gateway.conversations.conversation_store import MAX_BYTES
from services.gateway.http.access import AccessControl
from services.gateway.http.apis.background import BackgroundResponses
from services.gateway.http.apis.stored.responses import follow_events
from services.gateway.http.body_parser import BodyKind, BodyParser
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings
from services.gateway.http.streaming import EventWriter, event_frame
from services.gateway.request_table import RequestTable
from services.gateway.response_store import StoredResponse
from services.gateway.resumable_streams import ResumableStreams
from shared.messages.gateway import Delta


class ItemCollector(ResponseWriter):
    """Collects a response that is not streamed."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        self._events.output(choice, delta)
        return True


class ItemWriter(EventWriter):
    """Writes a response as a stream of numbered events."""

    def __init__(
        self, events: ResponseEvents, connection: ClientConnection, *, keep_alive: float, unread_limit: int, now: float
    ) -> None:
        super().__init__(connection, keep_alive=keep_alive, unread_limit=unread_limit, now=now)
        self._events = events

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """Writes new output. Returns False where the client reads too slowly."""
        if events := self._events.output(choice, delta):
            self._write_events(events)
            self._written_at = now
        return self._connection.unread() <= self._unread_limit

    def complete(self, choices: list[ChoiceState]) -> None:
        """Leaves the last event to `end`."""

    def end(self, response: dict[str, Any]) -> None:
        """Writes the event with the whole response."""
        self._write_events(self._events.end(response))

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the event with the failed response."""
        return b"".join(map(event_frame, self._events.end(self._events.failed(error))))

    def _write_events(self, events: list[dict[str, Any]]) -> None:
        self._write(b"".join(map(event_frame, events)))


class ResponsesEndpoint(GeneratingEndpoint):
    """Answers `/v1/responses`."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
        background: BackgroundResponses | None,
    ) -> None:
        """`background`: None: nothing is stored."""
        super().__init__(table, parser, access, streams, settings)
        self._background = background
        self._store = None if background is None else background.store

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        asked, body = await self._ask(call)
        generation = self._admitted(call, asked.generation)
        generation = await self._table.images.filled(generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        own = generation.request_id or ""
        header = ResponseHeader("responses", asked.identity, int(time.time()), generation.served_name, shown_id=own)
        self._log(call, generation, header)
        if self._background is not None and asked.background:
            queued = await self._background.start(call, body, asked, generation, header)
            if generation.stream is None:
                await call.respond_json(queued)
            else:
                await follow_events(call, self._background.store, header.id, -1, self._settings, self._table.timeout)
            return
        settings, events = self._settings, ResponseEvents(header, asked.echoed)
        if generation.stream is None:
            response = await self._table.open(generation, header, ItemCollector(events), details)
            if await self._whole(call, response):
                kept = await self._kept(call, asked, events.finished(response.choices[0]), whole=True)
                await self._finish(call, call.respond_json(kept))
            return
        writer = ItemWriter(
            events,
            call.connection,
            keep_alive=settings.keep_alive,
            unread_limit=settings.unread_limit,
            now=time.monotonic(),
        )
        response = await self._table.open(generation, header, writer, details)

        async def end() -> None:
            # Whoever sees the end may go on from it at once.
            writer.end(await self._kept(call, asked, events.finished(response.choices[0])))

        await self._streamed(call, response, writer, ending=end)

    async def _ask(self, call: Call) -> tuple[ResponseRequest, bytes]:
        """What the body asks for, and the body. Raises RequestError."""
        with self._table.arriving():
            body = await call.body()
            asked: ResponseRequest = await self._parsed(call, "responses", body)
        if asked.store and self._store is None:
            raise unsupported("store", "true where nothing is stored")
        stored = self._store is not None and asked.store is not False
        if asked.background and not stored:
            raise invalid("background", "background can only be used when `store` is true, and there is a database")
        if stored and asked.generation.request_id is not None:
            raise invalid("request_id", "only allowed where `store` is false: a stored response needs an id of its own")
        return replace(asked, store=stored, echoed=asked.echoed | {"store": stored}), body

    async def _parsed(self, call: Call, kind: BodyKind, body: bytes) -> Any:
        """What a body comes to with the stored items that it goes on from, and refers to. Raises RequestError."""
        history = await self._history(call, body)
        asked = await self._parser.read(kind, body, history, None if self._store is not None else b"{}")
        if self._store is not None and isinstance(asked, list):
            found = await self._store.referenced(asked, call.key.name, partial(call.hold, answers=False))
            asked = await self._parser.read(kind, body, history, found)
        return asked

    async def _history(self, call: Call, body: bytes) -> bytes | None:
        """What a body goes on from, where it is stored. Raises RequestError."""
        if self._store is None:
            return None
        found = continuation(body)
        if found.response is not None:
            hold = partial(_hold_history, call, "previous_response_id")
            return await self._store.history(found.response, call.key.name, hold)
        if found.conversation is not None:
            hold = partial(_hold_history, call, "conversation")
            return await self._store.conversation(found.conversation, call.key.name, hold)
        return None

    async def input_tokens(self, call: Call) -> None:
        """`/v1/responses/input_tokens`: how many tokens the prompt has; of an image an encoder says it. Raises
        RequestError."""
        with self._table.arriving():
            body = await call.body()
            generation: GenerationRequest = await self._parsed(call, "input_tokens", body)
        call.record.model = generation.served_name
        generation = await self._table.images.filled(self._access.bound(generation, call.key))
        ids = await call.unless_left(self._table.tokenizer.prompt_ids(generation, generation.prompts[0]))
        await call.respond_json({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def _kept(
        self, call: Call, asked: ResponseRequest, response: dict[str, Any], *, whole: bool = False
    ) -> dict[str, Any]:
        """The response, stored where it is to be. One that the database does not take says that it is not stored, and
        in no conversation. `whole`: whether it is the answer, for which there is room then, or nothing is stored.
        Raises RequestError where there is none."""
        if self._store is None or not (asked.store or asked.conversation is not None):
            return response
        stored = StoredResponse(response=response, items_size=len(asked.items))
        record = self._store.record(call.key.name, stored)
        if whole:
            await call.hold_answer(len(record.value))
        if asked.conversation is not None and not await self._added(call, asked, response):
            response = response | {"conversation": None}
            record = self._store.record(call.key.name, replace(stored, response=response))
        if not asked.store:
            return response
        try:
            await self._store.insert(record, asked.items)
        except RequestError:
            return response | {"store": False}
        return response

    async def _added(self, call: Call, asked: ResponseRequest, response: dict[str, Any]) -> bool:
        """Whether the response is in its conversation now."""
        assert self._store is not None
        try:
            return await self._store.add_to_conversation(response, asked.items, asked.added, call.key.name)
        except RequestError:
            return False


async def _hold_history(call: Call, field: str, size: int) -> None:
    """Waits for room for what a body goes on from; where it is larger than conversations, and bodies, may be, it is
    refused, and never read. It may well be larger than a body: log-probabilities and deleted items are counted, and
    make no prompt. Raises RequestError 413, and what `Call.hold` does."""
    if size > (most := max(MAX_BYTES, call.limits.most)):
        text = f"{field}: it has {size} bytes; {most} are allowed, as of a conversation"
        raise RequestError(413, text, param=field, code="too_large")
    await call.hold(size, answers=False)
