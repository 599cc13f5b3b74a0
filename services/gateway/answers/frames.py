"""Server-sent events of a stream, put together from byte templates: per token only the escaped text is inserted.

What a client reads is in every case the JSON that OpenAI's API defines; the tests parse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.answers.choice import ChoiceState, usage
from services.gateway.answers.heading import Heading
from services.gateway.answers.logprobs import (
    by_id,
    by_text,
    chat_logprobs,
    completion_columns,
    echoed_columns,
    joined,
)
from services.gateway.api.errors import ApiError
from services.gateway.api.job import TEXT_ONLY, StreamOptions, Telling

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def error_frame(error: ApiError) -> bytes:
    return b"data: %b\n\n" % error.body()


class Frames:
    """Owns one stream's templates. `text` of the common case costs two joins and one escape."""

    def __init__(self, heading: Heading, options: StreamOptions, choices: int, telling: Telling = TEXT_ONLY) -> None:
        self._chat = heading.kind == "chat"
        self._telling = telling
        self._naming = by_id if telling.tokens_as_ids else by_text
        self._continuous = options.continuous_usage
        self._head = b"data: " + encode(heading.fields(chunk=True))[:-1]
        opening = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choices)]
        closed = b"}" if self._chat else b""
        no_usage = b',"usage":null' if options.include_usage else b""
        self._behind_text = closed
        self._end = b"%b}\n\n" % no_usage
        self._plain = closed + b',"logprobs":null,"finish_reason":null}]' + self._end

    @property
    def tells_ids(self) -> bool:
        return self._telling.token_ids

    def role(self, choice: ChoiceState) -> bytes:
        """The first chunk of each choice of a chat; completions have none."""
        if not self._chat:
            return b""
        body = (
            b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        )
        return self._head + body % choice.index + self._prompt_ids(choice) + self._tail(choice)

    def text(self, choice: ChoiceState, text: str) -> bytes:
        """New text; `choice` counts its tokens already, and its collected log-probabilities go along."""
        plain = choice.finish is None and not choice.logprobs and not self._continuous
        if plain and not self._telling.token_ids and choice.echoed_first is None:
            return b"%b%b%b" % (self._before[choice.index], encode(text), self._plain)
        return self._full(choice, self._before[choice.index] + encode(text) + self._behind_text)

    def parts(self, choice: ChoiceState, said: dict[str, Any]) -> bytes:
        """A chat's new output, taken apart."""
        return self._full(choice, b'%b,"choices":[{"index":%d,"delta":%b' % (self._head, choice.index, encode(said)))

    def _full(self, choice: ChoiceState, said: bytes) -> bytes:
        parts = [said]
        parts += [b',"logprobs":', self._logprobs(choice)]
        parts += [b',"finish_reason":', encode(choice.finish_reason)]
        if choice.finish is not None:
            parts += [b',"stop_reason":', encode(choice.stop_reason)]
        if self._telling.token_ids:
            parts += [b',"token_ids":', encode(choice.token_ids), self._prompt_ids(choice)]
            choice.token_ids = []
        return b"".join([*parts, b"}]", self._tail(choice)])

    def _logprobs(self, choice: ChoiceState) -> bytes:
        if not choice.logprobs and choice.echoed_first is None:
            return b"null"
        positions, choice.logprobs = choice.logprobs, []
        if self._chat:
            return encode(chat_logprobs(positions, self._naming))
        columns, choice.offset = completion_columns(positions, choice.offset, self._naming)
        if choice.echoed_first is not None:
            columns = joined(echoed_columns(choice, self._naming, self._telling.echo_logprobs), columns)
            choice.echoed_first = None
        return encode(columns.shown())

    def _prompt_ids(self, choice: ChoiceState) -> bytes:
        """Told once, in a chat beside the choices, in a completion within them."""
        if not self._telling.token_ids or choice.prompt_ids is None:
            return b""
        ids, choice.prompt_ids = choice.prompt_ids, None
        return b',"prompt_token_ids":' + encode(ids)

    def _tail(self, choice: ChoiceState) -> bytes:
        if not self._continuous:
            return self._end
        return b',"usage":%b}\n\n' % encode(usage([choice]))

    def usage(self, choices: list[ChoiceState]) -> bytes:
        """The last chunk where the client asked for usage."""
        return self._head + b',"choices":[],"usage":%b}\n\n' % encode(usage(choices))
