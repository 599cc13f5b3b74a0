"""The load between two observations of a fleet."""

from __future__ import annotations

import pytest

from services.planner.core.load_meter import LoadMeter, RequestShape
from tests.support.engines.planner_profiles import report, seen


def test_the_first_observation_tells_nothing_as_nobody_knows_when_it_happened() -> None:
    assert LoadMeter().measure(seen(report(1000)), 5.0) is None


def test_a_load_is_what_counters_have_grown_by() -> None:
    meter = LoadMeter()
    meter.measure(seen(report(100), report(50)), 0.0)
    interval = meter.measure(seen(report(130), report(60)), 10.0)
    assert (interval.arrivals, interval.first_tokens, interval.seconds) == (40, 40, 10.0)
    assert (interval.prompt_tokens, interval.output_tokens) == (40 * 1024, 4000)
    assert interval.ttft == pytest.approx(0.08)
    assert interval.itl == pytest.approx(0.008)


def test_requests_that_wait_have_come_too() -> None:
    meter = LoadMeter()
    meter.measure(seen(report(0)), 0.0)
    grown = meter.measure(seen(report(10, waiting=4), queued=6), 10.0)
    assert (grown.arrivals, grown.backlog) == (20, 10)
    served = meter.measure(seen(report(25)), 20.0)
    assert (served.arrivals, served.backlog) == (5, 0)


def test_an_engine_that_is_new_or_has_begun_anew_counts_from_zero() -> None:
    meter = LoadMeter()
    meter.measure(seen(report(100)), 0.0)
    assert meter.measure(seen(report(100), report(30)), 10.0).arrivals == 30
    assert meter.measure(seen(report(7), report(30)), 20.0).arrivals == 7


def test_an_engine_that_was_silent_for_a_while_is_not_counted_twice() -> None:
    meter = LoadMeter()
    meter.measure(seen(report(100), report(100)), 0.0)
    meter.measure(seen(report(110)), 10.0)
    assert meter.measure(seen(report(120), report(105)), 20.0).arrivals == 15


def test_the_next_requests_are_as_long_as_the_latest_were_on_average() -> None:
    meter, shape = LoadMeter(), RequestShape()
    assert shape.at(1.0) is None
    meter.measure(seen(report(0)), 0.0)
    shape.record(meter.measure(seen(report(10)), 10.0))
    shape.record(meter.measure(seen(report(10)), 20.0))
    assert shape.at(3.0) == (3.0, 1024, 0, 100)
