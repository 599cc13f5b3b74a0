"""Streamed responses: server-sent events made from byte templates, written to the client as tokens arrive.

Per token only the escaped text is inserted into a template. What a client reads is always the JSON that OpenAI's API
defines; the tests parse it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import TEXT_ONLY, ResponseOptions, StreamOptions
from services.gateway.api.logprobs import by_id, by_text, chat_logprobs, completion_logprobs
from services.gateway.api.response import ChoiceState, ResponseHeader, ResponseWriter, timing_metrics, usage
from services.gateway.api.vllm.answer_fields import weight_versions
from services.gateway.http.call import ClientConnection
from shared.messages.gateway import Delta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class SseFrames:
    """Owns the templates of one stream. `text` costs two joins and one escape in the common case."""

    def __init__(
        self, header: ResponseHeader, stream: StreamOptions, choices: int, options: ResponseOptions = TEXT_ONLY
    ) -> None:
        self._chat = header.kind == "chat"
        self._options = options
        self._naming = by_id if options.tokens_as_ids else by_text
        self._continuous = stream.continuous_usage
        self._head = b"data: " + encode(header.fields(chunk=True))[:-1]
        opening = b'"delta":{"content":' if self._chat else b'"text":'
        self._before_text = [self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choices)]
        self._after_text = b"}" if self._chat else b""
        self._end = b"%b}\n\n" % (b',"usage":null' if stream.include_usage else b"")
        self._unused = b',"token_ids":null' if self._chat else b',"token_ids":null,"prompt_token_ids":null'
        unfinished = b"" if self._chat else b',"stop_reason":null'
        plain = b',"logprobs":null,"finish_reason":null%b%b}]' % (unfinished, self._unused)
        self._plain_end = self._after_text + plain + self._end
        self._role = encode(options.role)

    @property
    def with_token_ids(self) -> bool:
        """Whether chunks contain token ids."""
        return self._options.token_ids

    def role(self, choice: ChoiceState) -> bytes:
        """Returns the first chunk of a chat's choice, with what it echoes; empty for completions, which have none."""
        if not self._chat:
            return b""
        body = b',"choices":[{"index":%d,"delta":{"role":%b,"content":%b},"logprobs":null,"finish_reason":null}]'
        prompt = self._prompt_ids(choice) or b',"prompt_token_ids":null'
        prompt += b',"prompt_text":' + encode(choice.prompt_text if self._options.prompt_text else None)
        opened = self._head + body % (choice.index, self._role, encode(choice.echo))
        return opened + prompt + self._tail(choice, tokens=0)

    def text(self, choice: ChoiceState, text: str) -> bytes:
        """Returns a chunk of new text. The choice has counted its tokens; its collected log-probabilities go along."""
        plain = choice.finish is None and not choice.logprobs and not self._continuous
        if plain and not self._options.token_ids and choice.echo_first_token is None:
            return b"%b%b%b" % (self._before_text[choice.index], encode(text), self._plain_end)
        return self._full(choice, self._before_text[choice.index] + encode(text) + self._after_text)

    def delta(self, choice: ChoiceState, delta: dict[str, Any]) -> bytes:
        """Returns a chunk with `choices[].delta` of a chat whose output is parsed."""
        return self._full(choice, b'%b,"choices":[{"index":%d,"delta":%b' % (self._head, choice.index, encode(delta)))

    def _full(self, choice: ChoiceState, start: bytes) -> bytes:
        parts = [start]
        parts += [b',"logprobs":', self._logprobs(choice)]
        parts += [b',"finish_reason":', encode(choice.finish_reason)]
        if choice.finish is not None or not self._chat:
            parts += [b',"stop_reason":', encode(choice.stop_reason)]
        if self._options.token_ids:
            unasked = b"" if self._chat else b',"prompt_token_ids":null'
            parts += [b',"token_ids":', encode(choice.token_ids), self._prompt_ids(choice) or unasked]
            choice.token_ids = []
        else:
            parts.append(self._unused)
        if self._options.weight_versions and choice.finish is not None:
            parts += [b',"weight_versions":', encode(weight_versions(choice.tokens))]
        return b"".join([*parts, b"}]", self._tail(choice)])

    def _logprobs(self, choice: ChoiceState) -> bytes:
        if not choice.logprobs and choice.echo_first_token is None:
            return b"null"
        positions, choice.logprobs = choice.logprobs, []
        if self._chat:
            return encode(chat_logprobs(positions, self._naming))
        logprobs, choice.text_offset = completion_logprobs(positions, choice.text_offset, self._naming)
        if choice.echo_first_token is not None:
            logprobs = choice.echoed_logprobs(self._naming, self._options.echo_logprobs).followed_by(logprobs)
            choice.echo_first_token = None
        return encode(logprobs.body())

    def _prompt_ids(self, choice: ChoiceState) -> bytes:
        """The prompt's token ids, sent once: beside the choices of a chat, within those of a completion."""
        if not self._options.token_ids or choice.prompt_ids is None:
            return b""
        ids, choice.prompt_ids = choice.prompt_ids, None
        return b',"prompt_token_ids":' + encode(ids)

    def _tail(self, choice: ChoiceState, tokens: int | None = None) -> bytes:
        """`tokens`: how many output tokens the client has with this chunk; None: all."""
        return b',"usage":%b}\n\n' % encode(usage([choice], tokens)) if self._continuous else self._end

    def pass_over(self, choice: ChoiceState, delta: Delta) -> None:
        """Counts as sent the output that the client already has from another connection."""
        if not choice.started:
            choice.started, choice.text_offset = True, len(choice.echo)
            choice.echo_first_token = choice.prompt_ids = None
        if choice.message is not None:
            choice.message.feed(delta.text, delta.finish)
        if delta.logprobs and not self._chat:
            _, choice.text_offset = completion_logprobs(delta.logprobs, choice.text_offset, self._naming)

    def usage(self, choices: list[ChoiceState], started_at: float = 0.0) -> bytes:
        """Returns the last chunk, which is sent if the client requested usage; `started_at`: when the request came."""
        last = b',"choices":[],"usage":%b' % encode(usage(choices))
        if self._options.metrics:
            last += b',"metrics":' + encode(timing_metrics(choices, started_at))
        return self._head + last + b"}\n\n"


