"""The planner's decisions, from reports to what is to be done."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.planner.core.planner import CORRECTION_BOUNDS, FleetPlanner, FleetProfiles
from services.planner.core.predictors import ConstantPredictor
from services.planner.core.scaling_guard import PlannerLimits
from services.planner.core.sizing import LatencyTargets
from shared.messages.supervisor import PlannerDecision
from tests.support.engines.planner_profiles import PROFILE, report, seen

TARGETS = LatencyTargets(ttft=0.3, itl=0.015)
LIMITS = PlannerLimits(maximum=6, interval=10.0, start_seconds=10.0, stabilization=20.0)


def planner(profiles: FleetProfiles | None = None) -> FleetPlanner:
    return FleetPlanner(profiles or FleetProfiles(PROFILE), TARGETS, LIMITS, ConstantPredictor())


def pool(decision: PlannerDecision) -> tuple[int, int, int]:
    only = decision.pools[0]
    return only.present, only.wanted, only.target


def test_nothing_happens_before_there_was_a_request() -> None:
    each = planner()
    assert pool(each.decide(seen(report(0), report(0)), 0.0)) == (2, 2, 2)
    assert pool(each.decide(seen(report(0), report(0)), 10.0)) == (2, 2, 2)


def test_a_load_that_rises_starts_engines_once_and_counts_those_that_start() -> None:
    each = planner()
    each.decide(seen(report(0)), 0.0)
    risen = each.decide(seen(report(200)), 10.0)
    assert risen.observed_rate == risen.predicted_rate == 20.0
    present, wanted, target = pool(risen)
    assert present == 1 < wanted == target
    assert pool(each.decide(seen(report(400), starting=target - 1), 20.0)) == (target, target, target)


def test_a_load_that_falls_drains_engines_after_the_stabilization_window() -> None:
    each = planner()
    for turn in range(3):
        each.decide(seen(*[report(200 * turn)] * 3), 10.0 * turn)
    counts = [each.decide(seen(*[report(400 + turn)] * 3), 30.0 + 10 * turn).pools[0].target for turn in range(4)]
    assert counts[:2] == [3, 3]
    assert counts[-1] == 1


def test_a_planner_that_starts_anew_moves_nothing() -> None:
    each = planner()
    assert pool(each.decide(seen(*[report(1000)] * 4), 0.0)) == (4, 4, 4)
    quiet = each.decide(seen(*[report(1001)] * 4), 10.0)
    assert (quiet.pools[0].wanted, quiet.pools[0].target, quiet.pools[0].reason) == (1, 4, "stabilizing")


def test_a_backlog_is_worked_off_within_an_interval() -> None:
    each = planner()
    each.decide(seen(report(0)), 0.0)
    decision = each.decide(seen(report(50), queued=101), 10.0)
    assert decision.backlog == 101
    assert decision.predicted_rate == pytest.approx(15.1 + 10.0)


def test_an_engine_that_is_slower_than_its_profile_gets_help() -> None:
    each, slow = planner(), planner()
    for turn in range(20):
        right = each.decide(seen(*[report(60 * turn, ttft=0.05, itl=0.0075)] * 3), 10.0 * turn)
        wrong = slow.decide(seen(*[report(60 * turn, ttft=0.05, itl=0.012)] * 3), 10.0 * turn)
    assert wrong.itl_correction > 1.3 > right.itl_correction
    assert wrong.itl_correction <= CORRECTION_BOUNDS[1]
    assert wrong.pools[0].wanted > right.pools[0].wanted


def test_prefill_and_decode_engines_are_two_pools() -> None:
    each = planner(FleetProfiles(PROFILE, PROFILE))
    each.decide(seen(report(0, role="prefill"), report(0, role="decode")), 0.0)
    decision = each.decide(seen(report(400, role="prefill"), report(0, role="decode", output=99)), 10.0)
    assert [each.role for each in decision.pools] == ["prefill", "decode"]
    assert [each.present for each in decision.pools] == [1, 1]
    assert decision.changes
    assert sum(each.target for each in decision.pools) <= LIMITS.maximum


def test_a_decision_says_its_numbers() -> None:
    each = planner()
    each.decide(seen(report(0)), 0.0)
    said = each.decide(seen(report(300)), 10.0)
    assert (said.observed_rate, said.prompt_tokens, said.output_tokens) == (30.0, 1024.0, 100.0)
    assert said.forecast_ttft <= TARGETS.ttft
    assert said.forecast_itl <= TARGETS.itl
    assert said.changes == said.pools
    assert said.pools[0].reason == "as wanted"


def test_a_load_beyond_the_measured_profile_is_planned_with_the_live_one_and_the_decision_says_so() -> None:
    short = replace(PROFILE, reach=1.5)
    live = replace(PROFILE, source="live")
    each = planner(FleetProfiles(short))
    each.fallback = FleetProfiles(live)
    each.decide(seen(report(0)), 0.0)
    within = each.decide(seen(report(20)), 10.0)
    assert (within.profile, within.profile_note) == ("measured", "")
    beyond = each.decide(seen(report(420, prompt=8000)), 20.0)
    assert beyond.profile == "live"
    assert "tokens: measured up to 4,096, continued up to 6,144" in beyond.profile_note
    assert beyond.pools[0].wanted > 1
    each.fallback = None
    undecided = each.decide(seen(report(820, prompt=8000)), 30.0)
    assert (undecided.profile, undecided.pools[0].reason) == ("none", "nothing to change")
