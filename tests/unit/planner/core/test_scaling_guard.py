"""What is done of what is wanted."""

from __future__ import annotations

import pytest

from services.planner.core.scaling_guard import PlannerLimits, ScalingGuard
from services.planner.core.sizing import SizeBounds

LIMITS = PlannerLimits(minimum=1, maximum=8, stabilization=30.0, cooldown=0.0)


def test_more_engines_are_started_at_once() -> None:
    assert ScalingGuard(LIMITS).guard(2, 5, 0.0) == (5, "as wanted")


def test_a_guard_that_has_just_begun_drains_nothing_for_a_whole_window() -> None:
    guard = ScalingGuard(LIMITS)
    assert guard.guard(4, 1, 0.0) == (4, "stabilizing")
    assert guard.guard(4, 1, 29.0) == (4, "stabilizing")
    assert guard.guard(4, 1, 30.0) == (1, "as wanted")


def test_the_pool_shrinks_to_the_most_that_was_wanted_lately() -> None:
    guard = ScalingGuard(LIMITS)
    for at, wanted in ((0.0, 4), (10.0, 3), (20.0, 2)):
        guard.guard(4, wanted, at)
    assert guard.guard(4, 1, 35.0) == (3, "as wanted")
    assert guard.guard(3, 1, 45.0) == (2, "as wanted")
    assert guard.guard(2, 2, 50.0) == (2, "nothing to change")


def test_after_a_change_nothing_is_drained_before_the_cool_down_is_over() -> None:
    guard = ScalingGuard(PlannerLimits(stabilization=5.0, cooldown=20.0))
    guard.guard(2, 2, 0.0)
    assert guard.guard(2, 3, 10.0).target == 3
    assert guard.guard(3, 1, 25.0) == (3, "cool-down")
    assert guard.guard(3, 1, 31.0) == (1, "as wanted")


def test_the_budget_bounds_engines_by_their_devices() -> None:
    assert PlannerLimits(maximum=8).bounds(4) == SizeBounds(1, 8)
    assert PlannerLimits(maximum=8, gpu_budget=10).bounds(4) == SizeBounds(1, 2)
    with pytest.raises(ValueError, match="gpu_budget = 3: 1 engines of 4 devices each need more"):
        PlannerLimits(gpu_budget=3).bounds(4)
    with pytest.raises(ValueError, match="maximum = 1: must not be below minimum, which is 2"):
        PlannerLimits(minimum=2, maximum=1)


def test_the_load_is_predicted_until_a_new_engine_takes_requests() -> None:
    assert PlannerLimits(interval=15.0, start_seconds=30.0).horizon == 3
    assert PlannerLimits(interval=60.0, start_seconds=1.0).horizon == 2
