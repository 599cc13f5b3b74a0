"""Finds processes that live and do nothing, or nothing right: engines by their steps and canaries, all by silence.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from msgspec import Struct

from shared.ids import EngineId, Incarnation, InstanceId
from shared.messages.lifecycle import EngineReport, Lifecycle
from shared.registry import KEEP_ALIVES

STEP_MARGIN = 1.5
"""How much longer than its scheduler an engine's step is waited for: the scheduler ends by itself where it can."""
FAULTS_UNTIL_RESTART = 5
"""Canaries in a row that a suspect engine gets wrong before its ranks are replaced; two of them made it a suspect."""
RESTART_PAUSE = 30.0
"""Seconds between such replacements of two engines: if all are suspects at once, restarts would only take all away."""


class WatchLimits(Struct, frozen=True, kw_only=True):
    """How long a process may make no progress, in seconds."""

    step: float
    """Seconds that an engine with work in hand may take for a step. The scheduler's own limit is tighter."""
    silence: float
    """Seconds without a word from a process that was ready."""


class Stall(NamedTuple):
    """A process to be restarted, and why."""

    instance: InstanceId
    reason: str
    engine_too: bool = True
    """Whether the other processes of its engine are restarted with it."""


class _WatchedProcess(NamedTuple):
    incarnation: Incarnation | None
    """None: not heard of yet."""
    seen_at: float
    steps: int
    step_deadline: float
    """What its scheduler allows the step in flight, in seconds."""
    progressed_at: float
    """When `steps` last changed, or was last without work."""
    was_ready: bool
    engine: EngineId | None
    """Of a rank: whose it is."""
    patience: float
    """Seconds of silence that follow from how often it promised to speak."""
    wrong: str | None
    """Of a scheduler: why its ranks have to be replaced."""


class Watchdog:
    """Owns what was last heard of each process, and when ranks were last replaced for what they computed.

    `now` is the bus's liveness clock, which stops with the bus.
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._watched: dict[InstanceId, _WatchedProcess] = {}
        self._replaced_at = -RESTART_PAUSE

    def record_lifecycle(self, message: Lifecycle, now: float) -> None:
        """Records what a process says of itself; one that says that it has ended is watched no more."""
        if message.phase in ("stopped", "failed"):
            self.forget(message.instance)
            return
        before = self._watched.get(message.instance)
        if before is not None and before.incarnation != message.incarnation:
            before = None
        steps = message.engine.steps if message.engine else 0
        stands = (
            before is not None and steps == before.steps and _has_work(message.engine) and message.phase != "starting"
        )
        self._watched[message.instance] = _WatchedProcess(
            incarnation=message.incarnation,
            seen_at=now,
            steps=steps,
            step_deadline=message.engine.step_deadline if message.engine else 0.0,
            progressed_at=before.progressed_at if before is not None and stands else now,
            was_ready=message.phase == "ready" or message.is_standby or (before is not None and before.was_ready),
            engine=message.worker.engine if message.worker else None,
            patience=KEEP_ALIVES * message.keep_alive,
            wrong=_wrong(message.engine),
        )

    def expect(self, instance: InstanceId, now: float) -> None:
        """Watches an instance that was ready when a former supervisor heard of it. All are asked to speak when the next
        one begins, so that one which hangs since is as silent as any other."""
        self._watched[instance] = _WatchedProcess(
            incarnation=None,
            seen_at=now,
            steps=0,
            step_deadline=0.0,
            progressed_at=now,
            was_ready=True,
            engine=None,
            patience=0.0,
            wrong=None,
        )

    def forget(self, instance: InstanceId) -> None:
        """Watches an instance no more, until it speaks again."""
        self._watched.pop(instance, None)

    def stalled(self, now: float) -> list[Stall]:
        """Names each stalled process once, and forgets it."""
        found = [stall for instance in self._watched if (stall := self._stall_of(instance, now)) is not None]
        found += self._wrong_ranks({stall.instance for stall in found}, now)
        for stall in found:
            self.forget(stall.instance)
        return found

    def _stall_of(self, instance: InstanceId, now: float) -> Stall | None:
        watched = self._watched[instance]
        silence = max(self._limits.silence, watched.patience)
        if watched.was_ready and now - watched.seen_at > silence:
            return Stall(instance, f"silent for {silence:g} s")
        allowed = max(self._limits.step, STEP_MARGIN * watched.step_deadline)
        if now - watched.progressed_at > allowed and watched.seen_at > watched.progressed_at:
            return Stall(instance, f"work in hand and no step for {allowed:g} s")
        return None

    def _wrong_ranks(self, known: Container[InstanceId], now: float) -> list[Stall]:
        """The ranks of one engine whose canaries stay wrong. Its scheduler goes on: it knows what was right before. A
        rank that starts has said nothing of its engine yet, so none is replaced for what the one before it computed."""
        if now - self._replaced_at < RESTART_PAUSE:
            return []
        for engine, watched in self._watched.items():
            ranks = [
                name for name, each in self._watched.items() if each.engine == EngineId(engine) and name not in known
            ]
            if watched.wrong is not None and ranks:
                self._replaced_at = now
                reason = f"{engine} is suspect: {watched.wrong}"
                return [Stall(rank, reason, engine_too=False) for rank in ranks]
        return []


def _wrong(report: EngineReport | None) -> str | None:
    health = report.health if report is not None else None
    return health.suspect if health is not None and health.faults >= FAULTS_UNTIL_RESTART else None


def _has_work(report: EngineReport | None) -> bool:
    """Whether it should make steps: a paused engine has requests and makes none."""
    return report is not None and report.paused is None and report.running + report.waiting > 0


# A clock for the watchdog that no pause moves, of the supervisor itself nor of the bus: nothing was heard meanwhile.


MAX_CLOCK_STEP = 1.0
"""Seconds that count between two looks. The supervisor looks five times a second; what is beyond was its own pause."""
MAX_UNANSWERED = 2.5
"""Seconds that count after the bus has answered. It is asked every second; what is beyond was its pause: a server that
stands still keeps its connections, and all processes would be killed for its silence."""


class PauseFreeClock:
    """Owns how much time has counted so far."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._last: float | None = None
        self._answered_at = 0.0

    def record_answer(self) -> None:
        """The bus has just answered."""
        self._answered_at = self._counted

    def now(self, real: float) -> float:
        """Counted seconds at `real`, which is any clock that does not go back."""
        if self._last is not None:
            passed = self._counted + min(max(0.0, real - self._last), MAX_CLOCK_STEP)
            self._counted = min(passed, self._answered_at + MAX_UNANSWERED)
        self._last = real
        return self._counted
