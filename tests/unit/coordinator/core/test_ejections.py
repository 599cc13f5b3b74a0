"""Engines that are suspects get no requests, within a bound, and all coordinators choose the same ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.outliers import RatedEngine, choose_ejected
from shared.ids import InstanceId
from shared.messages.lifecycle import EngineHealth, Lifecycle
from tests.support.engines.coordinator_events import MODEL, at, detokenizer, engine, route, summary

SUSPECT = EngineHealth(suspect="canary: wrong", ejections=1, faults=2)


def rated(*healths: EngineHealth | None) -> list[RatedEngine]:
    return [RatedEngine(InstanceId(chr(97 + number)), health) for number, health in enumerate(healths)]


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_never_more_than_the_share_and_never_the_last_one(count: int, share: float) -> None:
    out = choose_ejected(rated(*[SUSPECT] * count), share)
    assert len(out) == min(int(share * count), count - 1)


def test_sound_engines_and_those_of_older_releases_stay() -> None:
    assert choose_ejected(rated(None, EngineHealth(ejections=4), SUSPECT), 0.5) == {"c"}


def test_the_worst_go_first() -> None:
    accused = EngineHealth(suspect="requests failed")
    again = replace(accused, ejections=3)
    assert choose_ejected(rated(accused, SUSPECT, again, accused), 0.5) == {"b", "c"}


def suspect(name: str, **load: int) -> Lifecycle:
    life = engine(name, **load)  # type: ignore[arg-type]
    assert life.engine is not None
    return replace(life, engine=replace(life.engine, health=SUSPECT))


def test_an_idle_suspect_gets_nothing_while_another_one_is_ready() -> None:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    for life in (suspect("a"), engine("b", running=3), detokenizer()):
        core.lifecycle(life, at(0))
    assert [summary(core.route(route(f"r{i}"), at(1)))[0][2] for i in range(3)] == ["b"] * 3
    assert core.fleet.ejected(MODEL) == {"a"}
    core.lifecycle(engine("a"), at(2))
    assert core.fleet.ejected(MODEL) == frozenset()
    assert summary(core.route(route("r9"), at(2)))[0][2] == "a"


def test_a_lone_suspect_serves_on() -> None:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    for life in (suspect("a"), engine("b", "starting"), detokenizer()):
        core.lifecycle(life, at(0))
    assert summary(core.route(route("r"), at(1)))[0][2] == "a"


def test_coordinators_that_see_the_same_eject_the_same() -> None:
    lives = [suspect(name) for name in "dbca"]
    chosen = []
    for order in (lives, lives[::-1]):
        core = Coordinator(InstanceId(f"coordinator-{len(chosen)}"), CoordinatorConfig(max_ejected_share=0.5))
        for life in order:
            core.lifecycle(life, at(0))
        chosen.append(core.fleet.ejected(MODEL))
    assert chosen[0] == chosen[1] == {"a", "b"}
