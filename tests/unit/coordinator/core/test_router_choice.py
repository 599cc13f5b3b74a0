"""Engines are kept in order of their work: the choice is the one that looking at every engine would make."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.engine_pool import Candidate, EnginePool, blocks_of
from services.coordinator.core.reservations import ReservedWork
from shared.ids import EngineId, InstanceId
from shared.messages.coordinator import Route
from shared.messages.lifecycle import Lifecycle, StepTimeFit, StepTimesReport
from tests.support.engines.coordinator_events import at, detokenizer, engine, holds, life, route, store
from tests.support.engines.exhaustive_router import ExhaustiveRouter

BLOCK = 16
NODES = ("n0", "n1", "n2")


class RandomFleet:
    """Owns a coordinator's core, to which a fleet of engines says anything that engines say."""

    def __init__(self, seed: int, config: CoordinatorConfig, engines: int = 12, *, stores: bool, split: bool) -> None:
        self.random = Random(seed)
        self.core = Coordinator(InstanceId("coordinator-1"), config)
        self.names = [f"e{number:02}" for number in range(engines)]
        self.numbers: dict[str, int] = {}
        self.stores, self.split = stores, split
        self.seconds = 0.0
        self.requests = 0
        self.core.lifecycle(detokenizer(), at(0))
        for name in self.names:
            self.core.lifecycle(self.report(name), at(0))
        if stores:
            for node in NODES:
                self.core.lifecycle(store(node), at(0))

    def node(self, name: str) -> str | None:
        """Of most engines, where there are stores."""
        number = int(name[1:])
        return NODES[number % 3] if self.stores and number % 5 else None

    def report(self, name: str) -> Lifecycle:
        random, number = self.random, int(name[1:])
        phase = "draining" if random.random() < 0.05 else "ready"
        return engine(
            name,
            phase,  # type: ignore[arg-type]
            waiting=random.choice((0, 0, 0, 1, 9, 12)),
            running=random.randrange(9),
            max_running=8,
            max_waiting=12,
            max_model_len=512 if number % 4 == 1 else 4096,
            blocks_total=1000,
            blocks_used=random.randrange(0, 900, 100),
            incarnation=1 + (random.random() < 0.02),
            progress=random.randrange(5),
            role=random.choice(("prefill", "decode")) if self.split else "mixed",
            node=self.node(name),
            prefill_tokens=random.choice((0, 0, 160, 1600)),
            steps=random.randrange(1000),
            step_times=self.step_times(number),
        )

    def step_times(self, number: int) -> StepTimesReport | None:
        """Of three kinds of engines, and of some that say nothing; now and then of a machine that is busy."""
        if number % 5 == 4:
            return None
        seconds = 0.01 * (1, 1, 2)[number % 3] * self.random.choice((1, 1, 1, 1.6))
        decodes = StepTimeFit(8.0, 100.0, seconds, seconds / 100, 0.0)
        return StepTimesReport(StepTimeFit(500.0, 100.0, 3 * seconds, seconds / 500, 0.0), decodes)

    def request(self) -> Route:
        random = self.random
        self.requests += 1
        return route(
            f"r{self.requests}",
            prompt=random.choice((5, 100, 320, 480, 700)),
            seed=random.randrange(3) * 100_000,
            avoid=tuple(random.sample(self.names, 2)) if random.random() < 0.1 else (),
            key=random.choice(("", "k")),
        )

    def something_happens(self) -> None:
        random, core = self.random, self.core
        self.seconds += random.choice((0.001, 0.02, 0.1))
        name, now = random.choice(self.names), at(self.seconds)
        match random.randrange(8):
            case 0 | 1 | 2:
                core.lifecycle(self.report(name), now)
            case 3 | 4:
                self.holds(name)
            case 5 if self.stores:
                self.holds(f"kvstore-{random.choice(NODES)}")
            case 6:
                core.fleet.mark_unreachable(EngineId(name))
            case 7 if random.random() < 0.3:
                phase = random.choice(("ready", "draining"))
                core.lifecycle(life("coordinator", "coordinator-2", phase), now)  # type: ignore[arg-type]
            case _:
                core.time_passed(now)

    def holds(self, name: str) -> None:
        hashes = self.request().generation.block_hashes
        number = self.numbers.get(name, 0)
        self.numbers[name] = number + 1
        node = self.node(name) if name.startswith("e") else None
        self.core.blocks_changed(holds(name, hashes, number=number, node=node), at(self.seconds))


CONFIGS = {
    "kv": CoordinatorConfig(),
    "kv with chance": CoordinatorConfig(router_temperature=0.3),
    "kv, narrow": CoordinatorConfig(router_saturation=1.0, engine_fill=1.0),
    "kv, hands over": CoordinatorConfig(disaggregate_tokens=100, disaggregate_least=16),
    "least-loaded": CoordinatorConfig(router_policy="least-loaded"),
    "round-robin": CoordinatorConfig(router_policy="round-robin"),
    "random": CoordinatorConfig(router_policy="random"),
}


@pytest.mark.parametrize("stores", [False, True], ids=["engines alone", "with stores"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_choice_is_that_of_looking_at_every_engine(name: str, stores: bool) -> None:
    placed, config = 0, CONFIGS[name]
    for seed in range(4):
        fleet = RandomFleet(seed, config, stores=stores, split=name == "kv, hands over" or seed == 3)
        core = fleet.core
        exhaustive = ExhaustiveRouter(core.fleet, core.sources, core._expected, config)
        for _ in range(80):
            fleet.something_happens()
            asked, now = fleet.request(), at(fleet.seconds)
            ours = core._router.choose(asked.generation, now.now)
            room = core.fleet.has_room(asked.generation.model, fair=bool(asked.generation.key))
            theirs = exhaustive.choose(asked.generation, now.now)
            assert ours == theirs
            assert room == core.fleet.has_room(asked.generation.model, fair=bool(asked.generation.key))
            placed += sum(isinstance(action, PlaceRequest) for action in core.route(asked, now))
            core.queue.clear()
    assert placed > 100


def candidate(name: str, used: int) -> Candidate:
    given = engine(name, blocks_used=used)
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    core.lifecycle(given, at(0))
    (load,) = core.fleet.ready(given.engine.model.name)  # type: ignore[union-attr]
    return Candidate.of(load, ReservedWork())


@pytest.mark.parametrize("without", [(), ("b",), ("a", "b", "c")])
def test_the_least_loaded_are_found_whoever_changes_comes_or_goes(without: tuple[str, ...]) -> None:
    pool = EnginePool(blocks_of, [candidate("c", 5), candidate("a", 5)])
    pool.put(candidate("b", 7))
    assert names(pool.least) == ["a", "c"]
    pool.put(candidate("b", 5))
    pool.put(candidate("d", 6))
    pool.drop(EngineId("a"))
    pool.drop(EngineId("a"))
    expected = [name for name in ("b", "c") if name not in without] or ["d"]
    assert names(lambda: pool.least(without)) == expected
    assert [each.engine.id for each in pool] == ["b", "c", "d"] == sorted(each.engine.id for each in pool.by_work())
    assert len(pool) == 3
    assert EnginePool(blocks_of).least() == []


def names(least: Callable[[], list[Candidate]]) -> list[str]:
    return [each.engine.id for each in least()]
