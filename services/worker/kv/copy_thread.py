"""The thread that copies KV blocks beside the compute thread, which never waits for it but to begin a new epoch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shared.ids import Incarnation
from shared.messages.scheduler import TransferProgress
from shared.messages.worker import StepPlan, Transfer

if TYPE_CHECKING:
    from services.worker.kv.copier import RankKvCache
    from services.worker.kv.transfers import Transfers

MAX_WAITING_TRANSFERS = 4096
"""Transfers that may wait; the scheduler bounds what it asks for far below, so more is a bug and raises."""

REST_TIMEOUT = 30.0
"""Seconds for the present transfer to stop. It stops within milliseconds; a thread that does not is stuck, and the
process must end."""

STOP_TIMEOUT = 2.0

PREPARE_APART = 0.02
"""Seconds between two pieces of memory that are prepared while there is work: steps have the processor's cores."""

QUIET_SECONDS = 0.1
"""Without a transfer or a step there is no work: a load is followed by a step that waits for it."""


class CopyingStuck(Exception):
    """A copy neither ends nor stops: no new epoch may begin over it."""


class TransferEnded(NamedTuple):
    """A transfer is over: done, or failed."""

    epoch: Incarnation
    number: int
    failed: bool


class CopyThread:
    """Owns the transfers that wait and the thread that does them, in the order they came.

    `begin` and `add` are the compute thread's: it calls them between steps, so that nothing here need know of steps.
    """

    def __init__(self, directory: Path | None) -> None:
        """`directory`: the store's; None: every transfer fails."""
        self._directory = directory
        self._transfers: Transfers | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Incarnation, Transfer]] = deque()
        self._epochs = 0
        """How many have begun: what was taken in hand under a smaller count must stop."""
        self._busy = False
        self._stopping = False
        self.computing = False
        """Whether a step is being computed; written by the compute thread."""
        self.active = 0.0
        """When a step was last over, on `time.perf_counter`'s clock; written by the compute thread."""
        self._worked = 0.0
        """When a transfer was last over."""
        self._over: asyncio.Queue[TransferEnded | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)

    def start(self, share: RankKvCache | None) -> None:
        """Before anything is added. `share`: the memory to copy from and to; None: every transfer fails."""
        if share is not None and self._directory is not None:
            from services.worker.kv.transfers import Transfers

            self._transfers = Transfers(share, self._directory)
        self._thread.start()

    def begin(self) -> None:
        """Forgets what waits and returns when nothing is being copied: from here on the memory is the new epoch's.

        Raises CopyingStuck."""
        with self._changed:
            self._waiting.clear()
            self._epochs += 1
            if not self._changed.wait_for(lambda: not self._busy, REST_TIMEOUT):
                raise CopyingStuck(f"a transfer has not stopped for {REST_TIMEOUT:.0f} s")

    def add(self, epoch: Incarnation, transfers: Iterable[Transfer]) -> None:
        """To be done after those before them. Raises OverflowError where too many wait."""
        with self._changed:
            self._waiting.extend((epoch, transfer) for transfer in transfers)
            if len(self._waiting) > MAX_WAITING_TRANSFERS:
                raise OverflowError(f"{len(self._waiting)} transfers wait")
            self._changed.notify_all()

    async def next_ended(self) -> TransferEnded:
        """The next transfer that is over, in order; those of an epoch that ended may be missing.

        Raises what copying raised."""
        over = await self._over.get()
        if isinstance(over, BaseException):
            raise over
        return over

    async def stop(self) -> None:
        """Ends the thread, or leaves it behind when it does not end."""
        with self._changed:
            self._waiting.clear()
            self._epochs += 1
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except BaseException as error:
            self._hand_over(error)
        finally:
            if self._transfers is not None:
                self._transfers.close()

    def _do_next(self) -> bool:
        """Waits for a transfer and does it; False when it is time to end. While none waits, memory is prepared."""
        while self._may_prepare() and self._transfers is not None and self._transfers.prepare():
            pass
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return False
            epoch, transfer = self._waiting.popleft()
            epochs, self._busy = self._epochs, True
        try:
            outcome = self._transfers.run(transfer, lambda: self._epochs != epochs) if self._transfers else "failed"
        finally:
            with self._changed:
                self._busy = False
                self._worked = time.perf_counter()
                self._changed.notify_all()
        if outcome != "stopped":
            self._hand_over(TransferEnded(epoch, transfer.number, outcome != "done"))
        return True

    def _may_prepare(self) -> bool:
        """Whether there is nothing else to do; gives way for a while where there is work."""
        if not self.computing and time.perf_counter() - max(self._worked, self.active) > QUIET_SECONDS:
            return not self._waiting and not self._stopping
        with self._changed:
            return not self._changed.wait_for(lambda: self._waiting or self._stopping, PREPARE_APART)

    def _hand_over(self, over: TransferEnded | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._over.put_nowait, over)
        except RuntimeError:  # the loop is closed: the process is ending
            return


def around(transfers: tuple[Transfer, ...]) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """What may begin before the plan is computed, and what after: a load need not wait for its own plan, but for the
    transfers before it, and a save waits."""
    saves = (place for place, transfer in enumerate(transfers) if transfer.kind == "save")
    first = next(saves, len(transfers))
    return transfers[:first], transfers[first:]


# How far a rank's transfers are, as it tells its scheduler. Knows no clock, no bus and no memory.


MAX_FAILED_REPORTED = 256
"""Most failed transfers in a report; the newest ones are kept."""


class TransferLedger:
    """Owns the count of the newest epoch's transfers: asked for, over, failed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch: Incarnation | None = None
        self._asked = 0
        self._done = 0
        self._early: set[int] = set()
        self._failed: deque[int] = deque(maxlen=MAX_FAILED_REPORTED)

    def record(self, plan: StepPlan) -> None:
        """Counts the transfers of a plan that has come; the first of an epoch makes all before it void."""
        if plan.epoch != self._epoch:
            self._epoch, self._asked, self._done = plan.epoch, 0, 0
            self._failed.clear()
            self._early.clear()
        self._asked += len(plan.transfers)
        if plan.connector is not None:
            self._asked += len(plan.connector.numbers)

    def finish(self, epoch: Incarnation, number: int, *, failed: bool) -> TransferProgress | None:
        """Transfer `number` is over; what to report, if its epoch lasts."""
        if epoch != self._epoch:
            return None
        self._early.add(number)
        while self._done in self._early:
            self._early.remove(self._done)
            self._done += 1
        if failed:
            self._failed.append(number)
        return self.report()

    def report(self) -> TransferProgress | None:
        """None before the first plan."""
        if self._epoch is None:
            return None
        failed, early = tuple(self._failed), tuple(sorted(self._early))
        return TransferProgress(rank=self._rank, epoch=self._epoch, done=self._done, failed=failed, early=early)

    @property
    def pending(self) -> int:
        """Transfers that were asked for and are not over."""
        return self._asked - self._done - len(self._early)
