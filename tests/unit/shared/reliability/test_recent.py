"""Only the newest is remembered, and an attempt that is over starts nothing."""

from __future__ import annotations

from shared.ids import Attempt, RequestId
from shared.reliability.recent import AttemptFence, RecentEntries

R, S, T = RequestId("r"), RequestId("s"), RequestId("t")
ONE, TWO, THREE = Attempt(1), Attempt(2), Attempt(3)


def test_the_entries_set_last_stay() -> None:
    entries: RecentEntries[str, int] = RecentEntries(2)
    entries["a"], entries["b"] = 1, 2
    entries["a"] = 3
    entries["c"] = 4
    assert dict(entries) == {"a": 3, "c": 4}


def test_each_attempt_is_accepted_once_and_none_older() -> None:
    fence = AttemptFence(8)
    assert fence.accept(R, TWO)
    assert not fence.accept(R, TWO)
    assert not fence.accept(R, ONE)
    assert fence.accept(R, THREE)
    assert not fence.is_current(R, TWO)
    assert fence.is_current(R, THREE)


def test_what_is_closed_is_neither_accepted_nor_current() -> None:
    fence = AttemptFence(8)
    fence.close(R, TWO)
    fence.close(R, ONE)
    assert fence.is_closed(R, TWO)
    assert not fence.is_closed(R, THREE)
    assert not fence.accept(R, TWO)
    assert not fence.is_current(R, TWO)
    assert fence.accept(R, THREE)


def test_what_was_given_away_may_come_back() -> None:
    fence = AttemptFence(8)
    fence.close(R, ONE)
    assert fence.accept(R, TWO)
    fence.readmit(R)
    assert fence.accept(R, TWO)
    fence.readmit(R)
    assert not fence.accept(R, ONE)


def test_the_requests_touched_longest_ago_are_forgotten() -> None:
    fence = AttemptFence(2)
    for request in (R, S, R, T):
        fence.close(request, ONE)
    assert fence.is_closed(R, ONE)
    assert not fence.is_closed(S, ONE)
    assert fence.is_current(S, ONE)
