"""How long the next plan may wait, by how long steps have taken."""

from __future__ import annotations

import pytest

from services.scheduler.core.planning.step_timing import ExpectedResult, StepsInFlight
from shared.ids import Incarnation


def expected(tokens: int) -> ExpectedResult:
    return ExpectedResult(samples=0, tokens=tokens, extras={}, prefills=False)


class Timed:
    """Steps of so many tokens that took so long, one after the other."""

    def __init__(self, *recorded: tuple[int, float]) -> None:
        self.recorded = recorded

    def seconds_to_wait(self, *sizes: int) -> float:
        """How long the plan behind steps of these sizes may wait, once all before them are finished."""
        steps, now = StepsInFlight(Incarnation(1)), 0.0
        for tokens, seconds in self.recorded:
            steps.issue(expected(tokens), now)
            now += seconds
            steps.finish(0, now)
        for tokens in sizes:
            steps.issue(expected(tokens), now)
        return steps.next_due(1) - now


def test_a_plan_may_wait_for_half_of_the_shortest_recent_step_of_its_size() -> None:
    assert Timed().seconds_to_wait(16) == 0.0, "a size that was not seen yet"
    timed = Timed((17, 0.03), (17, 0.02), (17, 0.05))
    assert timed.seconds_to_wait(31) == pytest.approx(0.01)
    assert timed.seconds_to_wait(32) == 0.0
    later = Timed(*timed.recorded, *[(17, 0.1)] * 8)
    assert later.seconds_to_wait(16) == pytest.approx(0.05), "only the last ones count"


def test_a_plan_is_never_so_late_that_the_device_would_wait_for_it() -> None:
    assert Timed((1, 0.010)).seconds_to_wait(1) == pytest.approx(0.004)
    assert Timed((1, 0.010), (1, 0.0065)).seconds_to_wait(1) == 0.0, "half a millisecond is not worth a timer"
    assert Timed((1, 0.010), (1, 0.0065), (1, 0.003)).seconds_to_wait(1) == 0.0


def test_the_plan_behind_two_steps_may_wait_until_the_second_is_half_over() -> None:
    assert Timed((1, 0.04)).seconds_to_wait(1, 16) == 0.0, "nobody knows how long the second takes"
    assert Timed((1, 0.04), (16, 0.03)).seconds_to_wait(1, 16) == pytest.approx(0.055)


def test_steps_that_are_shorter_than_the_way_of_a_plan_are_planned_two_ahead_at_once() -> None:
    assert Timed((1, 0.0015)).seconds_to_wait(1, 1) == 0.0
    timed = Timed((1, 0.0015), (16, 0.005))
    assert timed.seconds_to_wait(16, 16) == pytest.approx(0.004), "a third plan is made when the first is nearly over"


def test_a_plan_with_none_in_flight_is_due_at_once() -> None:
    assert Timed((1, 0.04)).seconds_to_wait() == 0.0
