"""When the provider may be asked that takes what cannot be served here in time: its budget, its breaker, and how long
requests wait here. Pure: time is an argument, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from services.gateway.core.rate_limits import TokenBucket
from shared.ids import ModelName
from shared.reliability.retry import Backoff, CircuitBreaker

BREAKER_FAILURES = 3
BREAKER_SPAN = 1.0
"""Seconds over which failures in a row must be spread to open the breaker."""
BREAKER_BACKOFF = Backoff(5.0, 120.0)
DAY = 86_400.0
RECENT_STARTS = 8
"""First tokens whose waits are remembered for each model."""

ProviderDialect = Literal["openai", "vllm", "baton"]
"""The fields that the provider understands. openai: OpenAI's. vllm: those, vLLM's, and token ids, which say the same
only to the same model. baton: another server like this one, with the same model."""

BudgetRefusal = Literal["breaker open", "too many open", "too many a minute", "too many tokens a day"]


class NotForwardable(Exception):
    """The provider could not do with a request what this server would; the text says why, and quotes no value."""


class ModelNames(NamedTuple):
    """What the provider calls the models."""

    by_name: Mapping[str, str]
    default: str | None
    """For all other models; None: they are called there as here, or (with `by_name`) are not there."""

    @classmethod
    def parse(cls, entries: Sequence[str]) -> ModelNames:
        """Reads `NAME=PROVIDERS_NAME`, or `PROVIDERS_NAME` for all others. Raises ValueError."""
        by_name: dict[str, str] = {}
        default: str | None = None
        for entry in entries:
            name, equals, there = entry.partition("=")
            if not equals and default is None and name:
                default = name
            elif equals and name and there and name not in by_name:
                by_name[name] = there
            else:
                raise ValueError(f"{entry!r}: NAME=NAME_THERE is allowed once for each model, and one NAME_THERE alone")
        return cls(by_name, default)

    def at_provider(self, name: str | None) -> str:
        """Raises NotForwardable for a model that is not there, or where a request names none."""
        there = self.by_name.get(name, self.default) if name is not None else self.default
        if there is None and name is not None and not self.by_name:
            return name
        if there is None:
            raise NotForwardable("model: the provider has no name for it")
        return there


class OverflowLimits(NamedTuple):
    """The most that the provider is asked for by one gateway."""

    concurrency: int
    """Requests that are open there at once."""
    requests_per_minute: int
    tokens_per_day: int
    """Prompts and outputs, as the provider's `usage` counts them."""


class OverflowBudget:
    """Owns what the provider has been asked for, and whether it answers.

    Tokens are counted when an answer has ended, so that a day's may be exceeded by what is open then.
    """

    def __init__(self, limits: OverflowLimits, now: float) -> None:
        self._limits = limits
        self._requests = TokenBucket(limits.requests_per_minute, now)
        self._breaker = CircuitBreaker(BREAKER_FAILURES, BREAKER_SPAN, BREAKER_BACKOFF)
        self._day_began, self._tokens = now, 0
        self.open = 0
        """Requests that are open at the provider."""

    def refusal(self, now: float) -> BudgetRefusal | None:
        """Why the provider is not to be asked now, or None."""
        self._breaker.update(now)
        if now - self._day_began >= DAY:
            self._day_began, self._tokens = now, 0
        if self._breaker.is_open:
            return "breaker open"
        if self.open >= self._limits.concurrency:
            return "too many open"
        if self._requests.level(now) < 1:
            return "too many a minute"
        return "too many tokens a day" if self._tokens >= self._limits.tokens_per_day else None

    def start(self, now: float) -> None:
        """Counts a request that is sent there; to be called where there is no `refusal`, and to be ended by `end`."""
        self._requests.take(1, now)
        self.open += 1

    def end(self, tokens: int) -> None:
        """The request is over and has used so many tokens."""
        self.open -= 1
        self._tokens += tokens

    def record_answer(self) -> None:
        """The provider has taken a request."""
        self._breaker.record_success()

    def record_failure(self, now: float) -> None:
        """The provider was not reached, was too slow, or refused what is no fault of the request."""
        self._breaker.record_failure(now)

    @property
    def breaker_is_open(self) -> bool:
        """Whether the provider is left alone for its failures, as of the last `refusal`."""
        return self._breaker.is_open


class FirstTokenDelays:
    """Owns since when requests wait for their first token, and how long the last ones did.

    Predicts by delay history: as long as those waited whose turn came last; where nobody's came for a while, as long as
    the first in line waits by now (Ibrahim, Whitt: Real-Time Delay Estimation Based on Delay History, 2009).
    """

    def __init__(self, memory_s: float) -> None:
        """`memory_s`: seconds after which a wait that is over says nothing of the next one."""
        self._memory_s = memory_s
        self._waiting: dict[ModelName, dict[object, float]] = {}
        """When each request came that waits, oldest first."""
        self._started: dict[ModelName, deque[tuple[float, float]]] = {}
        """Of the last ones: when their first token came, and how long they had waited."""

    def record_arrival(self, request: object, model: ModelName, now: float) -> None:
        """A request was sent to the engines of `model`."""
        self._waiting.setdefault(model, {})[request] = now

    def record_end_of_wait(self, request: object, model: ModelName, now: float, *, started: bool) -> None:
        """Its first token has come (`started`), or it has ended without one."""
        waiting = self._waiting[model]
        arrival = waiting.pop(request)
        if not waiting:
            del self._waiting[model]
        if started:
            self._started.setdefault(model, deque(maxlen=RECENT_STARTS)).append((now, now - arrival))

    def predicted(self, model: ModelName, now: float) -> float:
        """Seconds that a request that comes now is expected to wait for its first token; 0 where nothing is known."""
        started = self._started.get(model)
        if started and (recent := [wait for at, wait in started if now - at <= self._memory_s]):
            return median(recent)
        self._started.pop(model, None)
        waiting = self._waiting.get(model)
        return now - next(iter(waiting.values())) if waiting else 0.0
