"""The tokenizer's shell: short prompts at once, long ones on threads, so that heartbeats and shorter ones go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, assert_never

from msgspec.structs import replace

from services.tokenizer import metrics
from services.tokenizer.client_template import ClientTemplates
from services.tokenizer.core.encoder import PromptEncoder, RenderedPrompt, rejected
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.encoding_lanes import EncodingLanes
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus, BusError, PayloadTooLarge, Undelivered
from shared.ids import FIRST_ATTEMPT, Attempt, GatewayId, InstanceId, ModelName, RequestId
from shared.messages.coordinator import RequestEnded, Route, Withdraw
from shared.messages.gateway import PromptsHeld, RequestFailed, RequestRejected
from shared.messages.lifecycle import TokenizerReport
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    EmbedsPrompt,
    Encode,
    InfillPrompt,
    PairPrompt,
    Prompt,
    ReadTokenizerInfo,
    TextPrompt,
    Tokenize,
    TokenizerRefusal,
    TokenizerReply,
    TokenizerRequest,
    TokenPrompt,
)
from shared.packing import count
from shared.reliability.recent import AttemptFence
from shared.telemetry.logs import record_trace
from shared.telemetry.tracing import TRACING

R = TypeVar("R")

log = logging.getLogger(__name__)

INLINE_BYTES = 4096
"""Prompts up to this size are tokenized on the event loop: about a millisecond, less than a thread's detour
under load would cost the others."""

HELD_INTERVAL = 1.0
"""Seconds from one `PromptsHeld` to the next: a fraction of what gateways wait for."""

QUESTION_TIMEOUT = 9.0
"""Seconds that a question's long prompt may wait for a thread: its gateway waits for 10."""

MAX_WITHDRAWN = 1024
"""Requests given up that are remembered: a prompt that the inbox had no room for may come behind its withdrawal."""

KINDS: dict[type[Prompt], str] = {
    ChatPrompt: "chat",
    TextPrompt: "text",
    InfillPrompt: "infill",
    TokenPrompt: "tokens",
    PairPrompt: "pair",
    EmbedsPrompt: "embeds",
}
"""Each kind of prompt and its label in the metrics."""


@dataclass(slots=True)
class _HeldPrompt:
    attempt: Attempt
    gateway: GatewayId | None
    """Which hears that the prompt is here; None: one of an older release, or one that asked a question, which it does
    not send again."""
    task: asyncio.Task[Any]
    on_thread: bool = False
    """Whether it is being encoded, which nothing stops."""

    def call_off(self) -> None:
        """Drops it, its rendering included, unless a thread has it."""
        if not self.on_thread:
            self.task.cancel()


