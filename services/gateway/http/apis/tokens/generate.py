"""`/inference/v1/generate` of vLLM."""

from __future__ import annotations

import time

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import StreamOptions
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter
from services.gateway.api.tokens.answer import answer, chunk, last_chunk
from services.gateway.api.tokens.request import TokensAnswerOptions, TokensRequest
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings, new_header
from services.gateway.http.streaming import DONE, EventWriter, encode, error_frame
from shared.messages.gateway import Delta

PREFIX = "generate-tokens"


class TokensWriter(EventWriter):
    """Writes a stream of token ids: an event for each piece of output, whether or not it makes a text."""

    def __init__(
        self,
        header: ResponseHeader,
        stream: StreamOptions,
        options: TokensAnswerOptions,
        connection: ClientConnection,
        settings: StreamSettings,
    ) -> None:
        keep_alive, unread_limit, _ = settings
        super().__init__(connection, keep_alive=keep_alive, unread_limit=unread_limit, now=time.monotonic())
        self._header, self._stream, self._options = header, stream, options
        self._started = False

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `EventWriter.write`; here tokens count."""
        if not (delta.tokens or delta.finish is not None or (delta.text and self._options.text)):
            return True
        self._write(self.frames(choice, delta)[0])
        self._written_at = now
        return self._connection.unread() <= self._unread_limit

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns an event; see `EventWriter.frames`."""
        if self._started:
            choice.prompt_ids = None
        self._started = True
        body = chunk(choice, delta, self._header, self._options, with_usage=self._stream.continuous_usage)
        return [b"data: %b\n\n" % encode(body)]

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the usage, if the client requested it, and the end."""
        if not self._stream.include_usage:
            return [DONE]
        return [b"data: %b\n\n" % encode(last_chunk(choices, self._header, self._options)), DONE]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as an event, and the end."""
        return error_frame(error) + DONE


class TokensEndpoint(GeneratingEndpoint):
    """Answers `/inference/v1/generate`."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        asked = await self._read(call, "tokens")
        assert isinstance(asked, TokensRequest)
        generation, options = self._admitted(call, asked.generation), asked.options
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = new_header(generation, PREFIX)
        self._log(call, generation, header)
        if generation.stream is not None:
            writer = TokensWriter(header, generation.stream, options, call.connection, self._settings)
            response = await self._table.open(generation, header, writer, details)
            await self._streamed(call, response, writer)
            return
        response = await self._table.open(generation, header, ResponseWriter(), details)
        whole, transfer = await self._whole_and_kept(call, generation, response)
        if whole:
            scored = generation.response_options.prompt_logprobs
            await self._answer(call, answer(header, response.choices, options, scored, transfer))
