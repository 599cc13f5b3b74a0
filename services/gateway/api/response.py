"""The response to one generation request: its choices and times while tokens arrive, how it ends, and its JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from services.gateway.api.encoding.lazy_json import LazyArray
from services.gateway.api.errors import STATUS, RequestError, invalid
from services.gateway.api.generation import PROMPT_FIELDS, GenerationKind, ResponseOptions
from services.gateway.api.logprobs import (
    CompletionLogprobs,
    EncodedEcho,
    TokenNaming,
    by_id,
    by_text,
    completion_logprobs,
    echoed_logprobs,
    lazy_chat_logprobs,
    prompt_logprobs,
)
from services.gateway.api.vllm.answer_fields import (
    UNUSED_OF_ANSWER,
    UNUSED_OF_CHAT,
    UNUSED_OF_CHOICE,
    UNUSED_OF_MESSAGE,
    UNUSED_OF_TEXT,
    weight_versions,
)
from services.gateway.api.vllm.kv_transfer import kv_transfer_params
from services.gateway.metrics import KeyMeters, ModelMeters
from services.gateway.parsing.output_parser import OutputParser
from services.gateway.parsing.plugin_parsers import ParserFailed
from shared.ids import RequestId
from shared.messages.gateway import (
    Delta,
    PositionLogprobs,
    PromptKept,
    PromptLogprobsDelta,
    RequestRejected,
    StreamOpened,
)
from shared.messages.generation import FinishReason

log = logging.getLogger(__name__)
MAX_VECTOR_BYTES = 64 * 2**20  # 2,048 of 8,192 numbers; as JSON they take five times as many

KEPT_TIMEOUT = 3.0
"""Seconds that an answer waits for what is kept of its prompt: as long as a scheduler waits for its KV store."""
FINGERPRINT = "baton-2"
"""`system_fingerprint`: to be changed when the same seed no longer gives the same text, as last by ADR 101."""

ResponseOutcome = Literal["finished", "failed", "client left", "client too slow", "taken over", "overflowed"]
"""taken over: the client resumes the stream on another connection, or is to do so at another gateway. overflowed: the
client gets the overflow provider's answer."""


class ResponseHeader(NamedTuple):
    """The fields with which every body and every chunk of a response starts."""

    kind: GenerationKind
    id: str
    created: int
    """Creation time in Unix seconds."""
    model: str
    prompt_field: str = ""
    """The client's name of the prompts; empty: that of its kind."""
    shown_id: str = ""
    """What clients see as `id`, where they have a say in it; empty: `id`."""

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        """Returns them as JSON fields; `chunk`: of a streamed chunk."""
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.shown_id or self.id,
            "object": chat if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


METRICS = (
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms"),
    *("mean_itl_ms", "tokens_per_second", "speculative_decoding"),
)
"""The fields of `metrics`."""


class ParsedMessage(Protocol):
    """Reads one choice's output as more than text, in the shape of one API."""

    parser: OutputParser

    def feed(self, text: str, finish: FinishReason | None) -> Any:
        """Returns what new output adds to a stream; empty where nothing is decided yet."""

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns `tool_calls` where the output stopped after one, otherwise `reason`."""

    def body(self) -> Any:
        """Returns the message, as far as it has arrived."""


@dataclass(slots=True)
class ChoiceState:
    """Owns one choice of the response while it is generated."""

    index: int
    prompt: int
    """Index of the prompt that it continues."""
    echo: str = ""
    """The prompt's text, where the client wants it before the output."""
    started: bool = False
    """In a stream: whether its first chunk was made."""
    tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    encoder_tokens: int = 0
    """Tokens of the prompt that an encoder has read; `prompt_tokens` counts them, too."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queued: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    """How many seconds it waited at its engine; when its first and its newest tokens arrived."""
    texts: list[str] = field(default_factory=list)
    """The output in pieces; collected only where the response is one body."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """In a stream: those not sent yet."""
    text_offset: int = 0
    """Characters before the next token with log-probabilities."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """The prompt's log-probabilities that have arrived, from its second token on."""
    echo_first_token: str | None = None
    """Text of the prompt's first token, as long as the prompt's log-probabilities are still to be echoed."""
    encoded_echo: EncodedEcho | None = None
    """Of an echo that is streamed: the same as JSON, made as it arrives."""
    prompt_text: str | None = None
    """Where the client wants it beside the output."""
    prompt_ids: list[int] | None = None
    """Where the client wants them. In a stream: until they were sent."""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens, where the client wants them. In a stream: those not sent yet."""
    message: ParsedMessage | None = None
    """Parses a chat's output, where it is more than text."""
    only_echo: bool = False
    """The client wants no output."""
    vector: bytes = b""
    """The vector of its prompt, packed float32, once it has arrived; empty where text is generated."""

    @property
    def finish_reason(self) -> str | None:
        """`finish_reason` as clients see it; None until the choice has finished."""
        return self.finish if self.finish is None or self.message is None else self.message.finish_reason(self.finish)

    def record_prompt_logprobs(self, part: PromptLogprobsDelta) -> None:
        """Appends what is new. A part may repeat positions, after a preemption or in another attempt."""
        known = 1 + len(self.prompt_logprobs) - part.position
        assert known >= 0, "the supervisor lets no gap through"
        self.prompt_logprobs.extend(new := part.logprobs[known:])
        if self.encoded_echo is not None:
            self.encoded_echo.extend(new)

    def echoed_logprobs(self, naming: TokenNaming, top: int | None) -> CompletionLogprobs:
        """Returns the prompt's log-probabilities, for the echo before the output."""
        first_id = self.prompt_ids[0] if self.prompt_ids else None
        known = self.encoded_echo
        return echoed_logprobs(self.echo_first_token or "", first_id, self.prompt_logprobs, naming, top, known)


