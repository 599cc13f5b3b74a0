"""How long a step may take, by how long such steps took."""

from __future__ import annotations

import pytest

from shared.reliability.step_times import RECENT_STEPS, StepTimes, deadline_of


def deadline(times: StepTimes, tokens: int) -> float:
    return deadline_of(times, tokens, shortest=2.0, unseen=60.0, first=600.0)


def test_the_first_step_of_all_may_take_long() -> None:
    assert deadline(StepTimes(), 1) == 600.0


def test_a_known_size_gets_ten_times_its_longest_and_never_less_than_the_shortest() -> None:
    times = StepTimes()
    times.record(20, 0.05)
    assert deadline(times, 17) == 2.0
    times.record(31, 0.4)
    times.record(16, 0.1)
    assert deadline(times, 17) == pytest.approx(4.0)


def test_what_took_long_once_is_forgotten() -> None:
    times = StepTimes()
    times.record(1, 50.0)
    for _ in range(RECENT_STEPS):
        times.record(1, 0.01)
    assert deadline(times, 1) == 2.0


def test_a_size_that_was_not_seen_is_reckoned_from_the_next_smaller_one() -> None:
    times = StepTimes()
    times.record(1, 1.0)
    assert times.extrapolated(1024) == 1024.0
    assert deadline(times, 1024) == 10240.0
    times.record(512, 4.0)
    assert deadline(times, 1024) == 80.0
    assert deadline(times, 2) == 60.0, "and is given some time to warm up"


def test_a_size_below_all_that_were_seen_is_reckoned_as_the_smallest() -> None:
    times = StepTimes()
    times.record(256, 30.0)
    assert times.extrapolated(4) == 30.0
    assert deadline(times, 4) == 300.0
