"""What a service writes: what it hears, what it does, when it is done, what it reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared.bus import Bus, Undelivered
from shared.ids import InstanceId, new_incarnation
from shared.messages.lifecycle import EngineReport, Phase, Service, StoreReport, TokenizerReport, WorkerReport
from shared.topics import Topic

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Hears(Generic[M]):
    """A subscription. An intake closes when the actor drains; others stay until it is idle."""

    topic: Topic[M]
    intake: bool = False
    asked: bool = False
    """Messages are questions: `Actor.answer` is called instead of `handle`, and its result sent back."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time as a message: handed to `handle` every `Actor.tick_every` seconds."""

    now: float
    """Monotonic seconds."""
    alive_now: float
    """The bus's liveness clock: stands still while the bus is away."""


@dataclass(frozen=True, slots=True)
class Asked(Generic[M]):
    """A question in the inbox, and where its answer goes."""

    question: M
    reply: Any


class Actor:
    """Base of every service's shell. One message at a time, so no locks. A bug raises and ends the process."""

    service: Service
    tick_every: float | None = None
    inbox_limit: int = 65_536
    """Messages waiting; above it the bus's own bounded queue fills."""

    def __init__(self, bus: Bus, instance: InstanceId) -> None:
        self.bus = bus
        self.instance = instance
        self.incarnation = new_incarnation()
        """As its lifecycle says; what it leases from others ends with it."""

    def hears(self) -> Sequence[Hears[Any]]:
        """Every subscription, made before `set_up`."""
        raise NotImplementedError

    async def set_up(self) -> None:
        """Whatever must be there before the first message is handled."""

    async def background(self) -> None:
        """Runs beside the inbox from `set_up` until the end; may return at once. What it raises ends the process."""

    async def handle(self, message: Any) -> None:
        """Handles one message, `Tick` or `Undelivered`."""
        raise NotImplementedError

    async def answer(self, question: Any) -> Any:
        """Answers a question of a topic with `asked`. A future as the answer is passed on once it is done, and the
        next message handled meanwhile."""
        raise NotImplementedError

    async def undelivered(self, message: Undelivered) -> None:
        """A confirmed message had no subscriber."""
        await self.handle(message)

    async def drained(self) -> None:
        """The intake is closed; called once at each start of a drain."""

    async def undrained(self) -> None:
        """The intake is open again after a drain."""

    async def tear_down(self) -> None:
        """Last words; the bus is still there."""

    def is_idle(self) -> bool:
        """Whether nothing is in hand, so that a drain may end."""
        return True

    def wanted_phase(self) -> Phase:
        """`ready`, or `starting` while something that it depends on is missing. Asked after each message."""
        return "ready"

    def load(self) -> int:
        """Requests in hand, for `baton ps`."""
        return 0

    def engine_report(self) -> EngineReport | None:
        return None

    def worker_report(self) -> WorkerReport | None:
        return None

    def store_report(self) -> StoreReport | None:
        return None

    def tokenizer_report(self) -> TokenizerReport | None:
        return None
