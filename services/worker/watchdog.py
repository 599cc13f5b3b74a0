"""Finds steps that never end: a device call that does not return, a collective whose other ranks are gone.

The thread that computes cannot be interrupted, so the process ends and the supervisor starts another. No clock of its
own: `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.worker.distributed.lockstep import LatestStep
from shared.messages.worker import StepPlan
from shared.reliability.step_times import StepTimes, deadline_of

CHECK_EVERY = 0.25
"""Seconds between two checks."""
MAX_COUNTED = 2 * CHECK_EVERY
"""Seconds that count at the most for the time between two checks: what stopped the whole process, or the machine,
stopped the step, too."""

MIN_TIMEOUT, MIN_TIMEOUT_WITH_COMPILER = 2.0, 20.0
"""Seconds: no deadline is shorter."""
UNSEEN = 60.0
"""Seconds that the first step of a size may take at least."""


class StepHung(Exception):
    """A step takes so long that its device counts as hung; the text names the step, its size and its deadline."""


class StepWatchdog:
    """Owns which plans are in hand, and for how long the oldest has been computed."""

    def __init__(self, shortest: float | None, first: float) -> None:
        """`shortest`: no deadline is shorter, in seconds; None: MIN_TIMEOUT, or MIN_TIMEOUT_WITH_COMPILER. `first`: the
        deadline of the first step of all."""
        self._times = StepTimes()
        self._shortest, self._first = shortest, first
        self.compiles_kernels = False
        """Whether the device's kernels may be compiled in the middle of a run, for a shape that was not met before."""
        self.latest: Callable[[], LatestStep | None] = lambda: None
        """Of a rank of a data-parallel group: its last step that has begun, this engine's or not. It takes as long as
        the rows of all engines do, and the plan in hand is computed in it, or behind it."""
        self._in_hand: deque[StepPlan] = deque()
        self._began = 0.0
        self._counted = 0.0
        self._checked = 0.0

    def __len__(self) -> int:
        return len(self._in_hand)

    def start(self, plan: StepPlan, now: float) -> None:
        """A plan is handed to the device; it is computed once those before it are."""
        if not self._in_hand:
            self._begin(now)
        self._in_hand.append(plan)

    def finish(self, now: float, *, computed: bool, shared: LatestStep | None = None) -> None:
        """The oldest plan in hand is over. `computed` false: it was left out, so its time says nothing. `shared`: the
        step of a data-parallel group that it was computed in."""
        plan = self._in_hand.popleft()
        if computed and shared is not None:
            self._times.record(shared.rows, now - shared.began)
        elif computed:
            self._times.record(_tokens(plan), now - self._began)
        self._begin(now)

    def check(self, now: float, *, excused: bool = False) -> None:
        """Called every CHECK_EVERY seconds. Raises StepHung where the oldest plan in hand is past its deadline.
        Time since the last call does not count where it is `excused`: the step waits for what has its own deadline."""
        latest = self.latest()
        if latest is not None and latest.began > self._began:
            self._begin(latest.began)
            self._checked = now
        self._counted += 0.0 if excused else min(now - self._checked, MAX_COUNTED)
        self._checked = now
        if self._in_hand and self._counted > (allowed := self.seconds_allowed()):
            plan = self._in_hand[0]
            raise StepHung(f"step {plan.step} of {_tokens(plan)} tokens had no result after {allowed:.1f} s")

    def seconds_allowed(self) -> float:
        """The deadline of the oldest plan in hand, in seconds from its begin; 0 without one."""
        if not self._in_hand:
            return 0.0
        default, tokens, latest = MIN_TIMEOUT, _tokens(self._in_hand[0]), self.latest()
        if self.compiles_kernels:
            default = MIN_TIMEOUT_WITH_COMPILER
        if latest is not None and latest.began >= self._began:
            tokens = max(tokens, latest.rows)
        return deadline_of(self._times, tokens, shortest=self._shortest or default, unseen=UNSEEN, first=self._first)

    def _begin(self, now: float) -> None:
        self._began = self._checked = now
        self._counted = 0.0


def _tokens(plan: StepPlan) -> int:
    return sum(work.count for work in plan.work)
