"""How far a rank's transfers are, as it tells its scheduler. Knows no clock, no bus and no memory."""

from __future__ import annotations

from collections import deque

from shared.ids import Incarnation
from shared.messages.scheduler import Transferred
from shared.messages.worker import StepPlan

FAILED_TOLD = 256
"""Of the failed ones, the newest."""


class TransferLedger:
    """Owns the count of the newest epoch's transfers: asked for, over, failed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch: Incarnation | None = None
        self._asked = 0
        self._done = 0
        self._failed: deque[int] = deque(maxlen=FAILED_TOLD)

    def took(self, plan: StepPlan) -> None:
        """A plan has come, in its turn; the first of an epoch makes those of the epoch before it void."""
        if plan.epoch != self._epoch:
            self._epoch, self._asked, self._done = plan.epoch, 0, 0
            self._failed.clear()
        self._asked += len(plan.transfers)

    def over(self, epoch: Incarnation, number: int, *, failed: bool) -> Transferred | None:
        """Transfer `number` is over; what to tell, if anybody still wants to know."""
        if epoch != self._epoch:
            return None
        self._done = number + 1
        if failed:
            self._failed.append(number)
        return self.report()

    def report(self) -> Transferred | None:
        """None before the first plan."""
        if self._epoch is None:
            return None
        return Transferred(rank=self._rank, epoch=self._epoch, done=self._done, failed=tuple(self._failed))

    @property
    def outstanding(self) -> int:
        return self._asked - self._done
