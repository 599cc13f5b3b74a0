"""A share of the engines, simulated together; and the same in a process of its own, so that several cores help."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from deploy.simulation.engine import (
    EngineEvent,
    EngineTotals,
    HandedRequest,
    NodeCall,
    VirtualEngine,
    engine_id,
    number_of,
)
from deploy.simulation.kit import EngineKit, SimulationError
from deploy.simulation.prompts import RequestRecord
from deploy.simulation.store import SimulatedStore
from services.scheduler.core.events import PeerChanged, ReleaseLease, SendHandOver, SendStoreRequest, StoreReplied
from shared.messages.kv_events import KvEvents
from shared.messages.lifecycle import Lifecycle, Role
from shared.messages.scheduler import GenerateRequest

STORE_NUMBER = -1
"""Of the store among engines, where news is sorted."""
COLLECT_AFTER = 500_000
"""New objects."""
STOP_SECONDS = 10.0
"""Within which a cell's process ends once it is told to."""


class StartEngine(NamedTuple):
    """A new engine, whose workers are ready at `at`."""

    engine: int
    at: float
    role: Role = "mixed"


class DrainEngine(NamedTuple):
    """An engine takes no more requests from `at` on, and stops when the last has ended."""

    engine: int
    at: float


class DeliverRequest(NamedTuple):
    """A request comes to an engine."""

    engine: int
    at: float
    request: GenerateRequest


CellOrder = StartEngine | DrainEngine | DeliverRequest


class CellState(NamedTuple):
    """How far a cell's simulation has come."""

    next_at: float
    """When something happens in it next by itself; infinity for never."""
    news: list[EngineEvent]
    """What is to be heard of its engines, in no order."""


class CellResult(NamedTuple):
    """What a cell leaves behind, by engine."""

    records: list[RequestRecord]
    """All requests that have ended, in the order of their ends."""
    totals: list[EngineTotals]


class Cell(Protocol):
    """Engines that are simulated together."""

    def begin(self, orders: Sequence[CellOrder], until: float) -> None:
        """Takes the orders, none of which is for a time that has passed, and simulates up to `until`, exclusively."""

    def finish(self) -> CellState:
        """What came of the last `begin`. Raises SimulationError."""

    def close(self) -> CellResult:
        """Ends it."""


class EngineCell:
    """Owns engines, in this process, and the KV store that they share, if any. With a store all engines must be here:
    they are simulated together, event by event."""

    def __init__(self, kit: EngineKit) -> None:
        self._kit = kit
        self.engines: dict[int, VirtualEngine] = {}
        self._store = SimulatedStore(kit.store_memory, kit.copier.block_bytes) if kit.store_memory else None
        self._news: list[EngineEvent] = []
        self._told = 0
        self._kv_due = inf
        """When the store publishes which blocks have changed; infinity while none has."""
        if self._store is not None:
            self._tell(0.0, self._store.lifecycle())

    def begin(self, orders: Sequence[CellOrder], until: float) -> None:
        """As `Cell` has it. Raises SimulationError."""
        for order in orders:
            match order:
                case DeliverRequest(engine, at, request):
                    self.engines[engine].place(request, at)
                case StartEngine(engine, at, role):
                    self.engines[engine] = VirtualEngine(engine, self._kit, ready=at, role=role)
                case DrainEngine(engine, at):
                    self._drain(engine, at)
        if self._store is not None:
            self._run_together(self._store, until)
            return
        for each in self.engines.values():
            if each.next_at < until:
                each.run(until)

    def _drain(self, number: int, at: float) -> None:
        """The others of its node hear of it: they hand nothing over to it from then on."""
        self.engines[number].drain(at)
        if self._store is not None:
            for other, engine in self.engines.items():
                if other != number:
                    engine.hear_peer(PeerChanged(engine_id(number), takes=False), at + self._kit.hops.report)

    def _run_together(self, store: SimulatedStore, until: float) -> None:
        """What reaches the store or another engine is there before anything later happens."""
        engines = self.engines.values()
        while True:
            engine = min(engines, key=_next_at, default=None)
            next_at = inf if engine is None else engine.next_at
            if self._kv_due < until and self._kv_due <= next_at:
                self._publish_blocks(store)
                continue
            if engine is None or next_at >= until:
                return
            engine.run_next()
            if engine.calls:
                calls, engine.calls = engine.calls, []
                for call in calls:
                    self._deliver(store, engine, call)

    def _deliver(self, store: SimulatedStore, engine: VirtualEngine, call: NodeCall) -> None:
        hops = self._kit.hops
        match call.message:
            case SendStoreRequest(request):
                reply = StoreReplied(request, store.answer(request, call.at))
                engine.hear_store(reply, call.at + 2 * hops.store)
            case ReleaseLease(release):
                store.release(release, call.at)
            case SendHandOver(target, generate):
                assert call.record is not None, "a request has a record"
                self.engines[number_of(target)].take_over(HandedRequest(generate, call.record), call.at + hops.place)
        if self._kv_due == inf and store.changed:
            self._kv_due = call.at + self._kit.kv_event_seconds

    def _publish_blocks(self, store: SimulatedStore) -> None:
        at, self._kv_due = self._kv_due, inf
        for event in store.take_events():
            self._tell(at + self._kit.hops.report, event)

    def _tell(self, at: float, message: Lifecycle | KvEvents) -> None:
        self._told += 1
        self._news.append(EngineEvent(at, STORE_NUMBER, self._told, message))

    def finish(self) -> CellState:
        """As `Cell` has it."""
        news, self._news = self._news, []
        next_at = self._kv_due
        for engine in self.engines.values():
            if engine.news:
                news += engine.news
                engine.news.clear()
            next_at = min(next_at, engine.next_at)
        return CellState(next_at, news)

    def close(self) -> CellResult:
        """As `Cell` has it."""
        engines = [engine for _, engine in sorted(self.engines.items())]
        return CellResult([each for engine in engines for each in engine.records], [each.totals for each in engines])


def _next_at(engine: VirtualEngine) -> float:
    return engine.next_at


class ProcessCell:
    """Owns a process with an `EngineCell` in it."""

    def __init__(self, make_kit: Callable[[], EngineKit]) -> None:
        """`make_kit` is called in the process; it is picklable."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_kit), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, orders: Sequence[CellOrder], until: float) -> None:
        """As `Cell` has it; returns at once."""
        self._pipe.send((list(orders), until))

    def finish(self) -> CellState:
        """As `Cell` has it. Raises SimulationError."""
        found = self._receive()
        assert isinstance(found, CellState)
        return found

    def close(self) -> CellResult:
        """As `Cell` has it. Raises SimulationError."""
        self._pipe.send(None)
        found = self._receive()
        assert isinstance(found, CellResult)
        self._process.join(STOP_SECONDS)
        return found

    def _receive(self) -> CellState | CellResult:
        try:
            found: CellState | CellResult | SimulationError = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise SimulationError("the process of a cell has died") from None
        if isinstance(found, SimulationError):
            raise found
        return found


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python looks for cycles of garbage seldom: the cores make none to speak of, and a tenth of a simulation's time
    goes into looking at what thousands of requests and a million blocks leave behind."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _serve(pipe: Connection, make_kit: Callable[[], EngineKit]) -> None:
    """The process of a cell, until it is told to end or its parent is gone."""
    cell = EngineCell(make_kit())
    try:
        with rare_collections():
            while (work := pipe.recv()) is not None:
                cell.begin(*work)
                pipe.send(cell.finish())
            pipe.send(cell.close())
    except SimulationError as error:
        pipe.send(error)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