def usage(choices: list[ChoiceState], completion_tokens: int | None = None) -> dict[str, Any]:
    """Returns OpenAI's `usage`; `completion_tokens`: if others than all so far. A prompt that several choices continue
    counts once; its cached tokens are those that no choice had to compute, as later choices find in the cache what the
    first one computed."""
    prompt = prompt_tokens(choices)
    completion = sum(choice.tokens for choice in choices) if completion_tokens is None else completion_tokens
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached_prompt_tokens(choices))},
    }
    parsers = [choice.message.parser for choice in choices if choice.message is not None]
    if any(parser.separates_reasoning for parser in parsers):
        reasoning = sum(parser.reasoning_tokens for parser in parsers)
        counts["completion_tokens_details"] = {"reasoning_tokens": min(reasoning, completion)}
    return counts


def timing_metrics(choices: Sequence[ChoiceState], started_at: float) -> dict[str, float | None] | None:
    """Returns vLLM's `metrics` of a request that began at `started_at`; None where there are several choices."""
    if len(choices) != 1:
        return None
    choice, first, last = choices[0], choices[0].first_token_at, choices[0].last_token_at
    if first is None or last is None:
        return dict.fromkeys(METRICS)
    generation, whole = last - first, last - started_at
    return dict.fromkeys(METRICS) | {
        "time_to_first_token_ms": 1000 * (first - started_at),
        "generation_time_ms": 1000 * generation,
        "queue_time_ms": None if choice.queued is None else 1000 * choice.queued,
        "mean_itl_ms": 1000 * generation / (choice.tokens - 1) if choice.tokens > 1 else None,
        "tokens_per_second": choice.tokens / whole if whole > 0 else None,
    }


def prompt_tokens(choices: Sequence[ChoiceState]) -> int:
    """Returns the tokens of all prompts. A prompt that several choices continue counts once."""
    return sum({choice.prompt: choice.prompt_tokens for choice in choices}.values())


def cached_prompt_tokens(choices: list[ChoiceState]) -> Iterable[int]:
    """Returns for each prompt how many of its tokens no choice had to compute."""
    least: dict[int, int] = {}
    for choice in choices:
        least[choice.prompt] = min(choice.cached_tokens, least.get(choice.prompt, choice.cached_tokens))
    return least.values()


