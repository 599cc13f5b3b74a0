"""Several coordinators: each counts what the others have placed, and equal prompts go the same way."""

from __future__ import annotations

from functools import cache

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Action, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import hash_chain
from shared.ids import DetokenizerId, EngineId, InstanceId
from shared.messages.coordinator import PlacementMade
from shared.messages.lifecycle import Lifecycle
from tests.support.engines.coordinator_events import MODEL, at, detokenizer, engine, life, route
from tests.support.engines.routing_simulation import Load, Outcome, Simulation

ONE, TWO = InstanceId("c-1"), InstanceId("c-2")
BOTH = (life("coordinator", ONE), life("coordinator", TWO))
BLOCKS = 40
LONG = BLOCKS * BLOCK_SIZE + 3


def coordinator(name: InstanceId, *lives: Lifecycle, turn: int = 0, policy: str = "kv") -> Coordinator:
    core = Coordinator(name, CoordinatorConfig(router_policy=policy), turn=turn)  # type: ignore[arg-type]
    for heard in (*lives, detokenizer()):
        core.lifecycle(heard, at(0))
    return core


def engines(*names: str, **load: int) -> list[Lifecycle]:
    return [engine(name, max_running=64, max_model_len=4096, blocks_used=0, **load) for name in names]


def placed(actions: list[Action]) -> PlaceRequest:
    (place,) = actions
    assert isinstance(place, PlaceRequest)
    return place


def announced_by_two(where: str, prompt: bytes = b"", blocks: int = 1, decode_on: str | None = None) -> PlacementMade:
    return PlacementMade(
        coordinator=TWO,
        engine=EngineId(where),
        detokenizer=DetokenizerId("detokenizer-1"),
        model=MODEL,
        prompt=prompt,
        prompt_blocks=len(prompt) and blocks,
        blocks=blocks,
        reused=0,
        on_device=0,
        decode_on=None if decode_on is None else EngineId(decode_on),
    )


def test_who_is_alone_tells_nobody() -> None:
    core = coordinator(ONE, *engines("a"))
    assert placed(core.route(route("r"), at(1))).announcement is None


def test_what_is_announced_is_what_was_placed() -> None:
    core = coordinator(ONE, *engines("a"), *BOTH)
    asked = route("r", prompt=LONG)
    assert placed(core.route(asked, at(1))).announcement == PlacementMade(
        coordinator=ONE,
        engine=EngineId("a"),
        detokenizer=DetokenizerId("detokenizer-1"),
        model=MODEL,
        prompt=hash_chain(asked.generation.tokens, None, 16)[BLOCKS - 1],
        prompt_blocks=BLOCKS,
        blocks=BLOCKS + 1,
        reused=0,
        on_device=0,
    )


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
def test_what_another_has_placed_counts_as_ones_own(policy: str) -> None:
    core = coordinator(ONE, *engines("a", "b"), *BOTH, policy=policy)
    for _ in range(3):
        core.record_announcement(announced_by_two("a"), at(1))
    places = [placed(core.route(route(f"r{number}", prompt=4), at(1))).engine for number in range(4)]
    assert places[:3] == ["b", "b", "b"]


def test_ones_own_announcement_is_no_second_request() -> None:
    core = coordinator(ONE, *engines("a", "b"), *BOTH)
    places = []
    for number in range(4):
        place = placed(core.route(route(f"r{number}", prompt=4), at(1)))
        places.append(place.engine)
        assert place.announcement is not None
        core.record_announcement(place.announcement, at(1))
        assert next(iter(core.fleet.decode_candidates(route("x").generation))).reserved.requests == places.count(
            EngineId("a")
        )
    assert sorted(places) == ["a", "a", "b", "b"]


def test_a_report_takes_the_place_of_what_was_announced_before_it() -> None:
    core = coordinator(ONE, *engines("a", "b"), *BOTH)
    core.record_announcement(announced_by_two("a", blocks=50), at(1))
    core.lifecycle(engines("a")[0], at(1.05))
    assert placed(core.route(route("r", prompt=4), at(1.06))).engine == "b", "the two may have crossed"
    core.lifecycle(engines("a")[0], at(2))
    candidates = core.fleet.decode_candidates(route("x").generation)
    assert [candidate.reserved.blocks for candidate in candidates] == [0, 1]


def test_who_decodes_what_another_has_handed_over_will_hold_it() -> None:
    core = coordinator(ONE, *engines("a", "b"), *BOTH)
    core.record_announcement(announced_by_two("a", blocks=50, decode_on="b"), at(1))
    placed_there = [candidate.reserved for candidate in core.fleet.decode_candidates(route("x").generation)]
    assert [(each.prefill, each.blocks) for each in placed_there] == [(50, 50), (0, 50)]


def test_of_an_engine_that_nobody_reports_nothing_is_kept() -> None:
    core = coordinator(ONE, *engines("a"), *BOTH)
    core.record_announcement(announced_by_two("b", blocks=50), at(1))
    core.lifecycle(engines("b")[0], at(1.01))
    assert [candidate.reserved.requests for candidate in core.fleet.decode_candidates(route("x").generation)] == [0, 0]


def test_what_was_announced_of_an_engine_that_died_is_forgotten() -> None:
    core = coordinator(ONE, *engines("a"), *BOTH)
    core.record_announcement(announced_by_two("a"), at(1))
    core.lifecycle(engines("a", incarnation=2)[0], at(1.01))
    assert next(iter(core.fleet.decode_candidates(route("x").generation))).reserved.requests == 0


def test_choices_of_one_request_go_to_one_engine_whichever_coordinators_they_come_to() -> None:
    """At the same moment, before either has heard of the other; and behind each other."""
    cores = [coordinator(name, *engines("a", "b", "c"), *BOTH, turn=turn) for turn, name in enumerate((ONE, TWO))]

    def tell(place: PlaceRequest) -> None:
        assert place.announcement is not None
        for core in cores:
            core.record_announcement(place.announcement, at(1))

    for prompt in range(8):
        asked = [route(f"p{prompt}-{n}", prompt=LONG, seed=1000 * prompt) for n in range(6)]
        places = [placed(core.route(each, at(1))) for core, each in zip(cores, asked, strict=False)]
        for place in places:
            tell(place)
        for number, each in enumerate(asked[2:]):
            places.append(placed(cores[number % 2].route(each, at(1))))
            tell(places[-1])
        assert len({place.engine for place in places}) == 1
        assert all(place.generate.predicted_cached == BLOCKS * BLOCK_SIZE for place in places[2:])


LOADS = {
    "prefixes": Load(rate=100, seconds=5),
    "choices": Load(rate=160, seconds=3, prefixes=60, prefix=2048, choices=8),
}


@cache
def outcome(load: str, coordinators: int) -> Outcome:
    return Simulation(CoordinatorConfig(), LOADS[load], coordinators=coordinators).run()


@pytest.mark.parametrize("load", LOADS)
def test_two_coordinators_place_as_well_as_one(load: str) -> None:
    one, two = outcome(load, 1), outcome(load, 2)
    assert two.least_share >= 0.9 * one.least_share
    assert two.hit_rate > one.hit_rate - 0.02
    assert two.first_token(0.5) < 1.2 * one.first_token(0.5)
    assert two.first_token(0.9) < 1.2 * one.first_token(0.9)
