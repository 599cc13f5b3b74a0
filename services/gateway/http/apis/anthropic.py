"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal, NamedTuple

from services.gateway.api.anthropic.answer import applied_edits, ending, error_body, message, message_body, usage
from services.gateway.api.anthropic.blocks import MessageBlocks
from services.gateway.api.anthropic.request import ClearingPlan
from services.gateway.api.anthropic.tool_clearing import CLEAR_TOOL_USES, applied_edit
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyKind, BodyParser
from services.gateway.http.call import Call
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings
from services.gateway.http.streaming import EventWriter, event_frame
from services.gateway.request_table import RequestTable
from shared.messages.gateway import Delta


class MessagesWriter(EventWriter):
    """Writes a message as a stream of blocks."""

    keep_alive_frame = b'event: ping\ndata: {"type":"ping"}\n\n'
    each_token = True

    def __init__(
        self,
        header: ResponseHeader,
        max_tokens: int | None,
        applied: list[dict[str, Any]] | None,
        call: Call,
        settings: StreamSettings,
    ) -> None:
        """`max_tokens`: the client's. `applied`: see `applied_edits`."""
        super().__init__(
            call.connection, keep_alive=settings.keep_alive, unread_limit=settings.unread_limit, now=time.monotonic()
        )
        self._header, self._max_tokens, self._applied = header, max_tokens, applied
        self._request_id = call.id

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output: the start with the first token, none where nothing is decided yet."""
        blocks = choice.message
        assert isinstance(blocks, MessageBlocks)
        start = [] if choice.started else [self._start(choice)]
        return start + [event_frame(each) for each in blocks.feed(delta.text, delta.finish)]

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns why it ended and what it took, and the end."""
        [choice] = choices
        start = [] if choice.started else [self._start(choice)]
        ended = {"type": "message_delta", "delta": ending(choice, self._max_tokens), "usage": usage(choice)}
        ended |= applied_edits(self._applied)
        return [*start, event_frame(ended), event_frame({"type": "message_stop"})]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as an event."""
        return b"event: error\ndata: %b\n\n" % error_body(error, self._request_id)

    def _start(self, choice: ChoiceState) -> bytes:
        choice.started = True
        begun = ChoiceState(0, 0, prompt_tokens=choice.prompt_tokens, cached_tokens=choice.cached_tokens)
        return event_frame({"type": "message_start", "message": message(self._header, begun, [], None)})


class ClearedRequest(NamedTuple):
    """A request whose results of tools were cleared where that was asked for."""

    generation: GenerationRequest
    applied: list[dict[str, Any]] | None = None
    """What was cleared; None: nothing was to be."""
    original: int | None = None
    """Tokens of the whole prompt, where they were counted."""


class PromptClearing:
    """Reads bodies, and decides whether results of tools go: only a tokenizer knows how long prompts are."""

    def __init__(self, table: RequestTable, parser: BodyParser, access: AccessControl) -> None:
        self._table, self._parser, self._access = table, parser, access

    async def read(self, call: Call, kind: Literal["messages", "count_tokens"]) -> ClearedRequest:
        """Raises RequestError."""
        with self._table.arriving():
            body = await call.body()
            whole: GenerationRequest = await self._parser.read(kind, body)
            if CLEAR_TOOL_USES.encode() not in body:
                return ClearedRequest(whole)
            plan: ClearingPlan | None = await self._parser.read("tool_clearing", body)
            if plan is None or not plan.calls:
                return ClearedRequest(whole, None if plan is None else [])
            shorter: GenerationRequest = await self._parser.read(_CLEARED[kind], body)
        original = await self.count(call, whole)
        if plan.edit.above_tokens is not None and original <= plan.edit.above_tokens:
            return ClearedRequest(whole, [], original)
        tokens = original - await self.count(call, shorter)
        if tokens < plan.edit.at_least:
            return ClearedRequest(whole, [], original)
        return ClearedRequest(shorter, [applied_edit(plan.calls, tokens)], original)

    async def count(self, call: Call, generation: GenerationRequest) -> int:
        """Returns how many tokens a prompt has, of which only an encoder knows an image's. Raises RequestError."""
        filled = await self._table.images.filled(self._access.bound(generation, call.key))
        return len(await call.unless_left(self._table.tokenizer.prompt_ids(filled, filled.prompts[0])))


_CLEARED: dict[str, BodyKind] = {"messages": "messages_cleared", "count_tokens": "count_tokens_cleared"}


class MessagesEndpoint(GeneratingEndpoint):
    """Answers `/v1/messages`."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        clearing = PromptClearing(self._table, self._parser, self._access)
        asked = await clearing.read(call, "messages")
        generation, applied = self._admitted(call, asked.generation), asked.applied
        generation = await self._filled(call, generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = ResponseHeader("messages", f"msg_{secrets.token_hex(12)}", int(time.time()), generation.served_name)
        self._log(call, generation, header)
        max_tokens = generation.stopping.max_tokens
        if generation.stream is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
            whole, transfer = await self._whole_and_kept(call, generation, response)
            if whole:
                body = message_body(header, response.choices[0], max_tokens, transfer, applied)
                await self._finish(call, call.respond(body))
            return
        writer = MessagesWriter(header, max_tokens, applied, call, self._settings)
        await self._streamed(call, await self._table.open(generation, header, writer, details), writer)


class CountTokensEndpoint:
    """Answers `/v1/messages/count_tokens`."""

    def __init__(self, table: RequestTable, parser: BodyParser, access: AccessControl) -> None:
        self._table, self._parser, self._access = table, parser, access

    async def __call__(self, call: Call) -> None:
        """Answers how many tokens the prompt has, of which only an encoder knows an image's. Raises RequestError."""
        clearing = PromptClearing(self._table, self._parser, self._access)
        asked = await clearing.read(call, "count_tokens")
        call.record.model = asked.generation.served_name
        counted = await clearing.count(call, asked.generation)
        managed = {}
        if asked.applied is not None:
            managed["context_management"] = {"original_input_tokens": asked.original or counted}
        await call.respond_json({"input_tokens": counted, **managed})
