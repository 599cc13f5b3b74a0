"""What is done of what is wanted: bounds, budget, cool-down, and a fleet that shrinks late rather than early."""

from __future__ import annotations

from collections import deque
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from services.planner.core.sizing import SizeBounds
from shared.messages.supervisor import ScalingReason


class PlannerLimits(Struct, frozen=True, kw_only=True):
    """The bounds within which the planner starts and drains engines. Times are in seconds."""

    minimum: Annotated[int, Meta(ge=1)] = 1
    """Engines of each pool, at least."""
    maximum: Annotated[int, Meta(ge=1)] = 64
    """Engines of all pools, at most."""
    gpu_budget: Annotated[int, Meta(ge=1)] | None = None
    """Devices of all engines, at most; None: only `maximum` counts."""
    interval: Annotated[float, Meta(gt=0)] = 15.0
    """Between two decisions."""
    start_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """From an engine's start until it takes requests: so far ahead the load is predicted."""
    stabilization: Annotated[float, Meta(ge=0)] = 300.0
    """A pool shrinks to the most that was wanted within so long, as Kubernetes' HorizontalPodAutoscaler has it."""
    cooldown: Annotated[float, Meta(ge=0)] = 0.0
    """After a change, for so long nothing is drained."""

    def __post_init__(self) -> None:
        if self.maximum < self.minimum:
            raise ValueError(f"maximum = {self.maximum}: must not be below minimum, which is {self.minimum}")

    @property
    def horizon(self) -> int:
        """Intervals until an engine that is started at the next decision takes requests, at least one."""
        return 1 + round(self.start_seconds / self.interval + 0.5)

    def bounds(self, gpus: int) -> SizeBounds:
        """For engines of so many devices each. Raises ValueError where the budget is too small for the minimum."""
        if self.gpu_budget is None:
            return SizeBounds(self.minimum, self.maximum)
        if self.gpu_budget < self.minimum * gpus:
            raise ValueError(
                f"gpu_budget = {self.gpu_budget}: {self.minimum} engines of {gpus} devices each need more; "
                "raise it, or lower minimum"
            )
        return SizeBounds(self.minimum, min(self.maximum, self.gpu_budget // gpus))


class GuardedTarget(NamedTuple):
    """How many engines a pool shall have now, and why not as many as are wanted."""

    target: int
    reason: ScalingReason


class ScalingGuard:
    """Owns what was wanted of one pool lately, and when it was changed. One that has just begun knows of no past, and
    drains nothing until it has watched for the whole stabilization window: a planner's restart moves nothing."""

    def __init__(self, limits: PlannerLimits) -> None:
        self._limits = limits
        self._wanted: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed: float | None = None

    def guard(self, present: int, wanted: int, now: float) -> GuardedTarget:
        """`present`: engines that take requests or start; `wanted` lies within the bounds."""
        limits = self._limits
        if self._began is None:
            self._began = now
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - limits.stabilization:
            self._wanted.popleft()
        if wanted > present:
            self._changed = now
            return GuardedTarget(wanted, "as wanted")
        most = max(count for _, count in self._wanted)
        if now - self._began < limits.stabilization or most >= present:
            return GuardedTarget(present, "nothing to change" if wanted == present else "stabilizing")
        if self._changed is not None and now - self._changed < limits.cooldown:
            return GuardedTarget(present, "cool-down")
        self._changed = now
        return GuardedTarget(most, "as wanted")
