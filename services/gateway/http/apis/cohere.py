"""`/v2/chat`: version 2 of Cohere's API."""

from __future__ import annotations

import secrets
import time
from typing import Any

from services.gateway.api.cohere.answer import answer_body, begin_event, ending, logprob_item
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings
from services.gateway.http.streaming import EventWriter, event_frame
from shared.messages.gateway import Delta


class CohereWriter(EventWriter):
    """Writes an answer as a stream of parts and calls."""

    each_token = True

    def __init__(self, header: ResponseHeader, connection: ClientConnection, settings: StreamSettings) -> None:
        super().__init__(
            connection, keep_alive=settings.keep_alive, unread_limit=settings.unread_limit, now=time.monotonic()
        )
        self._header = header

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `EventWriter.write`."""
        choice.logprobs.extend(delta.logprobs or ())
        return super().write(choice, delta, now)

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output: the start with the first token, none where nothing is decided yet."""
        assert choice.message is not None
        events: list[dict[str, Any]] = choice.message.feed(delta.text, delta.finish)
        text = next((event for event in events if event["type"] == "content-delta"), None)
        if text is not None and choice.logprobs:
            text["logprobs"], choice.logprobs = logprob_item(choice.logprobs), []
        return [*self._start(choice), *map(event_frame, events)]

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns why it ended and what it took."""
        [choice] = choices
        ended = {"type": "message-end", "id": self._header.id, "delta": ending(choice)}
        return [*self._start(choice), event_frame(ended)]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the end of a stream that failed."""
        failed = {"finish_reason": "ERROR", "error": error.message}
        return event_frame({"type": "message-end", "id": self._header.id, "delta": failed})

    def _start(self, choice: ChoiceState) -> list[bytes]:
        if choice.started:
            return []
        choice.started = True
        return [event_frame(begin_event(self._header))]


class CohereChatEndpoint(GeneratingEndpoint):
    """Answers `/v2/chat`."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        generation: GenerationRequest = self._admitted(call, await self._read(call, "cohere"))
        generation = await self._filled(call, generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = ResponseHeader("cohere", f"chat-{secrets.token_hex(12)}", int(time.time()), generation.served_name)
        self._log(call, generation, header)
        if generation.stream is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
            if await self._whole(call, response):
                [choice] = response.choices
                await self._answer(call, answer_body(header, choice, logprobs=generation.response_options.logprobs))
            return
        writer = CohereWriter(header, call.connection, self._settings)
        await self._streamed(call, await self._table.open(generation, header, writer, details), writer)
