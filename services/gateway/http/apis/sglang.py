"""`/generate` of SGLang."""

from __future__ import annotations

import time

from services.gateway.api.encoding.lazy_json import LazyArray
from services.gateway.api.errors import RequestError
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.api.sglang.answer import answer
from services.gateway.api.sglang.request import SglangAnswerOptions, SglangRequest
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, new_header
from services.gateway.http.streaming import DONE, EventWriter, encode, error_frame
from shared.messages.gateway import Delta


class SglangWriter(EventWriter):
    """Writes a stream whose every event has all that was said until then, as SGLang's have."""

    def __init__(
        self,
        header: ResponseHeader,
        options: SglangAnswerOptions,
        connection: ClientConnection,
        *,
        keep_alive: float,
        unread_limit: int,
        now: float,
    ) -> None:
        super().__init__(connection, keep_alive=keep_alive, unread_limit=unread_limit, now=now)
        self._header, self._options = header, options
        self.began = self._now = now
        """When the response did, by its clock."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `EventWriter.write`."""
        self._now = now
        choice.texts.append(delta.text)
        choice.token_ids.extend(delta.tokens)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        return super().write(choice, delta, now)

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns an event; see `EventWriter.frames`."""
        body = answer(choice, self._header, self._options, began=self.began, now=self._now)
        if self._options.batch:
            body["index"] = choice.index
        return [b"data: %b\n\n" % encode(body)]

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the end."""
        return [DONE]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as an event, and the end."""
        return error_frame(error) + DONE


class SglangEndpoint(GeneratingEndpoint):
    """Answers `/generate`."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        asked = await self._read(call, "sglang")
        assert isinstance(asked, SglangRequest)
        generation, options = self._admitted(call, asked.generation), asked.options
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = new_header(generation, "sglang")
        self._log(call, generation, header)
        if generation.stream is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
            if await self._whole(call, response):
                now = time.monotonic()
                bodies = (
                    answer(choice, header, options, began=response.started_at, now=now, array=LazyArray)
                    for choice in response.choices
                )
                await self._answer(call, LazyArray(bodies) if options.batch else next(bodies))
            return
        settings = self._settings
        writer = SglangWriter(
            header,
            options,
            call.connection,
            keep_alive=settings.keep_alive,
            unread_limit=settings.unread_limit,
            now=time.monotonic(),
        )
        response = await self._table.open(generation, header, writer, details)
        writer.began = response.started_at
        await self._streamed(call, response, writer)
