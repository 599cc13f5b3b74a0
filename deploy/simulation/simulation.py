"""Runs a simulation: the clients' side and the engines take turns, each as far as nothing that it does not know of yet
can reach it (conservative simulation: Chandy, Misra 1979; Bryant 1977)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from deploy.simulation.cell import Cell, CellOrder, EngineCell, ProcessCell, rare_collections
from deploy.simulation.engine import EngineTotals, number_of
from deploy.simulation.fleet import EngineLife, ScalingPolicy, SimulatedFleet
from deploy.simulation.front import RequestFront, SentRequest, Workload
from deploy.simulation.hops import HopDelays
from deploy.simulation.kit import EngineKit
from deploy.simulation.prompts import RequestRecord
from services.coordinator.config import CoordinatorConfig
from shared.ids import EngineId, RequestId

HEAD_START = 1.0
"""Seconds before the first request in which the first engines become known."""


@dataclass(slots=True)
class SimulationResult:
    """All that happened in a simulation."""

    sent: list[SentRequest]
    """All requests, in the order in which they came to the coordinator."""
    records: dict[RequestId, RequestRecord]
    """What became of those that were placed."""
    totals: list[EngineTotals]
    lives: dict[EngineId, EngineLife]
    seconds: float
    """Virtual time from the first request's sending to the last one's end."""
    peak: int
    """The most requests that were open at a time."""
    windows: int = 0
    """Turns that clients and engines took."""


@dataclass(slots=True)
class Simulation:
    """Owns a run: the clients and the coordinator, and the cells with the engines. It comes out the same however many
    cells there are, and whether they are processes."""

    front: RequestFront
    cells: Sequence[Cell]
    hops: HopDelays
    _windows: int = 0

    def run(self) -> SimulationResult:
        """To the end of the last request. Raises SimulationError."""
        next_at = self._window(0.0)
        while True:
            bound = min(self.front.next_input + self.hops.place, next_at + self.front.reaction)
            next_at = self._window(bound)
            if bound == inf and not self.front.orders:
                break
        return self._result()

    def _window(self, until: float) -> float:
        """Simulates the engines up to `until`, and the clients as far as they are sure to have heard all by then.
        Returns when something happens at an engine next, as far as is known."""
        front, cells = self.front, self.cells
        parts: list[list[CellOrder]] = [[] for _ in cells]
        orders, front.orders = front.orders, []
        for order in orders:
            parts[order.engine % len(cells)].append(order)
        for cell, part in zip(cells, parts, strict=True):
            cell.begin(part, until)
        states = [cell.finish() for cell in cells]
        for state in states:
            front.hear(state.news)
        front.run(until + self.hops.soonest_news)
        self._windows += 1
        ordered = min((order.at for order in front.orders), default=inf)
        return min(ordered, *(state.next_at for state in states))

    def _result(self) -> SimulationResult:
        closed = [cell.close() for cell in self.cells]
        records = {record.request: record for each in closed for record in each.records}
        totals = sorted((one for each in closed for one in each.totals), key=lambda one: number_of(one.engine))
        ends = [record.token_times[-1] for record in records.values() if record.token_times]
        begins = [sent.sent for sent in self.front.sent]
        seconds = max(ends, default=0.0) - min(begins, default=0.0)
        return SimulationResult(
            self.front.sent, records, totals, self.front.fleet.lives, seconds, self.front.peak, self._windows
        )


def simulate(
    make_kit: Callable[[], EngineKit],
    routing: CoordinatorConfig,
    workload: Workload,
    *,
    engines: int,
    processes: int = 0,
    policy: ScalingPolicy | None = None,
    start_seconds: float = 0.0,
) -> SimulationResult:
    """A run with so many engines at its beginning, to its end. `policy` changes their number, None: nobody does;
    `start_seconds`: what each takes to start then. `make_kit` is picklable; it is called here, and in each
    of `processes` that share the engines (0: they are simulated here). Raises SimulationError."""
    kit = make_kit()
    cells: list[Cell] = [ProcessCell(make_kit) for _ in range(processes)] or [EngineCell(kit)]
    fleet = SimulatedFleet(policy, start_seconds)
    front = RequestFront(routing, workload, kit.device.card.name, kit.hops, fleet)
    front.orders += [fleet.start(0.0, -HEAD_START, kit.pools.role_of(number)) for number in range(engines)]
    with rare_collections():
        return Simulation(front, cells, kit.hops).run()
