"""One HTTP request being answered: its choices, its times, and how it ended."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from services.gateway.answers.choice import ChoiceState
from services.gateway.answers.heading import Heading
from services.gateway.api.errors import STATUS, ApiError
from services.gateway.metrics import ModelMeters
from shared.ids import RequestId
from shared.messages.gateway import Delta, PromptPart, Rejected, StreamOpened
from shared.messages.generation import FinishReason

Outcome = Literal["finished", "failed", "client left", "client too slow"]


class Outlet(Protocol):
    """Where an exchange's output goes: a stream or one body."""

    def delta(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """Takes new output. False where the client has stopped reading."""

    def completed(self, choices: list[ChoiceState], now: float) -> None:
        """Every choice has finished."""

    def failed(self, error: ApiError) -> None:
        """There will be no more."""

    def tick(self, now: float) -> None:
        """Called some times a second."""


class Exchange:
    """Owns the answer's state from the first dispatch to the last byte. Ends once: `ended` tells how."""

    def __init__(
        self,
        heading: Heading,
        requests: dict[RequestId, ChoiceState],
        outlet: Outlet,
        meters: ModelMeters,
        now: float,
        *,
        grammar_field: str | None = None,
    ) -> None:
        """`grammar_field`: what the client calls the grammar that its output must match."""
        self.heading = heading
        self.requests = requests
        self.choices = list(requests.values())
        self.started = now
        self.first_token_at: float | None = None
        self.attempts = 1
        self.error: ApiError | None = None
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._outlet = outlet
        self._meters = meters
        self._grammar_field = grammar_field
        self._unfinished = len(self.choices)

    def opened(self, opened: StreamOpened) -> None:
        choice = self.requests[opened.request]
        choice.prompt_tokens, choice.cached_tokens = opened.prompt_tokens, opened.cached_tokens
        if choice.speech is not None:
            choice.speech.parser.thinking = opened.thinking

    def scored(self, part: PromptPart) -> None:
        self.requests[part.request].scored(part)

    def delta(self, choice: ChoiceState, delta: Delta, now: float) -> None:
        """New output of one choice. The path of every streamed token: measure a change."""
        if self.ended.done():
            return
        if delta.tokens and not choice.only_echo:
            self._measure(choice, len(delta.tokens), now)
        if choice.only_echo:
            delta = without_output(delta)
        if delta.finish is not None:
            choice.finish, choice.stop_reason = delta.finish, delta.stop_reason
        if not self._outlet.delta(choice, delta, now):
            self.end("client too slow")
        elif delta.finish is not None:
            self._finished(choice, now)

    def _measure(self, choice: ChoiceState, tokens: int, now: float) -> None:
        meters = self._meters
        choice.tokens += tokens
        meters.generation_tokens += tokens
        if choice.last_at is not None:
            meters.itl.observe(now - choice.last_at)
        else:
            choice.first_at = now
            meters.ttft.observe(now - self.started)
            if self.first_token_at is None:
                self.first_token_at = now
        choice.last_at = now

    def _finished(self, choice: ChoiceState, now: float) -> None:
        if choice.tokens > 1 and choice.first_at is not None:
            self._meters.tpot.observe((now - choice.first_at) / (choice.tokens - 1))
        self._unfinished -= 1
        if self._unfinished == 0:
            self._outlet.completed(self.choices, now)
            self._meters.e2e.observe(now - self.started)
            self.end("finished")

    def complete(self, now: float) -> None:
        """Every choice is known, at once."""
        if not self.ended.done():
            self._meters.generation_tokens += sum(choice.tokens for choice in self.choices)
            self._meters.e2e.observe(now - self.started)
            self._outlet.completed(self.choices, now)
            self.end("finished")

    def rejected(self, rejected: Rejected) -> None:
        param, message = rejected.field, rejected.message
        if param == "grammar" and self._grammar_field is not None:
            param, message = self._grammar_field, f"{self._grammar_field}: {message}"
        if param in ("messages", "prompt"):  # the ring does not know which of them it came from
            param = "messages" if self.heading.kind == "chat" else "prompt"
        status, wait = STATUS[rejected.kind], rejected.retry_after
        self.fail(ApiError(status, message, param=param, code=rejected.code, retry_after=wait))

    def fail(self, error: ApiError) -> None:
        if not self.ended.done():
            self.error = error
            self._outlet.failed(error)
            self.end("failed")

    def client_left(self) -> None:
        self.end("client left")

    def end(self, outcome: Outcome) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    def tick(self, now: float) -> None:
        if not self.ended.done():
            self._outlet.tick(now)


def without_output(delta: Delta) -> Delta:
    """For a client that wants its prompt back and nothing else: the one token was generated in vain."""
    finish: FinishReason | None = None if delta.finish is None else "length"
    return Delta(delta.request, delta.attempt, delta.position, (), "", finish)