class TokenizerActor(Actor):
    """Holds what is being tokenized, and nothing of any request once it has been sent on."""

    service = "tokenizer"
    tick_every = 0.25
    inbox_limit = 1024
    """Beyond it the bus's own bounded queue fills."""

    def __init__(
        self, bus: Bus, instance: InstanceId, model: ModelName, encoder: PromptEncoder, threads: int = 2
    ) -> None:
        super().__init__(bus, instance)
        self._model = model
        self._encoder = encoder
        self._client_templates = ClientTemplates()
        self._lanes = EncodingLanes(threads, encoder.forget_words)
        self._long: set[asyncio.Task[Any]] = set()
        self._held: dict[RequestId, _HeldPrompt] = {}
        """The newest attempt of each request whose prompt is long and not yet tokenized, and long questions."""
        self._fence = AttemptFence(MAX_WITHDRAWN)
        self._failure: BaseException | None = None

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Requests to be tokenized and sent on to a coordinator, and requests for tokens or text that are answered; and
        which requests gateways give up."""
        return [
            TopicSubscription(topics.tokenize(self._model), intake=True),
            TopicSubscription(topics.tokenizer_requests(self._model), intake=True, request=True),
            TopicSubscription(topics.withdrawals()),
        ]

    async def handle(self, message: Any) -> None:
        """Tokenizes a request and sends it on, beside the next messages where it takes long. Raises what an earlier
        long one raised."""
        if self._failure is not None:
            raise self._failure
        if isinstance(message, Tokenize):
            record_trace(message.request, message.trace)
        match message:
            case Tokenize() if self._fence.is_closed(message.request, message.attempt):
                metrics.WITHDRAWN.inc()
            case Tokenize() if message.suspect_until is not None and self.isolated is None:
                await self._handle_alone(message)
            case Tokenize():
                started, size = time.monotonic(), _size(message.prompt)
                if self._is_short(message.prompt):
                    await self._send(message, self._encoder.route(message, message.prompt), started)
                elif (full := self._lanes.refusal(size)) is not None:
                    await self._send(message, _overloaded(message, full), started)
                else:
                    task = self._start_long(self._tokenize_long(message, started), size)
                    gateway = message.gateway if message.hears_held else None
                    self._hold(message.request, _HeldPrompt(message.attempt, gateway, task))
            case Withdraw():
                self._withdraw(message)
            case RequestEnded():
                pass  # for coordinators
            case Undelivered():
                await self._undelivered(message)
            case Tick():
                self._lanes.give_back_memory()
            case _:
                raise TypeError(f"a tokenizer takes no {type(message).__name__}")

    def _hold(self, request: RequestId, held: _HeldPrompt) -> None:
        """At once, as the next message may be its withdrawal, before the task has begun. An earlier attempt
        gives way."""
        if (earlier := self._held.get(request)) is not None:
            earlier.call_off()
        self._held[request] = held

    def _withdraw(self, withdrawn: Withdraw) -> None:
        """Its gateway has given the request up: what waits is dropped, and what is being encoded goes nowhere."""
        self._fence.close(withdrawn.request, withdrawn.attempt)
        held = self._held.get(withdrawn.request)
        if held is not None and held.attempt <= withdrawn.attempt:
            metrics.WITHDRAWN.inc()
            del self._held[withdrawn.request]
            held.call_off()

    async def _handle_alone(self, suspect: Tokenize) -> None:
        """A process died with this request: nothing else is tokenized beside it, and the lifecycle says so."""
        if self._long:
            await asyncio.wait(self._long)
        await self.isolate(suspect.request)
        await self.handle(suspect)
        if self._long:
            await asyncio.wait(self._long)
        if self._failure is None:
            await self.isolate(None)

    async def respond(self, request: TokenizerRequest) -> TokenizerReply | asyncio.Future[TokenizerReply]:
        """The answer, or a future of it where it takes long."""
        match request:
            case Encode():
                short = self._is_short(request.prompt)
            case Decode():
                short = len(request.tokens) <= INLINE_BYTES
            case ReadTokenizerInfo():
                return self._encoder.answer(request)
            case _:
                assert_never(request)
        if short:
            return self._encoder.answer(request)
        if request.request is not None and self._fence.is_closed(request.request, FIRST_ATTEMPT):
            metrics.WITHDRAWN.inc()
            return TokenizerRefusal("given up before its prompt was tokenized", kind="overloaded")
        size = _size(request.prompt) if isinstance(request, Encode) else len(request.tokens)
        if (full := self._lanes.refusal(size)) is not None:
            return TokenizerRefusal(full, kind="overloaded")
        task = self._start_long(self._answer_long(request, size), size)
        if request.request is not None:
            self._hold(request.request, _HeldPrompt(FIRST_ATTEMPT, None, task))
            task.add_done_callback(partial(self._end_question, request.request))
        return task

    def _end_question(self, name: RequestId, _: asyncio.Task[Any]) -> None:
        self._held.pop(name, None)

    async def _answer_long(self, request: Encode | Decode, size: int) -> TokenizerReply:
        """Cancelled when its gateway withdraws it, unless a thread has it."""
        held = None if request.request is None else self._held.get(request.request)
        if isinstance(request, Encode):
            try:
                request = replace(request, prompt=await self._render(request.prompt))
            except PromptRefused as refused:
                return TokenizerRefusal(refused.message, refused.field)
            size = _size(request.prompt)
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT) as waiting, self._lanes.turn(size) as thread:
                waiting.reschedule(None)
                if held is not None:
                    held.on_thread = True
                return await thread.run(self._encoder.answer, request)
        except TimeoutError:
            why = f"no thread was free for {QUESTION_TIMEOUT:g} s: longer prompts are being tokenized"
            return TokenizerRefusal(why, kind="overloaded")

    async def background(self) -> None:
        """Says every now and then which prompts are here, beside whatever `handle` waits for."""
        while True:
            await asyncio.sleep(HELD_INTERVAL)
            held: defaultdict[GatewayId, list[tuple[RequestId, Attempt]]] = defaultdict(list)
            for request, each in self._held.items():
                if each.gateway is not None:
                    held[each.gateway].append((request, each.attempt))
            for gateway, requests in held.items():
                with contextlib.suppress(BusError):
                    await self.bus.publish(topics.gateway_inbox(gateway), PromptsHeld(self.instance, tuple(requests)))

    def is_idle(self) -> bool:
        """Whether no long prompt is being tokenized."""
        return not self._long

    def load(self) -> int:
        """Long prompts that are being tokenized."""
        return len(self._long)

    def tokenizer_report(self) -> TokenizerReport:
        """What its heartbeats say: the model, and the markup that it speaks."""
        return TokenizerReport(model=self._model, dialect=self._encoder.dialect)

    async def tear_down(self) -> None:
        """Drops long prompts that no thread has begun."""
        for task in self._long:
            task.cancel()
        self._lanes.close()

    def _is_short(self, prompt: Prompt) -> bool:
        """Whether there are few bytes to go through, about, and no template of the client's own to render."""
        return _size(prompt) <= INLINE_BYTES and not self._encoder.brings_template(prompt)

    def _start_long(self, work: Coroutine[Any, Any, R], size: int) -> asyncio.Task[R]:
        """Starts `work` on a prompt of `size` bytes beside the next messages."""
        self._lanes.add(size)
        task = asyncio.create_task(work)
        self._long.add(task)
        metrics.IN_FLIGHT.set(len(self._long))
        task.add_done_callback(partial(self._finished, size))
        return task

    def _finished(self, size: int, task: asyncio.Task[Any]) -> None:
        """A bug in a task is raised at the next message or tick, where it ends the process as any other."""
        self._long.discard(task)
        self._lanes.remove(size)
        metrics.IN_FLIGHT.set(len(self._long))
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _tokenize_long(self, message: Tokenize, started: float) -> None:
        """Sends nothing of a request that was dispatched again, or withdrawn, meanwhile."""
        held = self._held.get(message.request)
        if held is None or held.attempt != message.attempt:
            return
        outcome: Route | RequestRejected
        try:
            prompt = await self._render(message.prompt)
            async with self._lanes.turn(_size(prompt)) as thread:
                if self._held.get(message.request) is not held:
                    return
                held.on_thread = True
                outcome = await thread.run(self._encoder.route, message, prompt)
        except PromptRefused as refused:
            outcome = rejected(message, refused)
        if self._held.get(message.request) is held:
            del self._held[message.request]
            await self._send(message, outcome, started)

    async def _render(self, prompt: Prompt) -> Prompt:
        """The prompt itself, or the text of a chat that brings its own template. Raises PromptRefused."""
        if isinstance(prompt, ChatPrompt) and self._encoder.brings_template(prompt):
            text = await self._client_templates.render(prompt, self._encoder.special_tokens)
            return RenderedPrompt(text, add_special_tokens=prompt.add_special_tokens, chat=prompt)
        return prompt

    async def _send(self, message: Tokenize, outcome: Route | RequestRejected, started: float) -> None:
        """The request to a coordinator; or a rejection to its gateway, also of one too large for the bus."""
        if isinstance(outcome, Route):
            try:
                await self.bus.publish(topics.route(), outcome, confirm=True)
            except PayloadTooLarge as error:
                outcome = _too_large(message, outcome, error)
        if isinstance(outcome, RequestRejected):
            metrics.REJECTIONS.labels(outcome.field or "").inc()
            log.info("rejected", extra={"request": message.request, "field": outcome.field, "why": outcome.message})
            await self.bus.publish(topics.gateway_inbox(message.gateway), outcome)
            return
        seconds, ended = time.monotonic() - started, time.time()  # at once: a busy machine may stop this in between
        tokens = outcome.generation.prompt_length
        metrics.PROMPTS.labels(KINDS[type(message.prompt)]).inc()
        metrics.TOKENS.inc(tokens)
        metrics.SECONDS.observe(seconds)
        TRACING.record("tokenize", message.trace, ended - seconds, ended, prompt_tokens=tokens)
        log.info(
            "tokenized",
            extra={
                "request": message.request,
                "attempt": message.attempt,
                "tokens": tokens,
                "resumed": count(message.resume),
                "ms": round(seconds * 1e3, 2),
            },
        )

    async def _undelivered(self, undelivered: Undelivered) -> None:
        route = undelivered.message
        if not isinstance(route, Route):
            raise TypeError(f"a tokenizer confirms no {type(route).__name__}")
        generation = route.generation
        metrics.UNROUTED.inc()
        log.warning("no coordinator", extra={"request": generation.request, "attempt": generation.attempt})
        failed = RequestFailed(generation.request, generation.attempt, "no coordinator is there")
        await self.bus.publish(topics.gateway_inbox(generation.gateway), failed)


