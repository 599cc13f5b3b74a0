"""The simulated device of one engine, on virtual time."""

from __future__ import annotations

from typing import NamedTuple

from services.worker.sim.backend import SimBackend
from shared.messages.scheduler import StepFinished, StepTiming
from shared.messages.worker import StepPlan


class TimedStep(NamedTuple):
    """A step that the device has been given."""

    begins: float
    ends: float
    result: StepFinished


class VirtualDevice:
    """Owns what the device holds, and when it will have computed all that it was given: one step after the other."""

    def __init__(self, backend: SimBackend, speed: float, ready: float) -> None:
        """`speed`: what it computes in a second, as a share of what `backend` does; `ready`: when it may begin."""
        self.backend = backend
        self.busy_until = ready
        """Only this class writes it, as the next."""
        self.busy = 0.0
        """Seconds in which it has computed, or will have."""
        self._speed = speed

    def compute(self, plan: StepPlan, comes: float) -> TimedStep:
        """It begins with the plan when that has come and all steps before are over."""
        output = self.backend.compute(plan)
        begins = max(comes, self.busy_until)
        wait, forward = self.occupy(output.timing.forward, comes)
        result = StepFinished(
            epoch=plan.epoch,
            step=plan.step,
            sampled=output.sampled,
            timing=StepTiming(wait=wait, prepare=0.0, forward=forward, sample=0.0),
            drafted=output.drafted,
            accepted=output.accepted,
        )
        return TimedStep(begins, self.busy_until, result)

    def occupy(self, forward: float, comes: float) -> tuple[float, float]:
        """It computes a step that has come at that time and takes the backend `forward` seconds. Returns for how long
        it had nothing to do before, and for how long it computes."""
        before = self.busy_until
        begins, seconds = comes if comes > before else before, forward / self._speed
        self.busy_until = begins + seconds
        self.busy += seconds
        return begins - before, seconds
