"""Server-sent events of a stream, put together from byte templates: per token only the escaped text is inserted.

What a client reads is in every case the JSON that OpenAI's API defines; the tests parse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.answers.choice import ChoiceState, usage
from services.gateway.answers.heading import Heading
from services.gateway.answers.logprobs import chat_logprobs, completion_logprobs
from services.gateway.api.errors import ApiError
from services.gateway.api.job import StreamOptions

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def error_frame(error: ApiError) -> bytes:
    return b"data: %b\n\n" % error.body()


class Frames:
    """Owns one stream's templates. `text` of the common case costs two joins and one escape."""

    def __init__(self, heading: Heading, options: StreamOptions, choices: int) -> None:
        self._chat = heading.kind == "chat"
        self._continuous = options.continuous_usage
        self._head = b"data: " + encode(heading.fields(chunk=True))[:-1]
        opening = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choices)]
        closed = b"}" if self._chat else b""
        no_usage = b',"usage":null' if options.include_usage else b""
        self._behind_text = closed
        self._end = b"%b}\n\n" % no_usage
        self._plain = closed + b',"logprobs":null,"finish_reason":null}]' + self._end

    def role(self, choice: ChoiceState) -> bytes:
        """The first chunk of each choice of a chat; completions have none."""
        if not self._chat:
            return b""
        body = (
            b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        )
        return self._head + body % choice.index + self._tail(choice)

    def text(self, choice: ChoiceState, text: str) -> bytes:
        """New text; `choice` counts its tokens already, and its collected log-probabilities go along."""
        if choice.finish is None and not choice.logprobs and not self._continuous:
            return b"%b%b%b" % (self._before[choice.index], encode(text), self._plain)
        return self._full(choice, text)

    def _full(self, choice: ChoiceState, text: str) -> bytes:
        parts = [self._before[choice.index], encode(text), self._behind_text]
        parts += [b',"logprobs":', self._logprobs(choice)]
        parts += [b',"finish_reason":', encode(choice.finish)]
        if choice.finish is not None:
            parts += [b',"stop_reason":', encode(choice.stop_reason)]
        return b"".join([*parts, b"}]", self._tail(choice)])

    def _logprobs(self, choice: ChoiceState) -> bytes:
        if not choice.logprobs:
            return b"null"
        positions, choice.logprobs = choice.logprobs, []
        if self._chat:
            return encode(chat_logprobs(positions))
        shown, choice.offset = completion_logprobs(positions, choice.offset)
        return encode(shown)

    def _tail(self, choice: ChoiceState) -> bytes:
        if not self._continuous:
            return self._end
        return b',"usage":%b}\n\n' % encode(usage([choice]))

    def usage(self, choices: list[ChoiceState]) -> bytes:
        """The last chunk where the client asked for usage."""
        return self._head + b',"choices":[],"usage":%b}\n\n' % encode(usage(choices))