def _size(prompt: Prompt) -> int:
    """About how many bytes of text there are to go through; a token costs what a quarter of a byte does."""
    match prompt:
        case ChatPrompt():
            variables = sum(map(_weight, prompt.template_kwargs.values()))
            rows = sum(len(each.rows) for each in prompt.embeds) // 256
            return len(prompt.messages) + len(prompt.tools or b"") + variables + rows
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.tokens) // 16 + (0 if prompt.encoded is None else len(prompt.encoded.rows) // 256)
        case EmbedsPrompt():  # of which nothing but digests is made
            return len(prompt.embeds.rows) // 256
        case PairPrompt():
            return len(prompt.text) + len(prompt.second)
        case InfillPrompt():
            return len(prompt.prefix) + len(prompt.suffix)
        case _:
            assert_never(prompt)


def _weight(value: Any) -> int:
    """A template variable's size; documents and the like are taken for long ones."""
    return len(value) if isinstance(value, str) else INLINE_BYTES if isinstance(value, (list, dict)) else 0


def _overloaded(message: Tokenize, why: str) -> RequestRejected:
    return RequestRejected(
        request=message.request, attempt=message.attempt, kind="overloaded", message=why, retry_after=1.0
    )


def _too_large(message: Tokenize, route: Route, error: PayloadTooLarge) -> RequestRejected:
    return RequestRejected(
        request=message.request,
        attempt=message.attempt,
        kind="too_large",
        message=f"the prompt of {route.generation.prompt_length} tokens is too large: {error.size} bytes on "
        f"the bus, which takes {error.limit} at most",
        field="messages" if isinstance(message.prompt, ChatPrompt) else "prompt",
    )