class ResponseWriter:
    """Receives a response's output. This one collects it in the choices, for `response_body` to be called at the
    end."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """Takes new output. Returns False where the client has stopped reading."""
        if choice.message is None:
            choice.texts.append(delta.text)
        else:
            choice.message.feed(delta.text, delta.finish)
        choice.token_ids.extend(delta.tokens)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        return True

    def complete(self, choices: list[ChoiceState]) -> None:
        """Every choice has finished."""

    def fail(self, error: RequestError) -> None:
        """There will be no more output."""

    def tick(self, now: float) -> None:
        """Called a few times a second."""


class GenerationResponse:
    """Owns a response's state from the first dispatch to the last byte. It ends once; `ended` says how."""

    def __init__(
        self,
        header: ResponseHeader,
        requests: dict[RequestId, ChoiceState],
        writer: ResponseWriter,
        meters: ModelMeters,
        now: float,
        *,
        grammar_field: str | None = None,
        trace: str | None = None,
    ) -> None:
        """`grammar_field` is the client's name of the grammar that its output must match, for error texts; `trace` the
        id of its trace, of which its latencies are examples."""
        self._trace = trace
        self.header = header
        self.requests = requests
        self.choices = list(requests.values())
        self.started_at = now
        self.first_token_at: float | None = None
        self.attempts = 1
        self.error: RequestError | None = None
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done with its first token, or when it ends without one."""
        self.ended: asyncio.Future[ResponseOutcome] = loop.create_future()
        self.kept: asyncio.Future[PromptKept] = loop.create_future()
        """Done when an engine says what it keeps of the prompt, where the client wants that."""
        self.writer = writer
        self._meters = meters
        self._grammar_field = grammar_field
        self._unfinished = len(self.choices)
        self._vector_bytes = 0

    async def kv_transfer_params(self) -> dict[str, Any] | None:
        """Waits, for KEPT_TIMEOUT at most, until it is known what an engine keeps of the prompt."""
        done, _ = await asyncio.wait([self.kept], timeout=KEPT_TIMEOUT)
        return kv_transfer_params(self.kept.result() if done else None)

    def record_opened(self, opened: StreamOpened) -> None:
        """Notes what is known of a choice's prompt when its generation starts."""
        choice = self.requests[opened.request]
        choice.prompt_tokens = choice.encoder_tokens + opened.prompt_tokens
        choice.cached_tokens, choice.queued = opened.cached_tokens, opened.queued
        if choice.message is not None:
            choice.message.parser.thinking = opened.thinking

    def record_vector(self, choice: ChoiceState, vector: bytes) -> None:
        """Takes a prompt's vector; fails where all of them are more than a response may hold."""
        choice.vector, self._vector_bytes = vector, self._vector_bytes + len(vector)
        if self._vector_bytes > MAX_VECTOR_BYTES:
            rule = f"vectors of all inputs are more than {MAX_VECTOR_BYTES} bytes together; ask for fewer"
            self.fail(invalid(self.header.prompt_field, rule))

    def record_delta(self, choice: ChoiceState, delta: Delta, now: float) -> None:
        """Takes new output of one choice. Every streamed token passes here: measure a change."""
        if self.ended.done():
            return
        if choice.only_echo:
            delta = without_output(delta)
        elif delta.tokens:
            meters, tokens = self._meters, len(delta.tokens)
            choice.tokens += tokens
            meters.generation_tokens += tokens
            if choice.last_token_at is not None:
                meters.itl.observe(now - choice.last_token_at, self._trace)
            else:
                choice.first_token_at = now
                meters.ttft.observe(now - self.started_at, self._trace)
                if self.first_token_at is None:
                    self.first_token_at = now
                    self._begin()
            choice.last_token_at = now
        self._deliver(choice, delta, now)

    def restore(self, choice: ChoiceState, delta: Delta, now: float) -> None:
        """Takes output that was generated before this response was opened. It counts in no metric."""
        if choice.only_echo:
            delta = without_output(delta)
        choice.tokens += len(delta.tokens)
        if choice.tokens:
            choice.first_token_at = choice.last_token_at = self.first_token_at = now
            self._begin()
        if not self.ended.done():
            self._deliver(choice, delta, now)

    def _deliver(self, choice: ChoiceState, delta: Delta, now: float) -> None:
        if delta.finish is not None:
            choice.finish, choice.stop_reason = delta.finish, delta.stop_reason
        if choice.message is not None:
            choice.message.parser.record_tokens(len(delta.tokens))
        try:
            written = self.writer.write(choice, delta, now)
        except ParserFailed as error:
            log.error("output not parsed", extra={"request": self.header.id, "error": str(error)}, exc_info=error)
            self.fail(RequestError(500, str(error), code="parser_failed"))
            return
        if not written:
            self.end("client too slow")
        elif delta.finish is not None:
            if choice.tokens > 1 and choice.first_token_at is not None:
                self._meters.tpot.observe((now - choice.first_token_at) / (choice.tokens - 1), self._trace)
            self._meters.record_finish(delta.finish, choice.prompt_tokens, choice.tokens)
            self._unfinished -= 1
            if self._unfinished == 0:
                self._complete(now)

    def observe_for(self, key: KeyMeters, now: float) -> None:
        """Counts the latencies of a response that has finished for its API key, too."""
        key.e2e.observe(now - self.started_at)
        if self.first_token_at is not None:
            key.ttft.observe(self.first_token_at - self.started_at)
        for choice in self.choices:
            first, last = choice.first_token_at, choice.last_token_at
            if choice.tokens > 1 and first is not None and last is not None:
                key.tpot.observe((last - first) / (choice.tokens - 1))

    def complete_all(self, now: float) -> None:
        """Ends a response whose choices were all filled in at once."""
        if not self.ended.done():
            self._meters.generation_tokens += sum(choice.tokens for choice in self.choices)
            self._complete(now)

    def _complete(self, now: float) -> None:
        self.writer.complete(self.choices)
        self._meters.record_answer((choice.prompt, choice.tokens) for choice in self.choices)
        self._meters.e2e.observe(now - self.started_at, self._trace)
        self.end("finished")

    def reject(self, rejected: RequestRejected) -> None:
        """Fails with a rejection, in the client's words for the fields."""
        param, message = rejected.field, rejected.message
        if param == "grammar" and self._grammar_field is not None:
            param, message = self._grammar_field, f"{self._grammar_field}: {message}"
        if param in ("messages", "prompt"):  # the other services do not know which of them the client sent
            field = self.header.prompt_field or PROMPT_FIELDS[self.header.kind]
            message = message.replace(f"{param}: ", f"{field}: ", 1) if message.startswith(f"{param}: ") else message
            param = field
        status, wait = STATUS[rejected.kind], rejected.retry_after
        elsewhere = rejected.kind in ("overloaded", "unavailable")
        self.fail(RequestError(status, message, param=param, code=rejected.code, retry_after=wait, elsewhere=elsewhere))

    def fail(self, error: RequestError) -> None:
        """Ends with an error, unless the response has ended already."""
        if not self.ended.done():
            self.error = error
            self.writer.fail(error)
            self.end("failed")

    def end(self, outcome: ResponseOutcome) -> None:
        """Ends the response; the first outcome counts."""
        if not self.ended.done():
            self.ended.set_result(outcome)
            self._begin()

    def _begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


