"""Whether plans arrive complete and in order. Knows no bus and no device."""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

from shared.ids import Incarnation
from shared.messages.worker import StepPlan


class Gap(NamedTuple):
    """`expected` should have come, and did not."""

    expected: int


Verdict = Literal["first", "next", "repeated"] | Gap


class StepOrder:
    """Owns which plan must come next. (epoch, step) are consecutive; a new epoch begins with step 0."""

    def __init__(self) -> None:
        self.epoch: Incarnation | None = None
        self.expected = 0
        """Also how many plans of the epoch have arrived."""

    def take(self, plan: StepPlan) -> Verdict:
        """Counts `plan` in. `first`: a new epoch, everything before it is void. After a gap only that can follow."""
        verdict = self._judge(plan)
        match verdict:
            case "first":
                self.epoch, self.expected = plan.epoch, 1
            case "next":
                self.expected += 1
            case "repeated" | Gap():
                pass
            case _:
                assert_never(verdict)
        return verdict

    def _judge(self, plan: StepPlan) -> Verdict:
        if plan.epoch != self.epoch:
            return "first" if plan.step == 0 else Gap(0)
        if plan.step == self.expected:
            return "next"
        return "repeated" if plan.step < self.expected else Gap(self.expected)
