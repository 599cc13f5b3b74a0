"""The blocks that are being copied between the ranks and the KV store, or a KV connector. Transfers are numbered from
0 in each epoch.

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
from shared.messages.worker import ConnectorLoad, ConnectorSend, KvBlockRun, Transfer
from shared.packing import pack, pack_generations

MAX_IN_FLIGHT = 128
"""Most transfers in flight. A report names the newest 256 that failed, so with so few in flight it always names all."""
MAX_WINDOW = 512
"""Most transfers from the oldest one in flight to the newest. Those between may be over: a report names them."""


class BlockCopy(NamedTuple):
    """One block on the device, and the store's slot that it is copied from or to."""

    block: int
    slot: int
    generation: int


TransferKind = Literal["load", "save", "send"]
"""send: blocks of a request that has ended, which a KV connector still reads."""


class TransferOutcome(NamedTuple):
    """A transfer that every rank has reported; `done`: every rank has copied all of it."""

    kind: TransferKind
    lease: LeaseId
    done: bool
    blocks: int
    seconds: float
    """From when it could have begun to the last rank's report."""


@dataclass(slots=True)
class _TransferInFlight:
    kind: TransferKind
    lease: LeaseId
    blocks: list[int]
    step: int | None = None
    """Number of the plan that it is part of; None while that plan is being made."""
    over: bool = False
    """Whether it has ended before one in front of it."""


class BlockTransfers:
    """Owns the transfers' numbers, each rank's progress, and a reference to each block that is being copied."""

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._done = [0] * ranks
        self._early: list[set[int]] = [set() for _ in range(ranks)]
        self._failed: set[int] = set()
        self.in_flight: deque[_TransferInFlight] = deque()
        """All transfers from the oldest that is not over on, those of the plan being made included; only this class
        writes it."""
        self.planned: list[Transfer] = []
        """Transfers of the plan that is being made; only this class writes it."""
        self._first = 0
        """Number of the oldest transfer in flight: every rank has reported all below it."""
        self._awaited_since = 0.0
        self._over = 0
        """Transfers of `in_flight` that are over."""
        self.connector_loads: list[ConnectorLoad] = []
        self.connector_sends: list[ConnectorSend] = []
        """What the plan that is being made has for the KV connector; only this class writes these."""

    @property
    def room(self) -> int:
        """How many more transfers may be in flight."""
        return min(MAX_IN_FLIGHT + self._over, MAX_WINDOW) - len(self.in_flight)

    def add(
        self, kind: Literal["load", "save"], lease: LeaseId, arena: StoreArena, copies: list[BlockCopy], now: float
    ) -> None:
        """Adds a transfer to the plan that is being made. All blocks must be in use or in the index, and `room` must
        not be 0."""
        blocks = [copy.block for copy in copies]
        self.planned.append(
            Transfer(
                number=self.hold(kind, lease, blocks, now),
                kind=kind,
                arena=arena.id,
                path=arena.path,
                blocks=pack(blocks),
                slots=pack(copy.slot for copy in copies),
                generations=pack_generations([copy.generation for copy in copies]),
            )
        )

    def hold(self, kind: TransferKind, lease: LeaseId, blocks: list[int], now: float) -> int:
        """Numbers a transfer of the plan that is being made, and keeps its blocks until it is over; see `add`."""
        if not self.in_flight:
            self._awaited_since = now
        for block in blocks:
            self._pool.share(block)
        self.in_flight.append(_TransferInFlight(kind, lease, blocks))
        return self._first + len(self.in_flight) - 1

    def add_load(
        self, lease: LeaseId, run: KvBlockRun, blocks: list[int], *, awaited: bool, overlapped: bool, now: float
    ) -> None:
        """Adds a load by the KV connector to the plan that is being made; see `add` and `ConnectorLoad`."""
        number = self.hold("load", lease, blocks, now)
        self.connector_loads.append(ConnectorLoad(number=number, run=run, awaited=awaited, overlapped=overlapped))

    def add_send(self, lease: LeaseId, request: str, blocks: list[int], now: float) -> None:
        """Adds blocks that the KV connector sends on to the plan that is being made; see `add` and `ConnectorSend`."""
        number = self.hold("send", lease, blocks, now)
        self.connector_sends.append(ConnectorSend(number=number, request=request))

    def take_connector(self) -> tuple[tuple[ConnectorLoad, ...], tuple[ConnectorSend, ...]]:
        """Returns what the plan being made has for the KV connector, but for what it saves."""
        loads, sends = tuple(self.connector_loads), tuple(self.connector_sends)
        self.connector_loads, self.connector_sends = [], []
        return loads, sends

    @property
    def any_planned(self) -> bool:
        """Whether the plan being made has any transfer so far."""
        return bool(self.planned or self.connector_loads or self.connector_sends)

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
        self._early[report.rank].update(number for number in report.early if number >= self._first)
        for number in self._newly_over():
            transfer = self.in_flight[number - self._first]
            transfer.over = True
            self._over += 1
            seconds, self._awaited_since = now - self._awaited_since, now
            done, count = number not in self._failed, len(transfer.blocks)
            yield TransferOutcome(transfer.kind, transfer.lease, done, count, seconds)
            self._failed.discard(number)
            self._pool.release(reversed(transfer.blocks))
            transfer.blocks = []
        while self.in_flight and self.in_flight[0].over:
            self.in_flight.popleft()
            self._over -= 1
            for early in self._early:
                early.discard(self._first)
            self._first += 1

    def _newly_over(self) -> list[int]:
        """Numbers of the transfers that every rank has reported since the last time, in order."""
        end = min(*self._done, self._first + len(self.in_flight))
        early = set.intersection(*self._early) if self._early[0] else set()
        numbers = [*range(self._first, end), *sorted(early - set(range(self._first, end)))]
        last = self._first + len(self.in_flight)
        return [number for number in numbers if number < last and not self.in_flight[number - self._first].over]

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