def error_frame(error: RequestError) -> bytes:
    """Returns an error as an event."""
    return b"data: %b\n\n" % error.body()


def event_frame(event: dict[str, Any]) -> bytes:
    """Returns an event with its type's name, as OpenAI's responses and Anthropic's messages are streamed."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class EventWriter(ResponseWriter):
    """Owns what a stream has not written yet.

    Frames are collected until the response has been started; from then on each is written to the connection at once. A
    client that leaves more than `unread_limit` bytes unread is reported as too slow.
    """

    keep_alive_frame = KEEP_ALIVE
    """What shows that the connection lives."""
    each_token = False
    """Whether tokens without text have events, too: half a character, or perhaps the start of a stop string."""

    def __init__(self, connection: ClientConnection, *, keep_alive: float, unread_limit: int, now: float) -> None:
        self._connection = connection
        self._keep_alive, self._unread_limit = keep_alive, unread_limit
        self._pending: list[bytes] | None = []
        """None once the response has been started."""
        self._written_at = now
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the response can be started, or when there will be nothing to write."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """Writes new output. Returns False where the client reads too slowly."""
        if not delta.text and delta.finish is None and not (self.each_token and delta.tokens):
            return True
        if not (frames := self.frames(choice, delta)):
            return True  # perhaps the start of a marker
        self._write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._written_at = now
        return self._connection.unread() <= self._unread_limit

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output; none where nothing is decided yet."""
        raise NotImplementedError

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the last events."""
        raise NotImplementedError

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the events that end a stream with an error."""
        raise NotImplementedError

    def complete(self, choices: list[ChoiceState]) -> None:
        """Writes the last events."""
        self._write(b"".join(self.last_frames(choices)))

    def fail(self, error: RequestError) -> None:
        """Writes the error as an event, once the response has started; before, the endpoint makes it a response."""
        if self._pending is None:
            self._write(self.error_frames(error))

    def tick(self, now: float) -> None:
        """Writes a sign of life after `keep_alive` seconds without an event."""
        if now - self._written_at >= self._keep_alive:
            self._written_at = now
            self._write(self.keep_alive_frame)

    def _write(self, data: bytes) -> None:
        if self._pending is None:
            self._connection.write_chunk(data)
        else:
            self._pending.append(data)
            self.wake()

    def wake(self) -> None:
        """Marks the first chunk as available: completes the future `first`."""
        if not self.first.done():
            self.first.set_result(None)

    @property
    def waiting(self) -> bool:
        """Whether frames wait for the response to be started."""
        return bool(self._pending)

    def start(self) -> None:
        """Writes the waiting frames: the response has been started."""
        waiting, self._pending = self._pending, None
        if waiting:
            self._connection.write_chunk(b"".join(waiting))


