"""When the overflow provider is asked: the budget, the breaker, and how long a wait is expected to be."""

from __future__ import annotations

from services.gateway.core.overflow import DAY, FirstTokenDelays, OverflowBudget, OverflowLimits
from shared.ids import ModelName

LIMITS = OverflowLimits(concurrency=2, requests_per_minute=4, tokens_per_day=100)
MODEL, OTHER = ModelName("m"), ModelName("other")


def test_requests_are_bounded_by_number_by_rate_and_by_what_they_used_in_a_day() -> None:
    budget = OverflowBudget(LIMITS, 0.0)
    for _ in range(2):
        assert budget.refusal(0.0) is None
        budget.start(0.0)
    assert budget.refusal(0.0) == "too many open"
    budget.end(0)
    budget.start(0.0)
    budget.end(0)
    budget.start(0.0)
    budget.end(60)
    assert budget.refusal(0.0) == "too many a minute"
    assert budget.refusal(15.0) is None
    budget.end(50)
    assert budget.open == 0
    assert budget.refusal(60.0) == "too many tokens a day"
    assert budget.refusal(DAY - 1) == "too many tokens a day"
    assert budget.refusal(DAY) is None


def test_a_provider_that_keeps_failing_is_left_alone_for_longer_and_longer() -> None:
    budget = OverflowBudget(LIMITS, 0.0)
    for now in (0.0, 0.1, 0.2):
        budget.record_failure(now)
    assert budget.refusal(0.2) is None, "a few failures at one moment may be the machine's"
    budget.record_failure(1.1)
    assert budget.refusal(1.2) == "breaker open"
    assert budget.refusal(6.2) is None
    budget.record_failure(6.3)
    assert budget.refusal(16.2) == "breaker open", "twice as long"
    assert budget.refusal(16.4) is None
    budget.record_answer()
    for now in (17.0, 17.1):
        budget.record_failure(now)
    assert budget.refusal(20.0) is None


def test_a_wait_is_expected_to_be_as_long_as_those_that_ended_last() -> None:
    delays = FirstTokenDelays(10.0)
    assert delays.predicted(MODEL, 0.0) == 0.0
    for number, wait in enumerate((1.0, 2.0, 30.0)):
        delays.record_arrival(number, MODEL, 5.0 - wait)
        delays.record_end_of_wait(number, MODEL, 5.0, started=True)
    assert delays.predicted(MODEL, 6.0) == 2.0, "one long prompt says little of the others"
    assert delays.predicted(OTHER, 6.0) == 0.0
    assert delays.predicted(MODEL, 15.1) == 0.0, "nobody waits, and the last wait was long ago"


def test_where_nobody_has_begun_lately_the_wait_of_the_first_in_line_counts() -> None:
    delays = FirstTokenDelays(10.0)
    delays.record_arrival("first", MODEL, 0.0)
    delays.record_arrival("second", MODEL, 8.0)
    assert delays.predicted(MODEL, 20.0) == 20.0
    delays.record_end_of_wait("first", MODEL, 20.0, started=False)
    assert delays.predicted(MODEL, 20.0) == 12.0
    delays.record_end_of_wait("second", MODEL, 21.0, started=True)
    assert delays.predicted(MODEL, 21.0) == 13.0
