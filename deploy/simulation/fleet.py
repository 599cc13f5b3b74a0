"""Engines that come and go: who decides how many there are, and the devices that they had meanwhile.

A planner is one more `ScalingPolicy`: it sees what the coordinator knows, and says how many engines it wants.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated, NamedTuple, Protocol, get_args

from msgspec import Meta, Struct

from deploy.simulation.cell import DrainEngine, StartEngine
from deploy.simulation.engine import engine_id, number_of
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.engine_pool import EngineLoad
from shared.ids import EngineId, ModelName
from shared.messages.lifecycle import Role
from shared.settings import UpOption

SCALING = "Engines that come and go"
"""The heading of its options."""
ROLES: tuple[Role, ...] = get_args(Role)


class FleetView(NamedTuple):
    """What a scaling policy sees."""

    now: float
    engines: Sequence[EngineLoad]
    """Those that take requests, with their last reports."""
    starting: Mapping[Role, int]
    """Engines that have been started and are not ready yet."""
    queued: int
    """Requests that wait at the coordinator."""

    def of(self, role: Role) -> list[EngineLoad]:
        """The engines of a pool that take requests."""
        return [load for load in self.engines if load.report.role == role]

    @property
    def present(self) -> dict[Role, int]:
        """Engines of each pool that is not empty, those that start included."""
        counts = {role: len(self.of(role)) + self.starting.get(role, 0) for role in ROLES}
        return {role: count for role, count in counts.items() if count}

    def requests(self, role: Role) -> int:
        """Those that wait or run in a pool; what waits at the coordinator waits for whoever computes prompts."""
        queued = 0 if role == "decode" else self.queued
        return queued + sum(load.report.waiting + load.report.running for load in self.of(role))


class ScalingPolicy(Protocol):
    """Decides how many engines there should be."""

    @property
    def interval(self) -> float:
        """Seconds between two decisions; infinity: it makes none."""

    def wanted(self, view: FleetView) -> Mapping[Role, int]:
        """The number of engines of each pool that is to change, those that start included. What is too few is started,
        what is too many drained."""


class StaticFleet(Struct, frozen=True):
    """As many engines as there were at the start."""

    @property
    def interval(self) -> float:
        """As `ScalingPolicy` has it."""
        return inf

    def wanted(self, view: FleetView) -> Mapping[Role, int]:
        """As `ScalingPolicy` has it."""
        return view.present


class ScalingLimits(Struct, frozen=True, kw_only=True):
    """The bounds within which engines come and go."""

    minimum: Annotated[int, Meta(ge=1, description="Fewest engines."), UpOption(SCALING, "min_engines")] = 1
    maximum: Annotated[int, Meta(ge=1, description="Most engines."), UpOption(SCALING, "max_engines")] = 64
    interval: Annotated[
        float, Meta(ge=0.5, description="Seconds between decisions."), UpOption(SCALING, "scale_interval")
    ] = 15.0
    start_seconds: Annotated[
        float,
        Meta(ge=0, description="Seconds from an engine's start, when it takes its devices, until it takes requests."),
        UpOption(SCALING, "start_s"),
    ] = 30.0
    stabilization: Annotated[
        float, Meta(ge=0, description="Seconds for which fewer must be enough."), UpOption(SCALING, "scale_down_s")
    ] = 300.0
    """The fleet shrinks to the most that was wanted meanwhile."""

    def __post_init__(self) -> None:
        if self.maximum < self.minimum:
            raise ValueError(f"maximum = {self.maximum}: must not be below minimum, which is {self.minimum}")


class QueueLengthScaling:
    """Owns what it wanted lately. Of each pool so many engines that each has `target` requests, waiting or running, as
    Kubernetes' HorizontalPodAutoscaler computes it: nothing changes within a tenth of the target, and a pool shrinks
    only once it was too large for the whole stabilization window.
    """

    TOLERANCE = 0.1

    def __init__(self, target: float, limits: ScalingLimits) -> None:
        """`target`: requests for each engine; above 0."""
        self._target = target
        self._limits = limits
        self._recent: defaultdict[Role, deque[tuple[float, int]]] = defaultdict(deque)

    @property
    def interval(self) -> float:
        """As `ScalingPolicy` has it."""
        return self._limits.interval

    def wanted(self, view: FleetView) -> Mapping[Role, int]:
        """As `ScalingPolicy` has it; the bounds are those of each pool."""
        return {
            role: self._wanted(view.now, present, view.requests(role), self._recent[role])
            for role, present in view.present.items()
        }

    def _wanted(self, now: float, present: int, requests: int, recent: deque[tuple[float, int]]) -> int:
        by_queue = requests / self._target
        near = present > 0 and abs(by_queue / present - 1) <= self.TOLERANCE
        count = present if near else ceil(by_queue)
        count = max(self._limits.minimum, min(self._limits.maximum, count))
        recent.append((now, count))
        while recent[0][0] < now - self._limits.stabilization:
            recent.popleft()
        most = max(each for _, each in recent)
        return count if count >= present else min(present, most)


@dataclass(slots=True)
class EngineLife:
    """When an engine had its devices, in seconds of the simulation."""

    started: float
    ready: float
    drained: float | None = None
    stopped: float | None = None
    role: Role = "mixed"


class SimulatedFleet:
    """Owns which engines there are and were, and acts on what the policy wants."""

    def __init__(self, policy: ScalingPolicy | None = None, start_seconds: float = 0.0) -> None:
        self.lives: dict[EngineId, EngineLife] = {}
        self.policy = policy or StaticFleet()
        self._start_seconds = start_seconds

    def start(self, at: float, ready: float, role: Role = "mixed") -> StartEngine:
        """One more engine: it has its devices from `at` on, and takes requests from `ready` on."""
        number = len(self.lives)
        self.lives[engine_id(number)] = EngineLife(at, ready, role=role)
        return StartEngine(number, ready, role)

    def drain(self, engine: EngineId, at: float) -> DrainEngine:
        """The engine takes no more requests from `at` on; it has its devices until the last of them has ended."""
        self.lives[engine].drained = at
        return DrainEngine(number_of(engine), at)

    def decide(
        self, coordinator: Coordinator, model: ModelName, now: float, acts: float
    ) -> list[StartEngine | DrainEngine]:
        """What the policy wants at `now` is done at `acts`. The engines that are drained are those of their pool with
        the fewest requests, the youngest of them first; one stays."""
        view = self.view(coordinator, model, now)
        orders: list[StartEngine | DrainEngine] = []
        for role, count in self.policy.wanted(view).items():
            missing = count - view.present.get(role, 0)
            pool = sorted(view.of(role), key=_least_loaded)
            orders += [self.start(acts, acts + self._start_seconds, role) for _ in range(missing)]
            orders += [self.drain(load.id, acts) for load in pool[: max(0, min(-missing, len(pool) - 1))]]
        return orders

    def view(self, coordinator: Coordinator, model: ModelName, now: float) -> FleetView:
        """What the policy sees. An engine that was told to drain and has not said so yet is not seen."""
        ready = [load for load in coordinator.fleet.ready(model) if self.lives[load.id].drained is None]
        known = {load.id for load in ready}
        starting = Counter(
            life.role for engine, life in self.lives.items() if life.drained is None and engine not in known
        )
        return FleetView(now, ready, starting, len(coordinator.queue))


def _least_loaded(load: EngineLoad) -> tuple[int, int]:
    return load.report.waiting + load.report.running, -number_of(load.id)
