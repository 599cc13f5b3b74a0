"""The bandwidth that copies share: what each waits for, and what all together get."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from kvstore.core.copy_budget import MAX_AHEAD, MIN_BURST, CopyBudget

RATE = 100 * 2**20
BUDGET = CopyBudget(RATE)
PIECE = 2**20


def copied(seconds: float, copiers: int, seed: int = 0) -> list[float]:
    """Bytes that each of so many copiers gets through in that time, each of which copies one piece after the other."""
    random, full_at = Random(seed), 0.0
    done = [0.0] * copiers
    waiting = [(random.random() * 1e-3, copier) for copier in range(copiers)]
    heapq.heapify(waiting)
    while waiting:
        now, copier = heapq.heappop(waiting)
        full_at, wait = BUDGET.take(full_at, PIECE, now)
        if now + wait < seconds:
            done[copier] += PIECE
            heapq.heappush(waiting, (now + wait + random.random() * 1e-4, copier))
    return done


def test_without_a_rate_nothing_waits() -> None:
    assert CopyBudget(0.0).take(5.0, 2**40, 1.0) == (5.0, 0.0)


def test_a_burst_goes_at_once_and_what_follows_at_the_rate() -> None:
    full_at, waits = 0.0, []
    for _ in range(8):
        full_at, wait = BUDGET.take(full_at, PIECE, 10.0)
        waits.append(wait)
    assert waits[:4] == [0.0] * 4
    assert waits[4:] == pytest.approx([0.01 * n for n in range(1, 5)])


def test_after_a_pause_there_is_one_burst_and_no_more() -> None:
    full_at, _ = BUDGET.take(0.0, PIECE, 0.0)
    full_at, wait = BUDGET.take(full_at, MIN_BURST, 50.0)
    assert wait == 0.0
    assert BUDGET.take(full_at, PIECE, 50.0)[1] == pytest.approx(PIECE / RATE)


@pytest.mark.parametrize("copiers", [1, 2, 5])
def test_all_together_keep_the_rate_however_many_they_are_and_none_is_left_out(copiers: int) -> None:
    done = copied(2.0, copiers)
    assert sum(done) == pytest.approx(2.0 * RATE, rel=0.05)
    assert min(done) > 0.5 * sum(done) / copiers


def test_a_piece_larger_than_the_burst_passes_after_as_long_as_it_takes() -> None:
    assert BUDGET.take(0.0, 10 * MIN_BURST, 1.0)[1] == pytest.approx(9 * MIN_BURST / RATE)


def test_a_bucket_that_a_broken_process_has_emptied_for_years_is_full() -> None:
    assert BUDGET.take(1e12, PIECE, 1.0) == (1.0 + PIECE / RATE, 0.0)
    assert BUDGET.take(1.0 + MAX_AHEAD, PIECE, 1.0)[1] > 0.9 * MAX_AHEAD - MIN_BURST / RATE


def test_a_fast_host_has_larger_bursts() -> None:
    assert CopyBudget(10e9).burst == pytest.approx(50e6)
