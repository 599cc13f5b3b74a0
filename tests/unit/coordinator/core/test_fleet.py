"""Which engine a coordinator chooses by load alone, and what it takes an engine's load to be."""

from __future__ import annotations

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.engine_pool import cost, room, share
from shared.ids import DetokenizerId, InstanceId
from shared.messages.lifecycle import EngineReport, Lifecycle
from tests.support.engines.coordinator_events import at, detokenizer, engine, life, route, summary

LEAST_LOADED = CoordinatorConfig(router_policy="least-loaded")


def coordinator(
    *lives: Lifecycle,
    routing: CoordinatorConfig = LEAST_LOADED,
    name: str = "coordinator-1",
) -> Coordinator:
    core = Coordinator(InstanceId(name), routing)
    for heard in (*lives, detokenizer()):
        core.lifecycle(heard, at(0))
    return core


def placed_on(core: Coordinator, count: int, seconds: float = 1.0, first: int = 0) -> list[str]:
    lines = [summary(core.route(route(f"r{first + i}"), at(seconds)))[0] for i in range(count)]
    return [where[2] if where[0] == "place" else where[0] for where in lines]


def report(**load: int) -> EngineReport:
    answer = engine("e", **load).engine  # type: ignore[arg-type]
    assert answer is not None
    return answer


def test_waiting_work_costs_four_times_what_runs() -> None:
    core = coordinator(engine("a", running=4), engine("b", waiting=1, running=1))
    assert placed_on(core, 1) == ["a"]


def test_equal_engines_get_equal_shares() -> None:
    core = coordinator(*(engine(name) for name in "abc"))
    placed = placed_on(core, 9)
    assert sorted(placed) == sorted("abcabcabc")
    assert set(placed[:3]) == set("abc")


def test_a_placement_counts_before_any_report_shows_it() -> None:
    core = coordinator(engine("a", running=2), engine("b"))
    assert placed_on(core, 2) == ["b", "b"]
    assert set(placed_on(core, 2, first=2)) == {"a", "b"}


def test_a_report_takes_the_place_of_what_was_placed_before_it() -> None:
    core = coordinator(engine("a", max_running=2, max_waiting=0))
    assert placed_on(core, 3, seconds=1) == ["a", "a", "queued"]
    assert summary(core.lifecycle(engine("a", max_running=2, max_waiting=0), at(1.5))) == [("place", "r2", "a")]


def test_a_report_that_may_have_crossed_a_placement_does_not_hide_it() -> None:
    core = coordinator(engine("a", max_running=2, max_waiting=0))
    assert placed_on(core, 3, seconds=1.45) == ["a", "a", "queued"]
    crossed = engine("a", max_running=2, max_waiting=0)
    assert core.lifecycle(crossed, at(1.5)) == []
    assert summary(core.lifecycle(crossed, at(2.0))) == [("place", "r2", "a")]


def test_coordinators_of_different_names_begin_with_different_engines() -> None:
    lives = [engine("a"), engine("b"), detokenizer()]
    first = []
    for turn in (0, 1):
        core = Coordinator(InstanceId(f"coordinator-{turn}"), CoordinatorConfig(), turn=turn)
        for heard in lives:
            core.lifecycle(heard, at(0))
        first += placed_on(core, 1)
    assert first == ["a", "b"]


def test_among_engines_that_are_idle_again_and_again_everyone_has_its_turn() -> None:
    core = coordinator(engine("a"), engine("b"), engine("c"))
    placed = []
    for second in range(1, 7):
        placed += placed_on(core, 1, seconds=second, first=second)
        for name in "abc":
            core.lifecycle(engine(name), at(second + 0.5))
    assert sorted(placed) == sorted("abcabc")


def test_coordinators_share_an_engines_last_room_without_overfilling_it() -> None:
    lives = [engine("a", running=1, max_running=4, max_waiting=0, progress=p) for p in (0, 1)]
    for now in lives:
        taken = 0
        for name, other in (("c-1", "c-2"), ("c-2", "c-1")):
            core = coordinator(now, life("coordinator", other), name=name)
            taken += placed_on(core, 5).count("a")
        assert taken == 3


def test_a_drained_or_starting_engine_gets_nothing() -> None:
    core = coordinator(engine("a", "draining"), engine("b", waiting=3), engine("c", "starting"))
    assert placed_on(core, 2) == ["b", "b"]
    core.lifecycle(engine("b", "draining"), at(1))
    assert placed_on(core, 1, first=2) == ["queued"]
    assert summary(core.lifecycle(engine("a"), at(1.5))) == [("place", "r2", "a")]


def test_engines_to_avoid_are_used_only_where_there_is_no_other() -> None:
    core = coordinator(engine("a"), engine("b", waiting=2))
    assert summary(core.route(route("r", avoid=("a",)), at(1))) == [("place", "r", "b")]
    core.lifecycle(engine("b", "stopped"), at(1))
    assert summary(core.route(route("s", avoid=("a",)), at(1))) == [("place", "s", "a")]


def test_who_waits_for_a_full_engine_rather_than_one_to_avoid_holds_up_nobody() -> None:
    core = coordinator(engine("a"), engine("b", waiting=8))
    assert summary(core.route(route("r", avoid=("a",)), at(1))) == [("queued", "r")]
    assert summary(core.route(route("s"), at(1))) == [("place", "s", "a")]
    assert summary(core.lifecycle(engine("b", waiting=7), at(1.5))) == [("place", "r", "b")]


def test_the_detokenizer_with_the_least_load_gets_the_text() -> None:
    core = coordinator(engine("a", max_running=8), detokenizer("detokenizer-2", load=2))
    chosen = []
    for i in range(4):
        (action,) = core.route(route(f"r{i}"), at(1))
        chosen.append(action.generate.detokenizer)  # type: ignore[union-attr]
    assert chosen[:2] == [DetokenizerId("detokenizer-1")] * 2
    assert set(chosen[2:]) == {"detokenizer-1", "detokenizer-2"}


def test_an_engine_whose_context_is_too_short_is_passed_over() -> None:
    core = coordinator(engine("a", max_model_len=16), engine("b", waiting=5))
    assert summary(core.route(route("r", prompt=20), at(1))) == [("place", "r", "b")]


def test_a_free_slot_is_no_room_while_something_waits() -> None:
    assert room(report(waiting=0, running=1), fill=None) == 11
    assert room(report(waiting=1, running=1), fill=None) == 7
    assert room(report(waiting=8, running=1), fill=None) == 0
    assert room(report(waiting=3, running=4), fill=2) == 1


def test_placements_take_free_slots_before_they_wait() -> None:
    assert cost(report(running=2), 2) == 4
    assert cost(report(running=2), 3) == 4 + 4
    assert cost(report(waiting=1, running=2), 1) == 2 + 8


def test_shares_add_up_to_the_whole() -> None:
    for whole in range(10):
        for parts in range(1, 5):
            assert sum(share(whole, parts, turn) for turn in range(3, 3 + parts)) == whole
