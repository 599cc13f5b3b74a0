"""The liveness clock stands still while the bus is away, and for a grace period after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.bus.liveness import LivenessClock


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_it_runs_while_the_bus_is_there() -> None:
    hand = HandClock()
    clock = LivenessClock(hand, grace=2.0)
    before = clock.now()
    hand.time += 5
    assert clock.now() - before == 5


def test_it_stands_still_from_the_loss_until_the_grace_is_over() -> None:
    hand = HandClock()
    clock = LivenessClock(hand, grace=2.0)
    clock.disconnected()
    before = clock.now()
    hand.time += 30
    assert clock.now() == before
    clock.reconnected()
    hand.time += 1
    assert clock.now() == before
    hand.time += 3
    assert clock.now() == before + 2


@given(st.lists(st.tuples(st.sampled_from(["lost", "back", "wait"]), st.floats(0, 5)), max_size=30))
def test_it_never_runs_backwards_nor_faster_than_time(events: list[tuple[str, float]]) -> None:
    hand = HandClock()
    clock = LivenessClock(hand, grace=2.0)
    last, last_time = clock.now(), hand.time
    for event, seconds in events:
        if event == "lost":
            clock.disconnected()
        elif event == "back":
            clock.reconnected()
        assert abs(clock.now() - last) < 1e-9
        hand.time += seconds
        now = clock.now()
        assert -1e-9 <= now - last <= hand.time - last_time + 1e-9
        last, last_time = now, hand.time


def test_an_outage_is_measured_by_the_clock_of_the_wall_and_ends_with_the_return() -> None:
    hand = HandClock()
    clock = LivenessClock(hand, grace=2.0)
    assert clock.outage() == 0.0
    clock.disconnected()
    hand.time += 30
    assert clock.outage() == 30.0
    clock.reconnected()
    assert clock.outage() == 0.0
    hand.time += 5
    clock.disconnected()
    hand.time += 1
    assert clock.outage() == 1.0


def test_a_bus_that_comes_back_for_a_moment_only_has_been_away_since_the_first_time() -> None:
    hand = HandClock()
    clock = LivenessClock(hand, grace=2.0)
    clock.disconnected()
    for _ in range(10):
        hand.time += 3
        clock.reconnected()
        hand.time += 1
        clock.disconnected()
    assert clock.outage() == 40.0
