"""The tokenizer's shell: short prompts at once, long ones on threads, so that the heart goes on beating."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple, assert_never

from services.tokenizer import metrics
from services.tokenizer.client_template import ClientTemplates
from services.tokenizer.encoding import Encoding, RenderedPrompt, rejected
from services.tokenizer.refusal import PromptRefused
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus, PayloadTooLarge, Undelivered
from shared.ids import InstanceId, ModelName
from shared.messages.coordinator import Route
from shared.messages.gateway import Failed, Rejected
from shared.messages.lifecycle import TokenizerReport
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    Encode,
    Prompt,
    Refused,
    TextPrompt,
    Tokenize,
    TokenizerAnswer,
    TokenizerQuestion,
    TokenPrompt,
)
from shared.tokens import count

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

INLINE_BYTES = 4096
"""Prompts up to this size are tokenized on the event loop: about a millisecond, less than a thread's detour
under load would cost the others."""

MAX_LONG = 16
"""Long prompts on their way at a time; short ones overtake them until the next long one has to wait."""


class TokenizerActor(Actor):
    """Holds what is being tokenized, and nothing of any request once it has been sent on."""

    service = "tokenizer"
    tick_every = 0.25
    inbox_limit = 1024
    """Beyond it the bus's own bounded queue fills."""

    def __init__(self, bus: Bus, instance: InstanceId, model: ModelName, encoding: Encoding, threads: int = 2) -> None:
        super().__init__(bus, instance)
        self._model = model
        self._encoding = encoding
        self._client_templates = ClientTemplates()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._places = asyncio.Semaphore(MAX_LONG)
        self._long: set[asyncio.Task[Any]] = set()
        self._bug: BaseException | None = None

    def hears(self) -> Sequence[Hears[Any]]:
        return [
            Hears(topics.tokenize(self._model), intake=True),
            Hears(topics.tokenizer_questions(self._model), intake=True, asked=True),
        ]

    async def handle(self, message: Any) -> None:
        if self._bug is not None:
            raise self._bug
        match message:
            case Tokenize():
                await self._tokenize(message)
            case Undelivered():
                await self._unrouted(message)
            case Tick():
                pass
            case _:
                raise TypeError(f"a tokenizer hears no {type(message).__name__}")

    async def answer(self, question: TokenizerQuestion) -> TokenizerAnswer | asyncio.Future[TokenizerAnswer]:
        match question:
            case Encode():
                short = self._is_short(question.prompt)
            case Decode():
                short = len(question.tokens) <= INLINE_BYTES
            case _:
                assert_never(question)
        return self._encoding.answer(question) if short else await self._aside(self._answer_long(question))

    async def _answer_long(self, question: TokenizerQuestion) -> TokenizerAnswer:
        if isinstance(question, Encode):
            try:
                question = Encode(await self._rendered(question.prompt), question.return_strings)
            except PromptRefused as refused:
                return Refused(refused.message, refused.field)
        return await self._on_thread(self._encoding.answer, question)

    def is_idle(self) -> bool:
        return not self._long

    def load(self) -> int:
        return len(self._long)

    def tokenizer_report(self) -> TokenizerReport:
        return TokenizerReport(model=self._model, dialect=self._encoding.dialect)

    async def tear_down(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _tokenize(self, message: Tokenize) -> None:
        started = time.monotonic()
        if self._is_short(message.prompt):
            await self._send(message, self._encoding.route(message, message.prompt), started)
        else:
            await self._aside(self._tokenize_long(message, started))

    def _is_short(self, prompt: Prompt) -> bool:
        return _size(prompt) <= INLINE_BYTES and not self._encoding.brings_template(prompt)

    async def _aside(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Goes on with `work` beside the next messages; waits for a place where too much is going on already."""
        await self._places.acquire()
        task = asyncio.create_task(work)
        self._long.add(task)
        metrics.IN_FLIGHT.set(len(self._long))
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        """A bug in a task is raised at the next message or tick, where it ends the process as any other."""
        self._long.discard(task)
        self._places.release()
        metrics.IN_FLIGHT.set(len(self._long))
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()

    async def _tokenize_long(self, message: Tokenize, started: float) -> None:
        try:
            prompt = await self._rendered(message.prompt)
        except PromptRefused as refused:
            await self._send(message, rejected(message, refused), started)
        else:
            await self._send(message, await self._on_thread(self._encoding.route, message, prompt), started)

    async def _rendered(self, prompt: Prompt) -> Prompt:
        """The prompt itself, or the text of a chat that brings its own template. Raises PromptRefused."""
        if isinstance(prompt, ChatPrompt) and self._encoding.brings_template(prompt):
            text = await self._client_templates.render(prompt, self._encoding.special_tokens)
            return RenderedPrompt(text, add_special_tokens=False)
        return prompt

    async def _on_thread(self, function: Callable[[*Ts], R], *arguments: *Ts) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _send(self, message: Tokenize, outcome: Route | Rejected, started: float) -> None:
        if isinstance(outcome, Route):
            outcome = await self._routed(message, outcome) or outcome
        if isinstance(outcome, Rejected):
            metrics.REJECTIONS.labels(outcome.field or "").inc()
            log.info("rejected", extra={"request": message.request, "field": outcome.field, "why": outcome.message})
            await self.bus.publish(topics.gateway_inbox(message.gateway), outcome)
            return
        seconds = time.monotonic() - started
        metrics.PROMPTS.labels(_kind(message.prompt)).inc()
        metrics.TOKENS.inc(outcome.generation.prompt_length)
        metrics.SECONDS.observe(seconds)
        log.info(
            "tokenized",
            extra={
                "request": message.request,
                "attempt": message.attempt,
                "tokens": outcome.generation.prompt_length,
                "resumed": count(message.resume),
                "ms": round(seconds * 1e3, 2),
            },
        )

    async def _routed(self, message: Tokenize, route: Route) -> Rejected | None:
        """Sends it on; a refusal where it does not fit into a message of the bus."""
        try:
            await self.bus.publish(topics.route(), route, confirm=True)
        except PayloadTooLarge as error:
            return Rejected(
                request=message.request,
                attempt=message.attempt,
                kind="too_large",
                message=f"the prompt of {route.generation.prompt_length} tokens is too large: {error.size} bytes on "
                f"the bus, which takes {error.limit} at most",
                field="messages" if isinstance(message.prompt, ChatPrompt) else "prompt",
            )
        return None

    async def _unrouted(self, undelivered: Undelivered) -> None:
        route = undelivered.message
        if not isinstance(route, Route):
            raise TypeError(f"a tokenizer confirms no {type(route).__name__}")
        generation = route.generation
        metrics.UNROUTED.inc()
        log.warning("no coordinator", extra={"request": generation.request, "attempt": generation.attempt})
        failed = Failed(generation.request, generation.attempt, "no coordinator is there")
        await self.bus.publish(topics.gateway_inbox(generation.gateway), failed)


def _size(prompt: Prompt) -> int:
    """About how many bytes there are to go through."""
    match prompt:
        case ChatPrompt():
            return len(prompt.messages) + len(prompt.tools or b"") + sum(map(_weight, prompt.template_kwargs.values()))
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.tokens) // 16
        case _:
            assert_never(prompt)


def _weight(value: Any) -> int:
    """A template variable's size; documents and the like are taken for long ones."""
    return len(value) if isinstance(value, str) else INLINE_BYTES if isinstance(value, (list, dict)) else 0


def _kind(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt():
            return "chat"
        case TextPrompt():
            return "text"
        case TokenPrompt():
            return "tokens"
        case _:
            assert_never(prompt)
