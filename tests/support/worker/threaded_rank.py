"""A rank driven as a worker does it on a processor: one thread prepares, another computes, which may be late."""

from __future__ import annotations

import queue
import threading

from services.worker.executor.host_runner import HostRunner, HostStep
from shared.messages.worker import StepPlan

SECONDS = 60.0


class OnTwoThreads(HostRunner):
    """Begins steps for `tests.support.worker.launched_rank.DriverAhead`; they are computed while the gate is open."""

    def __init__(self, backend: HostRunner, late: float = 0.0) -> None:
        """The same rank: use one of the two, then `reset` it. `late`: seconds that each step is held up for."""
        super().__init__(backend.rank)
        self.gate = threading.Event()
        self.gate.set()
        self._late = late
        self._begun: queue.SimpleQueue[HostStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute_all, daemon=True)
        self._thread.start()

    def begin(self, plan: StepPlan) -> HostStep:
        step = self.prepare(plan)
        self._begun.put(step)
        return step

    def stop(self) -> None:
        self._begun.put(None)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _compute_all(self) -> None:
        with self.compute_context():
            while (step := self._begun.get()) is not None:
                threading.Event().wait(self._late)
                assert self.gate.wait(SECONDS)
                step.launch()
