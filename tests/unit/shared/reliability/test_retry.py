"""Pauses double up to a bound; a breaker opens after failures in a row, and closes with the first success."""

from __future__ import annotations

from shared.reliability.retry import Backoff, CircuitBreaker, Deadline

BACKOFF = Backoff(1.0, 16.0)


def test_pauses_double_up_to_the_longest() -> None:
    assert [BACKOFF.pause(earlier) for earlier in range(7)] == [1, 2, 4, 8, 16, 16, 16]
    assert BACKOFF.pause(10**6) == 16


def test_a_deadline_can_be_brought_forward() -> None:
    deadline = Deadline(10.0)
    assert deadline.after(6.0, 0.25) == Deadline(7.0)
    assert (deadline.remaining(6.0), deadline.remaining(11.0)) == (4.0, 0.0)
    assert deadline.after(12.0, 0.5) == Deadline(12.0)


def test_it_opens_after_failures_in_a_row_that_span_some_time() -> None:
    breaker = CircuitBreaker(3, 1.0, BACKOFF)
    for now in (0.0, 0.1, 0.2):
        breaker.record_failure(now)
    assert not breaker.is_open, "three at one moment"
    breaker.record_failure(1.0)
    assert breaker.is_open
    breaker.update(1.9)
    assert breaker.is_open
    breaker.update(2.0)
    assert not breaker.is_open


def test_one_failure_after_a_pause_opens_it_for_twice_as_long() -> None:
    breaker = CircuitBreaker(1, 0.0, BACKOFF)
    breaker.record_failure(0.0)
    breaker.record_failure(0.5)  # was under way: no longer pause
    breaker.update(1.0)
    assert not breaker.is_open
    breaker.record_failure(1.0)
    breaker.update(2.9)
    assert breaker.is_open
    breaker.update(3.0)
    assert not breaker.is_open


def test_a_success_closes_it_and_forgets_what_was() -> None:
    breaker = CircuitBreaker(2, 0.0, BACKOFF)
    breaker.record_failure(0.0)
    breaker.record_success()
    breaker.record_failure(1.0)
    assert not breaker.is_open
    breaker.record_failure(2.0)
    assert breaker.is_open
    breaker.record_success()
    assert not breaker.is_open
