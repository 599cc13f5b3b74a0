"""The blocks that are being copied between the ranks and the KV store. Transfers are numbered from 0 in each epoch.

Nothing else may write to a block of KV memory while it is copied, even if its sequence ends. So each transfer holds
references of its own until every rank has reported it as done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.scheduler.core.memory import BlockPool
from services.scheduler.core.transfer.store_client import StoreArena
from shared.ids import LeaseId
from shared.messages.scheduler import TransferProgress
from shared.messages.worker import Transfer
from shared.packing import pack, pack_generations

MAX_IN_FLIGHT = 128
"""Most transfers in flight. A report names the newest 256 that failed, so with so few in flight it always names all."""


class BlockCopy(NamedTuple):
    """One block on the device, and the store's slot that it is copied from or to."""

    block: int
    slot: int
    generation: int


class TransferOutcome(NamedTuple):
    """A transfer that every rank has reported; `done`: every rank has copied all of it."""

    kind: Literal["load", "save"]
    lease: LeaseId
    done: bool
    blocks: int
    seconds: float
    """From when it could have begun to the last rank's report."""


@dataclass(slots=True)
class _TransferInFlight:
    kind: Literal["load", "save"]
    lease: LeaseId
    blocks: list[int]
    step: int | None = None
    """Number of the plan that it is part of; None while that plan is being made."""


class BlockTransfers:
    """Owns the transfers' numbers, each rank's progress, and a reference to each block that is being copied."""

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._done = [0] * ranks
        self._failed: set[int] = set()
        self.in_flight: deque[_TransferInFlight] = deque()
        """All transfers that are not over, including those of the plan being made; only this class writes it."""
        self.planned: list[Transfer] = []
        """Transfers of the plan that is being made; only this class writes it."""
        self._first = 0
        """Number of the oldest transfer in flight: every rank has reported all below it."""
        self._awaited_since = 0.0

    @property
    def room(self) -> int:
        """How many more transfers may be in flight."""
        return MAX_IN_FLIGHT - len(self.in_flight)

    def add(
        self, kind: Literal["load", "save"], lease: LeaseId, arena: StoreArena, copies: list[BlockCopy], now: float
    ) -> None:
        """Adds a transfer to the plan that is being made. All blocks must be in use or in the index, and `room` must
        not be 0."""
        if not self.in_flight:
            self._awaited_since = now
        blocks = [copy.block for copy in copies]
        for block in blocks:
            self._pool.share(block)
        self.planned.append(
            Transfer(
                number=self._first + len(self.in_flight),
                kind=kind,
                arena=arena.id,
                path=arena.path,
                blocks=pack(blocks),
                slots=pack(copy.slot for copy in copies),
                generations=pack_generations([copy.generation for copy in copies]),
            )
        )
        self.in_flight.append(_TransferInFlight(kind, lease, blocks))

    def take_planned(self, step: int) -> tuple[Transfer, ...]:
        """Returns the transfers of the plan being made and marks them with its number, `step`."""
        planned, self.planned = tuple(self.planned), []
        for transfer in reversed(self.in_flight):
            if transfer.step is not None:
                break
            transfer.step = step
        return planned

    def record_report(self, report: TransferProgress, now: float) -> Iterator[TransferOutcome]:
        """Records a rank's progress. Yields the transfers that are now over, in order. The blocks of each are released
        only after the caller has processed it, so what it indexes is kept."""
        if not 0 <= report.rank < len(self._done):
            return
        self._failed.update(number for number in report.failed if number >= self._first)
        self._done[report.rank] = max(report.done, self._done[report.rank])
        end = min(*self._done, self._first + len(self.in_flight))
        while self._first < end:
            transfer = self.in_flight.popleft()
            failed = self._first in self._failed
            self._failed.discard(self._first)
            self._first += 1
            seconds, self._awaited_since = now - self._awaited_since, now
            yield TransferOutcome(transfer.kind, transfer.lease, not failed, len(transfer.blocks), seconds)
            self._pool.release(reversed(transfer.blocks))

    def overdue(self, now: float, timeout: float) -> bool:
        """Whether the oldest transfer could have ended `timeout` seconds ago but has not."""
        return bool(self.in_flight) and now - self._awaited_since > timeout

    def finish_step(self, step: int, now: float) -> None:
        """Records that a step is computed. The oldest transfer begins only after its own plan, so its time counts from
        then."""
        if self.in_flight:
            own = self.in_flight[0].step
            if own is not None and step <= own:
                self._awaited_since = now

    @property
    def blocks(self) -> Iterator[int]:
        """The blocks of all references that are held; a block may occur twice."""
        for transfer in self.in_flight:
            yield from transfer.blocks
