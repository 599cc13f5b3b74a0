"""`/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, unsupported
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.api.responses.answer import finished, output_of, response_object
from services.gateway.api.responses.request import ResponseRequest, previous_response
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings
from services.gateway.http.streaming import EventWriter
from services.gateway.request_table import RequestTable
from services.gateway.response_store import ResponseStore, StoredResponse
from services.gateway.resumable_streams import ResumableStreams
from shared.messages.gateway import Delta


class ItemCollector(ResponseWriter):
    """Collects a response that is not streamed."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        items = output_of(choice)
        items.record(len(delta.tokens), delta.logprobs)
        items.feed(delta.text, delta.finish)
        return True


class ItemWriter(EventWriter):
    """Writes a response as a stream of numbered events."""

    def __init__(
        self,
        header: ResponseHeader,
        echoed: dict[str, Any],
        connection: ClientConnection,
        *,
        keep_alive: float,
        unread_limit: int,
        now: float,
    ) -> None:
        super().__init__(connection, keep_alive=keep_alive, unread_limit=unread_limit, now=now)
        self._header, self._echoed = header, echoed
        self._number = 0
        """Of the next event."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `EventWriter.write`."""
        output_of(choice).record(len(delta.tokens), delta.logprobs)
        return super().write(choice, delta, now)

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output; none where nothing is decided yet."""
        events = output_of(choice).feed(delta.text, delta.finish)
        return [*self._begin(), *map(self._frame, events)] if events else []

    def complete(self, choices: list[ChoiceState]) -> None:
        """Leaves the last event to `end`."""

    def end(self, response: dict[str, Any]) -> None:
        """Writes the event with the whole response."""
        self._write(b"".join([*self._begin(), self._last(response)]))

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the event with the failed response."""
        failed = response_object(self._header, self._echoed, "failed", error=error)
        return b"".join([*self._begin(), self._last(failed)])

    def _begin(self) -> list[bytes]:
        if self._number:
            return []
        begun = response_object(self._header, self._echoed)
        return [self._frame({"type": f"response.{kind}", "response": begun}) for kind in ("created", "in_progress")]

    def _last(self, response: dict[str, Any]) -> bytes:
        return self._frame({"type": f"response.{response['status']}", "response": response})

    def _frame(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class ResponsesEndpoint(GeneratingEndpoint):
    """Answers `/v1/responses`."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
        store: ResponseStore | None,
    ) -> None:
        """`store`: None: nothing is stored."""
        super().__init__(table, parser, access, streams, settings)
        self._store = store

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        asked = await self._ask(call)
        generation = self._admitted(call, asked.generation)
        details = await self._table.tokenizer.prompt_details(generation)
        header = ResponseHeader("responses", f"resp_{secrets.token_hex(24)}", int(time.time()), generation.served_name)
        self._log(call, generation, header)
        settings = self._settings
        if generation.stream is None:
            response = await self._table.open(generation, header, ItemCollector(), details)
            if await self._whole(call, response):
                body = await self._kept(call, asked, finished(header, asked.echoed, response.choices[0]))
                await self._finish(call, call.respond_json(body))
            return
        writer = ItemWriter(
            header,
            asked.echoed,
            call.connection,
            keep_alive=settings.keep_alive,
            unread_limit=settings.unread_limit,
            now=time.monotonic(),
        )
        response = await self._table.open(generation, header, writer, details)

        async def end() -> None:
            # Whoever sees the end may go on from it at once.
            writer.end(await self._kept(call, asked, finished(header, asked.echoed, response.choices[0])))

        await self._streamed(call, response, writer, ending=end)

    async def _ask(self, call: Call) -> ResponseRequest:
        """What the body asks for. Raises RequestError."""
        with self._table.arriving():
            body = await call.body()
            history = None
            if self._store is not None and (previous := previous_response(body)) is not None:
                history = await self._store.history(previous, call.key.name)
            asked: ResponseRequest = await self._parser.read("responses", body, history)
        if asked.store and self._store is None:
            raise unsupported("store", "true where nothing is stored")
        stored = self._store is not None and asked.store is not False
        return replace(asked, store=stored, echoed=asked.echoed | {"store": stored})

    async def _kept(self, call: Call, asked: ResponseRequest, response: dict[str, Any]) -> dict[str, Any]:
        """The response, stored where it is to be. One that the database does not take says that it is not stored."""
        if self._store is None or not asked.store:
            return response
        record = self._store.record(call.key.name, StoredResponse(response=response, items_size=len(asked.items)))
        try:
            await self._store.insert(record, asked.items)
        except RequestError:
            return response | {"store": False}
        return response
