"""Prompts that wait in a coordinator until a prefill engine pulls them: nothing is lost, and nothing is given twice."""

from __future__ import annotations

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Action, NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.config import ConfigError, load_config
from shared.ids import Attempt, EngineId, InstanceId, RequestId
from shared.messages.coordinator import PullPrefills, Withdraw
from shared.messages.gateway import RequestQueued
from tests.support.engines.coordinator_events import at, detokenizer, route
from tests.unit.coordinator.core.test_router_disaggregation import BLOCK, D1, D2, LONG, P1, P2, pool

CONFIG = CoordinatorConfig(
    disaggregate_tokens=100 * BLOCK, disaggregate_busy=500 * BLOCK, prefill_queue=True, prefill_queue_s=5.0
)
R = RequestId("r")


def coordinator(config: CoordinatorConfig = CONFIG) -> Coordinator:
    core = Coordinator(InstanceId("coordinator-1"), config)
    for life in (detokenizer(), P1, P2, D1, D2):
        core.lifecycle(life, at(0))
    return core


def placed(actions: list[Action]) -> list[tuple[str, str, str | None]]:
    return [
        (action.generate.generation.request, action.engine, action.generate.decode_on)
        for action in actions
        if isinstance(action, PlaceRequest)
    ]


def pull(core: Coordinator, engine: str, tokens: int, now: float) -> list[tuple[str, str, str | None]]:
    return placed(core.pull(PullPrefills(EngineId(engine), tokens), at(now)))


def test_a_long_prompt_waits_until_an_engine_pulls_and_its_gateway_is_told() -> None:
    core = coordinator()
    [told] = core.route(route("r", prompt=LONG), at(1))
    assert isinstance(told, NotifyGateway)
    assert isinstance(told.message, RequestQueued)
    [(request, engine, decode_on)] = pull(core, "p2", 2048, 1.5)
    assert (request, engine) == ("r", "p2")
    assert decode_on in ("d1", "d2"), "chosen when it is given, by the load of that moment"
    assert not core.prefills


def test_who_has_asked_before_gets_it_at_once_and_no_more_than_was_asked_for() -> None:
    core = coordinator()
    assert pull(core, "p1", LONG + 1, 1.0) == []
    given = [placed(core.route(route(name, prompt=LONG), at(1.1))) for name in ("a", "b", "c")]
    assert [[row[:2] for row in rows] for rows in given] == [[("a", "p1")], [("b", "p1")], []]
    assert len(core.prefills) == 1
    assert [row[:2] for row in pull(core, "p2", 1, 1.2)] == [("c", "p2")], "a prompt is given whole"


def test_prompts_go_in_order_and_short_ones_never_wait() -> None:
    core = coordinator()
    for number, name in enumerate("abc"):
        core.route(route(name, prompt=LONG), at(1 + number / 10))
    [(_, engine, decode_on)] = placed(core.route(route("short", prompt=2 * BLOCK), at(1.5)))
    assert (engine in ("d1", "d2"), decode_on) == (True, None)
    assert [row[0] for row in pull(core, "p1", 3 * LONG, 2.0)] == ["a", "b", "c"]


def test_what_was_taken_back_is_not_given_and_an_engine_that_drains_gets_nothing() -> None:
    core = coordinator()
    pull(core, "p1", LONG, 1.0)
    pull(core, "p1", 0, 2.0)
    pull(core, "p2", LONG, 2.9)
    core.lifecycle(pool("p2", "prefill", "draining"), at(3.0))
    assert placed(core.route(route("r", prompt=LONG), at(3.1))) == []
    assert len(core.prefills) == 1


def test_a_prompt_that_nobody_pulls_in_time_is_computed_where_it_is_decoded() -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    assert placed(core.time_passed(at(1.9))) == []
    for life in (detokenizer(), P1, P2, D1, D2):
        core.lifecycle(life, at(6.0))
    [(request, engine, decode_on)] = placed(core.time_passed(at(6.1)))
    assert (request, engine in ("d1", "d2"), decode_on) == ("r", True, None)
    assert not core.prefills


def test_without_prefill_engines_what_waits_is_placed_at_once() -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    for name in ("p1", "p2"):
        core.lifecycle(pool(name, "prefill", "stopped"), at(1.2))
    assert [row[0] for row in placed(core.time_passed(at(1.3)))] == ["r"]


def test_the_queue_is_bounded_by_tokens_for_each_engine() -> None:
    core = coordinator()  # 500 blocks for each of two engines
    rows = [placed(core.route(route(f"r{number}", prompt=LONG), at(1))) for number in range(6)]
    assert [bool(row) for row in rows] == [False] * 5 + [True], "the sixth is not disaggregated"


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_is_withdrawn_is_not_given_out(attempt: int) -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    assert core.withdraw(Withdraw(R, Attempt(attempt))) == []
    assert pull(core, "p1", LONG, 2.0) == []


def test_a_new_attempt_replaces_the_one_that_waits() -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    core.route(route("r", 2, prompt=LONG), at(2))
    actions = core.pull(PullPrefills(EngineId("p1"), 3 * LONG), at(3.0))
    assert [a.generate.generation.attempt for a in actions if isinstance(a, PlaceRequest)] == [2]


def test_a_puller_that_cannot_be_reached_leaves_its_prompt_to_the_others() -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    [action, *_] = core.pull(PullPrefills(EngineId("p1"), LONG), at(2.0))
    assert isinstance(action, PlaceRequest)
    core.engine_unreachable(action.generate, at(2.1))
    assert [row[:2] for row in pull(core, "p2", LONG, 2.2)] == [("r", "p2")]


def test_a_coordinator_that_drains_gives_what_waits_to_another() -> None:
    core = coordinator()
    core.route(route("r", prompt=LONG), at(1))
    assert core.release_queue() == [], "there is no other"
    assert len(core.prefills) == 1


def test_the_other_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill-first"):
        load_config("coordinator", CoordinatorConfig, ["--prefill-queue", "--pd-order=decode-first"], {})
