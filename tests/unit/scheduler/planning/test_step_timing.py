"""How long the next plan may wait, by how long steps have taken."""

from __future__ import annotations

import pytest

from services.scheduler.core.planning.step_timing import StepTimeEstimator


def test_a_plan_may_wait_for_half_of_the_shortest_recent_step_of_its_size() -> None:
    pace = StepTimeEstimator()
    assert pace.seconds_to_wait(16) == 0.0, "a size that was not seen yet"
    for seconds in (0.03, 0.02, 0.05):
        pace.record(17, seconds)
    assert pace.seconds_to_wait(31) == 0.01
    assert pace.seconds_to_wait(32) == 0.0
    for _ in range(8):
        pace.record(17, 0.1)
    assert pace.seconds_to_wait(16) == 0.05, "only the last ones count"


def test_a_plan_is_never_so_late_that_the_device_would_wait_for_it() -> None:
    pace = StepTimeEstimator()
    pace.record(1, 0.010)
    assert pace.seconds_to_wait(1) == pytest.approx(0.004)
    pace.record(1, 0.0065)
    assert pace.seconds_to_wait(1) == 0.0, "half a millisecond is not worth a timer"
    pace.record(1, 0.003)
    assert pace.seconds_to_wait(1) == 0.0


def test_the_plan_behind_two_steps_may_wait_until_the_second_is_half_over() -> None:
    pace = StepTimeEstimator()
    pace.record(1, 0.04)
    assert pace.seconds_to_wait(1, 16) == 0.0, "nobody knows how long the second takes"
    pace.record(16, 0.03)
    assert pace.seconds_to_wait(1, 16) == pytest.approx(0.055)


def test_steps_that_are_shorter_than_the_way_of_a_plan_are_planned_two_ahead_at_once() -> None:
    pace = StepTimeEstimator()
    pace.record(1, 0.0015)
    assert pace.seconds_to_wait(1, 1) == 0.0
    pace.record(16, 0.005)
    assert pace.seconds_to_wait(16, 16) == pytest.approx(0.004), "a third plan is made when the first is nearly over"
