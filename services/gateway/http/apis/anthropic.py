"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import secrets
import time

from services.gateway.api.anthropic.answer import ending, error_body, message, message_body, usage
from services.gateway.api.anthropic.blocks import MessageBlocks
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings
from services.gateway.http.streaming import EventWriter, event_frame
from services.gateway.request_table import RequestTable
from shared.messages.gateway import Delta


class MessagesWriter(EventWriter):
    """Writes a message as a stream of blocks."""

    keep_alive_frame = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, header: ResponseHeader, max_tokens: int | None, connection: ClientConnection, settings: StreamSettings
    ) -> None:
        """`max_tokens`: the client's."""
        super().__init__(
            connection, keep_alive=settings.keep_alive, unread_limit=settings.unread_limit, now=time.monotonic()
        )
        self._header, self._max_tokens = header, max_tokens

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output: the message's start before the first, none where nothing is decided yet."""
        blocks = choice.message
        assert isinstance(blocks, MessageBlocks)
        events = [event_frame(each) for each in blocks.feed(delta.text, delta.finish)]
        if events and not choice.started:
            events.insert(0, self._start(choice))
        return events

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns why it ended and what it took, and the end."""
        [choice] = choices
        start = [] if choice.started else [self._start(choice)]
        ended = {"type": "message_delta", "delta": ending(choice, self._max_tokens), "usage": usage(choice)}
        return [*start, event_frame(ended), event_frame({"type": "message_stop"})]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as an event."""
        return b"event: error\ndata: %b\n\n" % error_body(error)

    def _start(self, choice: ChoiceState) -> bytes:
        choice.started = True
        begun = ChoiceState(0, 0, prompt_tokens=choice.prompt_tokens, cached_tokens=choice.cached_tokens)
        return event_frame({"type": "message_start", "message": message(self._header, begun, [], None)})


class MessagesEndpoint(GeneratingEndpoint):
    """Answers `/v1/messages`."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        generation = self._admitted(call, await self._read(call, "messages"))
        generation = await self._filled(call, generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = ResponseHeader("messages", f"msg_{secrets.token_hex(12)}", int(time.time()), generation.served_name)
        self._log(call, generation, header)
        max_tokens = generation.stopping.max_tokens
        if generation.stream is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
            whole, transfer = await self._whole_and_kept(call, generation, response)
            if whole:
                body = message_body(header, response.choices[0], max_tokens, transfer)
                await self._finish(call, call.respond(body))
            return
        writer = MessagesWriter(header, max_tokens, call.connection, self._settings)
        await self._streamed(call, await self._table.open(generation, header, writer, details), writer)


class CountTokensEndpoint:
    """Answers `/v1/messages/count_tokens`."""

    def __init__(self, table: RequestTable, parser: BodyParser, access: AccessControl) -> None:
        self._table, self._parser, self._access = table, parser, access

    async def __call__(self, call: Call) -> None:
        """Answers how many tokens the prompt has, of which only an encoder knows an image's. Raises RequestError."""
        table = self._table
        with table.arriving():
            generation: GenerationRequest = await self._parser.read("count_tokens", await call.body())
        call.record.model = generation.served_name
        generation = await table.images.filled(self._access.bound(generation, call.key))
        ids = await call.unless_left(table.tokenizer.prompt_ids(generation, generation.prompts[0]))
        await call.respond_json({"input_tokens": len(ids)})
