"""Has a processor compute one step after the other, whoever prepares them."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.worker.backend import StepUnderWay
from services.worker.copy_thread import around
from services.worker.step_flow import Job, StepFlow, Told


class InTurn:
    """Owns when the latest step was over. Made when the first one may begin."""

    def __init__(self, flow: StepFlow) -> None:
        self._flow = flow
        self._ended = time.perf_counter()

    def compute(self, job: Job, prepared: float, compute: Callable[[], StepUnderWay]) -> None:
        """Hands over what comes of a step that was `prepared` then. What its plan wants copied begins when all steps
        before it are computed, or itself is."""
        before, after = around(job.plan.transfers)
        self._flow.copy(job.plan, before)
        self._flow.copies.step(computing=True)
        step = compute()
        self._flow.copies.step(computing=False)
        wait, exposed = max(0.0, job.arrived - self._ended), max(0.0, prepared - max(job.arrived, self._ended))
        self._ended = time.perf_counter()
        self._flow.copy(job.plan, after)
        self._flow.hand_over(Told(job.plan, step, wait, exposed, self._ended))
