"""A device whose captures are run anew: what CUDA graphs do, on a CPU, with all that they forbid checked."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.graphs.capture import Replay


class RunAgain:
    """See :class:`services.worker.graphs.capture.Capture`. A replay runs the work on the memory that it was captured
    with, whatever has become of the objects around it."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        work()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay
