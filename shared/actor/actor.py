"""What a service implements: its subscriptions, its message handler, whether it is idle, and its load report."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.registry import Collector

from shared.bus import Bus, BusError, Undelivered
from shared.ids import InstanceId, RequestId, new_incarnation
from shared.messages.encoder import EncoderReport
from shared.messages.lifecycle import (
    DetokenizerReport,
    EngineReport,
    HeartbeatInterval,
    Lifecycle,
    Phase,
    Service,
    SleepReport,
    StoreReport,
    TokenizerReport,
    WorkerReport,
)
from shared.reliability.transitions import extend_history
from shared.telemetry.tracing import OpenSpan
from shared.topics import Topic, lifecycle_of

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class TopicSubscription(Generic[M]):
    """A subscription. An intake subscription is closed when the actor drains; others stay open until it is idle."""

    topic: Topic[M]
    intake: bool = False
    request: bool = False
    """Messages are requests: `Actor.respond` is called instead of `handle`, and its result sent back as the reply."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time as a message: handed to `handle` every `Actor.tick_every` seconds."""

    now: float
    """Seconds on the monotonic clock."""
    alive_now: float
    """The time on the bus's liveness clock, which is paused while the bus is unreachable."""


@dataclass(frozen=True, slots=True)
class PendingRequest(Generic[M]):
    """A request in the inbox, and the future that its reply is set on."""

    request: M
    reply: Any


class Actor:
    """The base class of every service's actor. It handles one message at a time, so it needs no locks. A bug raises and
    ends the process."""

    service: Service
    tick_every: float | None = None
    abandons_set_up: bool = False
    """Whether a process that is told to stop leaves `set_up` where it is, and `tear_down` out, instead of waiting for
    its end: for what may wait for others for minutes, and has nothing that its process would not take along."""
    metrics: Sequence[Collector] = ()
    """What it measures itself, beside the service's counters of the process."""
    inbox_limit: int = 65_536
    """Most messages that wait in the inbox; above it the bus's own bounded queue fills."""

    def __init__(self, bus: Bus, instance: InstanceId) -> None:
        self.bus = bus
        self.instance = instance
        self.incarnation = new_incarnation()
        """Identifies this start of the process, as in its lifecycle; what it leases from others ends with it."""
        self.isolated: RequestId | None = None
        """The suspect that is handled alone just now; only `isolate` writes it."""
        self.standby = False
        """Whether it begins as a standby; see `Lifecycle.standby`. Whatever runs the actor knows what it is later."""
        self.publish_lifecycle: Callable[[], Awaitable[None]] = _published_by_nobody
        """Set by whatever runs the actor."""
        self.stop: Callable[[], None] = _stopped_by_nobody
        """Ends the process as a signal would: it drains first. Set by whatever runs the actor."""

    async def isolate(self, suspect: RequestId | None) -> None:
        """Announces, before anything of it is handled, that the process handles this suspect and no other request from
        now on; or (None) that it handles all again. The announcement outlives the process."""
        if suspect == self.isolated:
            return
        self.isolated = suspect
        await self.publish_lifecycle()
        if suspect is not None:
            with contextlib.suppress(BusError):
                await self.bus.flush()

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Every subscription, made before `set_up`."""
        raise NotImplementedError

    async def set_up(self) -> None:
        """Prepares what must be there before the first message is handled."""

    async def background(self) -> None:
        """Runs beside the inbox from `set_up` until the end; may return at once. What it raises ends the process."""

    async def handle(self, message: Any) -> None:
        """Handles one message, `Tick` or `Undelivered`."""
        raise NotImplementedError

    async def respond(self, request: Any) -> Any:
        """The reply to a request, for subscriptions with `request`. A future is sent once it is done, and the next
        message handled meanwhile."""
        raise NotImplementedError

    async def handle_undelivered(self, message: Undelivered) -> None:
        """A confirmed message had no subscriber."""
        await self.handle(message)

    def set_interval(self, interval: HeartbeatInterval) -> None:
        """A coordinator has said how often a process of a fleet of this size says what is new. Its lifecycle follows
        that by itself."""

    async def on_drain(self) -> None:
        """The intake is closed; called once at each start of a drain."""

    async def on_undrain(self) -> None:
        """The intake is open again after a drain."""

    async def tear_down(self) -> None:
        """Called once the drain has ended, while the bus is still connected."""

    def is_idle(self) -> bool:
        """Whether no request is unfinished, so that a drain may end."""
        return True

    def target_phase(self) -> Phase:
        """`ready`, or `starting` while something that it depends on is missing. Entered after
        a tick, a lifecycle or an undelivered message: by these an actor learns what it depends on."""
        return "ready"

    def load(self) -> int:
        """Unfinished requests, for `baton ps`."""
        return 0

    def open_spans(self, trace_id: str) -> Sequence[OpenSpan]:
        """What it is doing for the requests of a trace just now."""
        return ()

    def lifecycle_topic(self) -> Topic[Lifecycle]:
        """Where its lifecycle messages go: by its name, or by what others choose it by who need not hear all."""
        return lifecycle_of(self.service, self.instance)

    def engine_report(self) -> EngineReport | None:
        """What the lifecycle reports of an engine; None for every service but the scheduler."""
        return None

    def worker_report(self) -> WorkerReport | None:
        """What the lifecycle reports of a rank; None for every service but the worker."""
        return None

    def sleep_report(self) -> SleepReport | None:
        """Whether it sleeps; None for all but schedulers and ranks that do."""
        return None

    def store_report(self) -> StoreReport | None:
        """What the lifecycle reports of a KV store; None for every service but the store."""
        return None

    def tokenizer_report(self) -> TokenizerReport | None:
        """What the lifecycle reports of a tokenizer; None for every service but the tokenizer."""
        return None

    def detokenizer_report(self) -> DetokenizerReport | None:
        """What the lifecycle reports of a detokenizer; None for every service but the detokenizer."""
        return None

    def encoder_report(self) -> EncoderReport | None:
        """What the lifecycle reports of an encoder; None for every service but the encoder."""
        return None


async def _published_by_nobody() -> None:
    """What an actor publishes of its life while nothing runs it."""


def _stopped_by_nobody() -> None:
    """How an actor ends that nothing runs."""


# The phases of an actor's life, and which may follow which.


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "starting": frozenset({"ready", "draining", "stopped", "failed"}),
    "ready": frozenset({"starting", "draining", "stopped", "failed"}),
    "draining": frozenset({"ready", "starting", "stopped", "failed"}),
    "stopped": frozenset(),
    "failed": frozenset(),
}
"""ready → starting: what it depends on was lost (an engine without its workers). draining → ready: undrained."""


class LifecycleTable:
    """Owns an actor's phase and the history of its phases."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self._history: list[Phase] = ["starting"]

    def move(self, phase: Phase) -> bool:
        """Enters `phase`; False where it is the present one. Raises IllegalTransition."""
        if phase == self.phase:
            return False
        self._history = extend_history(PHASE_TRANSITIONS, self._history, phase, "lifecycle")
        self.phase = phase
        return True