class StreamWriter(EventWriter):
    """Writes the stream of a chat or a completion, as OpenAI's API has it.

    As in vLLM, a token that makes no text yet gets an event, too, because clients measure the time to the first token
    and between tokens by events. In a chat whose output is parsed only the first token is sure to have one: the
    role."""

    each_token = True
    with_ids = False
    """Whether events have ids."""

    def __init__(
        self,
        frames: SseFrames,
        connection: ClientConnection,
        *,
        include_usage: bool,
        keep_alive: float,
        unread_limit: int,
        now: float,
    ) -> None:
        super().__init__(connection, keep_alive=keep_alive, unread_limit=unread_limit, now=now)
        self._frames, self._include_usage, self._started_at = frames, include_usage, now
        self._plain = not (self.with_ids or frames.with_token_ids)

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """Writes new output. Returns False where the client reads too slowly."""
        if delta.text and choice.started and choice.message is None and not delta.logprobs and self._plain:
            self._write(self._frames.text(choice, delta.text))  # nearly all: the same as below, by fewer calls
            self._written_at = now
            return self._connection.unread() <= self._unread_limit
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if self._frames.with_token_ids:
            choice.token_ids.extend(delta.tokens)
        return super().write(choice, delta, now)

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output: the role before the first, none where nothing is decided yet."""
        if choice.message is not None:
            parsed = choice.message.feed(delta.text, delta.finish)
            role = b"" if choice.started else self._frames.role(choice)
            if not parsed and delta.finish is None:
                choice.started = True
                return [role] if role else []
            frame = self._frames.delta(choice, parsed)
        elif choice.started:
            return [self._frames.text(choice, delta.text)]
        else:
            choice.text_offset = len(choice.echo)
            role = self._frames.role(choice)
            frame = self._frames.text(choice, delta.text if role else choice.echo + delta.text)
        choice.started = True
        return [role, frame] if role else [frame]

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the last events: the usage if the client requested it, and the end."""
        return [self._frames.usage(choices, self._started_at), DONE] if self._include_usage else [DONE]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as an event, and the end."""
        return error_frame(error) + DONE


class StoredStreamWriter(StreamWriter):
    """Writes the stream of a chat that is stored, and keeps in the choices what a body at the end would have of it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """See `StreamWriter`."""
        super().__init__(*arguments, **settings)
        self._kept: dict[int, ChoiceState] = {}

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `StreamWriter.write`."""
        kept = self._kept.get(choice.index)
        if kept is None:
            kept = self._kept[choice.index] = ChoiceState(choice.index, choice.prompt, prompt_ids=choice.prompt_ids)
        kept.logprobs.extend(delta.logprobs or ())
        kept.token_ids.extend(delta.tokens)
        if choice.message is None:
            choice.texts.append(delta.text)
        return super().write(choice, delta, now)

    def complete(self, choices: list[ChoiceState]) -> None:
        """Leaves the last events to `end`: whoever sees them may ask for what is stored at once."""
        for choice in choices:
            kept = self._kept.get(choice.index, choice)
            choice.logprobs, choice.token_ids, choice.prompt_ids = kept.logprobs, kept.token_ids, kept.prompt_ids

    def end(self, choices: list[ChoiceState]) -> None:
        """Writes the last events."""
        super().complete(choices)
