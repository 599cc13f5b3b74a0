"""Which blocks are being copied between the ranks and the KV store. One epoch's numbers, from 0.

Nothing else may write to a block of KV memory that is being copied, whatever becomes of the sequence that wanted it:
so each transfer has references of its own, which it keeps until every rank has reported it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.store import Arena
from shared.ids import LeaseId
from shared.messages.scheduler import Transferred
from shared.messages.worker import Transfer
from shared.slots import pack_generations
from shared.tokens import pack

MOST_IN_FLIGHT = 128
"""Transfers. A report names the newest 256 that failed: of so few in flight it never leaves one out."""


class Place(NamedTuple):
    """One block on the device, and the slot of the store that it is copied from or to."""

    block: int
    slot: int
    generation: int


class Ended(NamedTuple):
    """A transfer that every rank has reported; `done`: all of them copied all of it."""

    kind: Literal["load", "save"]
    lease: LeaseId
    done: bool


@dataclass(slots=True)
class _InFlight:
    kind: Literal["load", "save"]
    lease: LeaseId
    blocks: list[int]
    step: int | None = None
    """The plan that it is part of; None while that is being made."""


class Transfers:
    """Owns the numbering, how far each rank is, and a reference to each block that is being copied."""

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._done = [0] * ranks
        self._failed: set[int] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._over = 0
        """Transfers that every rank has reported: all numbers below."""
        self._planned: list[Transfer] = []
        self._awaited_since = 0.0

    def __len__(self) -> int:
        """In flight, those of the plan that is being made included."""
        return len(self._in_flight)

    @property
    def room(self) -> int:
        return MOST_IN_FLIGHT - len(self._in_flight)

    @property
    def planned(self) -> bool:
        return bool(self._planned)

    def add(self, kind: Literal["load", "save"], lease: LeaseId, arena: Arena, places: list[Place], now: float) -> None:
        """Into the plan that is being made. All blocks are in use or known to the index."""
        if not self._in_flight:
            self._awaited_since = now
        blocks = [place.block for place in places]
        for block in blocks:
            self._pool.share(block)
        self._planned.append(
            Transfer(
                number=self._over + len(self._in_flight),
                kind=kind,
                arena=arena.id,
                path=arena.path,
                blocks=pack(blocks),
                slots=pack(place.slot for place in places),
                generations=pack_generations([place.generation for place in places]),
            )
        )
        self._in_flight.append(_InFlight(kind, lease, blocks))

    def take_planned(self) -> tuple[Transfer, ...]:
        """What the plan holds."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def issued(self, step: int) -> None:
        """The plan that was being made is this one."""
        for transfer in reversed(self._in_flight):
            if transfer.step is not None:
                return
            transfer.step = step

    def reported(self, report: Transferred, now: float) -> Iterator[Ended]:
        """Those that are over now, in order. The blocks of each are given back after the caller has seen it: what it
        indexes meanwhile stays."""
        if not 0 <= report.rank < len(self._done):
            return
        self._failed.update(number for number in report.failed if number >= self._over)
        self._done[report.rank] = max(report.done, self._done[report.rank])
        end = min(*self._done, self._over + len(self._in_flight))
        while self._over < end:
            transfer = self._in_flight.popleft()
            failed = self._over in self._failed
            self._failed.discard(self._over)
            self._over += 1
            self._awaited_since = now
            yield Ended(transfer.kind, transfer.lease, not failed)
            self._pool.give_back(reversed(transfer.blocks))

    def overdue(self, now: float, timeout: float) -> bool:
        """Whether the oldest could have ended for so long, and has not."""
        return bool(self._in_flight) and now - self._awaited_since > timeout

    def step_finished(self, step: int, now: float) -> None:
        """The oldest cannot begin before its own plan is computed, so that long may it take."""
        if self._in_flight:
            own = self._in_flight[0].step
            if own is not None and step <= own:
                self._awaited_since = now

    @property
    def blocks(self) -> Iterator[int]:
        """One for each reference that is held."""
        for transfer in self._in_flight:
            yield from transfer.blocks