def without_output(delta: Delta) -> Delta:
    """Returns the delta for a client that wants only its prompt back: the one generated token is dropped."""
    finish: FinishReason | None = None if delta.finish is None else "length"
    return Delta(delta.request, delta.attempt, delta.position, (), "", finish)


def response_body(
    header: ResponseHeader,
    choices: list[ChoiceState],
    options: ResponseOptions,
    started_at: float = 0.0,
    transfer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a response that is not streamed, for `LazyEncoder`; `started_at`: when the request came; `transfer`: its
    `kv_transfer_params`."""
    known = {choice.prompt: choice.prompt_logprobs for choice in choices if choice.prompt_logprobs}
    for choice in choices:  # one choice of each prompt has received them
        choice.prompt_logprobs = known.get(choice.prompt, choice.prompt_logprobs)
    chat = header.kind == "chat"
    batch = chat and choices[-1].prompt > 0
    bodies = LazyArray(
        (_chat_choice(choice, options) if chat else _completion_choice(choice, options))
        # of a batch of chats each choice has its own prompt
        | (_prompt_fields(choice, options) if batch else {})
        for choice in choices
    )
    answer = {**header.fields(chunk=False), "choices": bodies, "usage": usage(choices), **UNUSED_OF_ANSWER}
    answer["kv_transfer_params"] = transfer
    if chat:
        answer |= UNUSED_OF_CHAT
        if not batch:
            answer |= _prompt_fields(choices[0], options)
    if options.metrics:
        answer["metrics"] = timing_metrics(choices, started_at)
    return answer


def _chat_choice(choice: ChoiceState, options: ResponseOptions) -> dict[str, Any]:
    naming = by_id if options.tokens_as_ids else by_text
    message = {"content": "".join(choice.texts)} if choice.message is None else choice.message.body()
    if choice.echo:
        message["content"] = choice.echo + (message["content"] or "")
    return {
        "index": choice.index,
        "message": UNUSED_OF_MESSAGE | message | {"role": options.role},
        "logprobs": lazy_chat_logprobs(choice.logprobs, naming) if options.logprobs else None,
        "finish_reason": choice.finish_reason,
        **_vllm_choice(choice, options),
    }


def _completion_choice(choice: ChoiceState, options: ResponseOptions) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.echo + "".join(choice.texts),
        "logprobs": _completion_logprobs(choice, options) if options.logprobs else None,
        "finish_reason": choice.finish,
        **_vllm_choice(choice, options),
        **UNUSED_OF_TEXT,
        **_prompt_fields(choice, options),
    }


def _vllm_choice(choice: ChoiceState, options: ResponseOptions) -> dict[str, Any]:
    fields = {"stop_reason": choice.stop_reason, **UNUSED_OF_CHOICE}
    if options.token_ids:
        fields["token_ids"] = choice.token_ids
    if options.weight_versions:
        fields["weight_versions"] = weight_versions(choice.tokens)
    return fields


def _completion_logprobs(choice: ChoiceState, options: ResponseOptions) -> dict[str, Any]:
    naming = by_id if options.tokens_as_ids else by_text
    logprobs, _ = completion_logprobs(choice.logprobs, len(choice.echo), naming)
    if options.echo_logprobs is not None:
        logprobs = choice.echoed_logprobs(naming, options.echo_logprobs).followed_by(logprobs)
    return logprobs.lazy_body()


def _prompt_fields(choice: ChoiceState, options: ResponseOptions) -> dict[str, Any]:
    """vLLM's fields about the prompt: in each choice of a completion, once in a chat."""
    fields: dict[str, Any] = {}
    if options.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, options.prompt_logprobs)
    if options.token_ids:
        fields["prompt_token_ids"] = choice.prompt_ids
    if options.prompt_text:
        fields["prompt_text"] = choice.prompt_text
    return fields
