"""`baton bench routing`: what the coordinator's core spends on placements and on what engines report. Nothing is
started; processor time, as machines are shared."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args

from services.bench.options import natural, output_group, output_options, parse, whole
from services.bench.report import WIDTH, OutputOptions, Report, Table, line, rule
from services.bench.statistics import percentile
from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.actions import Moment, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.blocks import HASH_BYTES
from shared.ids import Attempt, GatewayId, Incarnation, InstanceId, ModelName, NodeId, RequestId
from shared.messages.coordinator import Route
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.kv_events import KvEvents, KvSource
from shared.messages.lifecycle import HEARTBEAT_SECONDS, EngineReport, Lifecycle, Service, StoreReport
from shared.messages.model_card import ModelCard
from shared.packing import TOKEN_BYTES

MODEL = ModelName("m")
CARD = ModelCard(name=MODEL, max_model_len=1 << 20, vocab_size=1, eos_token_ids=(0,), dtype="bfloat16", created=0)
MAX_RUNNING = 256
REQUESTS_PER_ENGINE = 4.0
"""Placements per second and engine: with a report every half second there are half as many reports as placements."""
REMEMBERED_CHAINS = 4096
"""Prompts of which some request has the beginning."""
CACHED_SHARE = 0.8
"""Of requests; the others have nothing in common with what is cached."""
OWN_BLOCKS = 8
"""Blocks of a request behind what it shares."""
PAGE_FILE = Path("/proc/self/statm")
PAGE_BYTES = 4096

DESCRIPTION = """\
Fills the prefix map of a coordinator's core with the blocks of simulated engines, then has it place requests, most of
which begin with cached blocks, while engines report their load and their new blocks. Everything is timed one by one, in
processor time: a placement, a report, and the events of blocks.
"""


class RoutingOptions(NamedTuple):
    """The flags of `bench routing`."""

    engines: list[int]
    blocks: int
    prompt_blocks: int
    holders: int
    nodes: int
    requests: int
    policy: Policy
    seed: int
    output: OutputOptions


def routing_options(argv: Sequence[str] | None) -> RoutingOptions:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser(
        prog="bench routing", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--engines", type=natural, nargs="+", default=[64], help="one run each; default: 64")
    made.add_argument("--blocks", type=natural, default=100_000, help="cached by each engine; default: %(default)s")
    made.add_argument("--prompt-blocks", type=natural, default=128, help="of a prompt; default: %(default)s")
    made.add_argument("--holders", type=natural, default=4, help="engines that hold a block; default: %(default)s")
    made.add_argument("--nodes", type=whole, default=0, help="with a KV store each; default: none has one")
    made.add_argument("--requests", type=natural, default=4000, help="placements; default: %(default)s")
    made.add_argument("--policy", choices=get_args(Policy), default="kv", help="default: %(default)s")
    made.add_argument("--seed", type=int, default=0)
    output_group(made)
    given = parse(made, argv)
    given.output = output_options(given)
    if given.holders > min(given.engines):
        made.error(f"--holders {given.holders}: there are only {min(given.engines)} engines")
    return RoutingOptions(**{name: getattr(given, name) for name in RoutingOptions._fields})


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0."""
    options = routing_options(argv)
    runs = []
    for engines in options.engines:
        runs.append(RoutedFleet(engines, options).run())
        gc.collect()
    shown = {name: getattr(options, name) for name in RoutingOptions._fields[1:-1]}
    Report(options.output).end({**shown, "runs": runs}, "\n".join(_lines(options, runs)))
    return 0


class Durations:
    """Owns processor seconds of one kind of call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def time(self, call: Callable[[], Any]) -> Any:
        """What `call` returns."""
        before = time.thread_time_ns()
        result = call()
        self.seconds.append((time.thread_time_ns() - before) / 1e9)
        return result

    def microseconds(self, percent: float) -> float:
        """That percentile."""
        return percentile(self.seconds, percent) * 1e6


class RoutedFleet:
    """Owns a coordinator's core, and what simulated engines of it report."""

    def __init__(self, engines: int, options: RoutingOptions) -> None:
        self._options = options
        self._random = Random(options.seed)
        self._names = [InstanceId(f"engine-{number:04}") for number in range(engines)]
        self._stores = [InstanceId(f"kvstore-{number}") for number in range(1, options.nodes + 1)]
        self._numbers = dict.fromkeys((*self._names, *self._stores), 0)
        self._distinct = engines * options.blocks // options.holders
        config = CoordinatorConfig(router_policy=options.policy, router_index_blocks=max(1024, 3 * self._distinct))
        self._core = Coordinator(InstanceId("coordinator-1"), config)
        self._chains: list[bytes] = []
        """Some of the cached prompts, by the hashes of their blocks."""
        self._now = 0.0

    def run(self) -> dict[str, Any]:
        """All figures of it."""
        core = self._core
        core.lifecycle(_life("detokenizer", InstanceId("detokenizer-1")), self._moment())
        for name in (*self._names, *self._stores):
            core.lifecycle(self._report(name), self._moment())
        gc.collect()
        before, filled = resident_bytes(), Durations()
        filled.time(self._fill)
        held = len(core.sources.map)
        memory = resident_bytes() - before
        gc.collect()
        gc.freeze()  # as a service does once it is set up: the map is not to be looked through by every collection
        placements, reports, events = self._serve()
        gc.unfreeze()
        stored = held * (self._options.holders + bool(self._stores))
        return {
            "engines": len(self._names),
            "blocks": held,
            "memory_mib_per_million_blocks": memory / 2**20 / (held / 1e6),
            "filled_blocks_per_s": stored / filled.seconds[0],
            **_spread("placement", placements),
            **_spread("report", reports),
            **_spread("event", events),
        }

    # ---- what is cached

    def _fill(self) -> None:
        """Every prompt is stored by as many engines as hold it, and by one node's store."""
        for number, chain in enumerate(self._new_chains(self._distinct // self._options.prompt_blocks)):
            if len(self._chains) < REMEMBERED_CHAINS:
                self._chains.append(chain)
            first = number * self._options.holders
            for holder in range(self._options.holders):
                self._store(self._names[(first + holder) % len(self._names)], chain)
            if self._stores:
                self._store(self._stores[number % len(self._stores)], chain)

    def _new_chains(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self._random.randbytes(self._options.prompt_blocks * HASH_BYTES)

    def _store(self, engine: InstanceId, stored: bytes, removed: bytes = b"") -> None:
        number = self._numbers[engine]
        self._numbers[engine] = number + 1
        event = KvEvents(
            source=KvSource(instance=engine, model=MODEL, node=self._node_of(engine), store=engine in self._stores),
            epoch=Incarnation(1),
            number=number,
            stored=stored,
            removed=removed,
            cleared=number == 0,
        )
        self._core.blocks_changed(event, self._moment())

    # ---- what comes in

    def _serve(self) -> tuple[Durations, Durations, Durations]:
        """Placements, reports, and events of an engine that stores a prompt's own blocks and has evicted as many."""
        core, random = self._core, self._random
        placements, reports, events = Durations(), Durations(), Durations()
        gap = 1 / (REQUESTS_PER_ENGINE * len(self._names))
        due = 0.0
        old = list(self._new_chains(len(self._names)))
        for number in range(self._options.requests):
            self._now += gap
            route = self._route(number)
            actions = placements.time(partial(core.route, route, self._moment()))
            placed = next(each for each in actions if isinstance(each, PlaceRequest))
            engine = InstanceId(placed.engine)
            which = self._names.index(engine)
            new = route.generation.block_hashes[-OWN_BLOCKS * HASH_BYTES :]
            events.time(partial(self._store, engine, new, old[which]))
            old[which] = new
            due += gap * len(self._names) / HEARTBEAT_SECONDS
            while due >= 1:
                due -= 1
                life = self._report(random.choice(self._names))
                reports.time(partial(core.lifecycle, life, self._moment()))
        return placements, reports, events

    def _route(self, number: int) -> Route:
        shared = self._random.choice(self._chains) if self._random.random() < CACHED_SHARE and self._chains else b""
        own = self._random.randbytes(OWN_BLOCKS * HASH_BYTES)
        hashes = shared + own
        length = len(hashes) // HASH_BYTES * CARD.block_size + 1
        return Route(
            Generation(
                request=RequestId(f"r{number}"),
                attempt=Attempt(1),
                gateway=GatewayId("gateway-1"),
                model=MODEL,
                tokens=bytes(length * TOKEN_BYTES),
                prompt_length=length,
                block_hashes=hashes,
                sampling=SamplingOptions(seed=1),
                stopping=StopConditions(max_tokens=128),
            )
        )

    def _node_of(self, source: InstanceId) -> NodeId | None:
        """Of an engine or a store; engines are shared out among the nodes."""
        if not self._stores:
            return None
        return NodeId(f"node-{int(source.rpartition('-')[2]) % len(self._stores)}")

    def _report(self, engine: InstanceId) -> Lifecycle:
        """Some load: no engine is full, and hardly two have the same."""
        random, node = self._random, self._node_of(engine)
        if node is not None and engine in self._stores:
            return _life("kvstore", engine, store=_store_report(node))
        running = random.randrange(MAX_RUNNING // 2)
        report = EngineReport(
            model=CARD,
            waiting=random.randrange(3),
            running=running,
            max_waiting=MAX_RUNNING,
            max_running=MAX_RUNNING,
            blocks_total=1_000_000,
            blocks_free=1_000_000 - 64 * running - random.randrange(64),
            steps=0,
            tokens=0,
            node=node,
            prefill_tokens=random.randrange(4096),
        )
        return _life("scheduler", engine, report)

    def _moment(self) -> Moment:
        return Moment(self._now, 0.0)


def _store_report(node: NodeId) -> StoreReport:
    return StoreReport(
        node=node, slots=1, committed=1, reserved=0, pinned=0, bytes_used=0, bytes_total=0, hits=0, misses=0
    )


def _life(
    service: Service, instance: InstanceId, report: EngineReport | None = None, store: StoreReport | None = None
) -> Lifecycle:
    return Lifecycle(
        service=service,
        instance=instance,
        incarnation=Incarnation(1),
        phase="ready",
        pid=0,
        host="simulated",
        started=0.0,
        engine=report,
        store=store,
    )


def resident_bytes() -> int:
    """Of this process."""
    return int(PAGE_FILE.read_text().split()[1]) * PAGE_BYTES


def _spread(name: str, measured: Durations) -> dict[str, float]:
    return {
        f"{name}_p50_us": measured.microseconds(50),
        f"{name}_p99_us": measured.microseconds(99),
        f"{name}s_per_s": len(measured.seconds) / sum(measured.seconds),
    }


def _lines(options: RoutingOptions, runs: Sequence[dict[str, Any]]) -> list[str]:
    heading = ("engines", "million blocks", "MiB per million", "placement p50 µs", "p99", "report p50 µs", "p99")
    rows = [
        (
            f"{run['engines']}",
            f"{run['blocks'] / 1e6:.2f}",
            f"{run['memory_mib_per_million_blocks']:.0f}",
            f"{run['placement_p50_us']:.0f}",
            f"{run['placement_p99_us']:.0f}",
            f"{run['report_p50_us']:.0f}",
            f"{run['report_p99_us']:.0f}",
            f"{run['event_p50_us']:.0f}",
            f"{run['events_per_s']:,.0f}",
            f"{run['filled_blocks_per_s']:,.0f}",
        )
        for run in runs
    ]
    return [
        rule(" Routing Benchmark Result ", "="),
        line("Policy:", options.policy),
        line("Blocks per engine:", options.blocks),
        line("Engines that hold a block:", options.holders),
        line("Nodes with a KV store:", options.nodes),
        line("Placements:", options.requests),
        *Table((*heading, "event p50 µs", "events/s", "blocks stored/s"), rows).lines(),
        "=" * WIDTH,
    ]
