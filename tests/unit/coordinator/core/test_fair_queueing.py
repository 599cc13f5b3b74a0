"""Requests of several API keys that wait: whose turn it is, and who gives way where the queue is full."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.placement_queue import PlacementQueue, QueuedRequest
from shared.ids import InstanceId, RequestId
from tests.support.engines.coordinator_events import MODEL, at, detokenizer, engine, route, summary


def add(queue: PlacementQueue, request: str, **fields: object) -> QueuedRequest:
    return queue.add(route(request, **fields).generation, 0.0)  # type: ignore[arg-type]


def place(queue: PlacementQueue) -> QueuedRequest:
    """Takes out whose turn it is."""
    first = next(queue.in_order(MODEL))
    queue.remove(first.generation.request, placed=True)
    return first


def test_tokens_are_shared_in_the_ratio_of_the_weights() -> None:
    queue = PlacementQueue()
    sizes = {"a": (10, 1.0), "b": (30, 1.0), "c": (20, 3.0)}
    for key, (prompt, weight) in sizes.items():
        for number in range(400):
            add(queue, f"{key}{number}", prompt=prompt, max_tokens=10, key=key, weight=weight)
    tokens: Counter[str] = Counter()
    for _ in range(300):
        generation = place(queue).generation
        tokens[generation.key] += generation.prompt_length + 10
    assert tokens["b"] == pytest.approx(tokens["a"], abs=40)
    assert tokens["c"] / 3 == pytest.approx(tokens["a"], abs=40)


def test_a_thousand_requests_of_one_key_delay_another_by_one() -> None:
    queue = PlacementQueue()
    for number in range(1000):
        add(queue, f"a{number}", key="a")
    for _ in range(10):
        place(queue)
    add(queue, "b0", key="b", arrival=9.0)
    add(queue, "b1", key="b", arrival=9.0)
    assert [place(queue).generation.key for _ in range(6)] in (list("ababaa"), list("babaaa"))


def test_a_key_counts_for_what_was_generated_once_that_is_known() -> None:
    """Two keys that generate as much, one of which asks for a hundred times more to be on the safe side."""
    queue = PlacementQueue()
    for number in range(300):
        add(queue, f"a{number}", prompt=10, max_tokens=4000, key="a")
        add(queue, f"b{number}", prompt=10, max_tokens=40, key="b")
    placed: Counter[str] = Counter()
    for _ in range(100):
        generation = place(queue).generation
        placed[generation.key] += 1
        queue.settle(generation.request, 40)
    assert placed["a"] == pytest.approx(placed["b"], abs=2)


def test_a_key_that_generates_more_than_it_was_counted_for_waits_for_it() -> None:
    queue = PlacementQueue()
    for number in range(300):
        add(queue, f"a{number}", prompt=10, max_tokens=None, key="a", weight=2.0)
        add(queue, f"b{number}", prompt=10, max_tokens=246, key="b")
    tokens: Counter[str] = Counter()
    for _ in range(100):
        generation = place(queue).generation
        generated = 2550 if generation.key == "a" else 246
        tokens[generation.key] += 10 + generated
        queue.settle(generation.request, generated)
    assert tokens["a"] / 2 == pytest.approx(tokens["b"], abs=2560)


def test_what_a_key_gets_back_is_no_credit_for_later() -> None:
    queue = PlacementQueue()
    for number in range(40):
        add(queue, f"a{number}", prompt=10, max_tokens=4000, key="a")
    former = [place(queue) for _ in range(20)]
    for number in range(20):
        add(queue, f"b{number}", prompt=10, max_tokens=40, key="b")
    for queued in former:
        queue.settle(queued.generation.request, 0)
        queue.settle(queued.generation.request, 0)
    assert "b" in [place(queue).generation.key for _ in range(3)]


def test_a_priority_counts_within_its_key_only() -> None:
    queue = PlacementQueue()
    add(queue, "b0", key="b", arrival=1.0)
    for number in range(3):
        add(queue, f"a{number}", key="a", priority=-number, arrival=2.0)
    assert [place(queue).generation.request for _ in range(4)] == ["b0", "a2", "a1", "a0"]


def test_a_key_gains_nothing_by_having_waited_for_nothing_nor_by_coming_back() -> None:
    queue = PlacementQueue()
    for number in range(20):
        add(queue, f"a{number}", key="a")
    for _ in range(10):
        place(queue)
    add(queue, "b0", key="b", prompt=50)
    assert place(queue).generation.key in "ab"
    while "b0" in queue:
        place(queue)
    add(queue, "b1", key="b", prompt=50)  # it has had far more than its share, and left between
    assert [place(queue).generation.key for _ in range(3)] == ["a"] * 3


def test_without_keys_the_order_is_that_of_priority_and_arrival() -> None:
    queue = PlacementQueue()
    for number, (priority, arrival) in enumerate([(0, 3.0), (1, 1.0), (0, 2.0), (-1, 9.0)]):
        add(queue, f"r{number}", priority=priority, arrival=arrival)
    assert [waiting.generation.request for waiting in queue.in_order(MODEL)] == ["r3", "r2", "r0", "r1"]
    assert [generation.request for generation in queue.clear()] == ["r3", "r2", "r0", "r1"]


def test_the_order_that_is_shown_is_the_one_that_is_kept() -> None:
    queue = PlacementQueue()
    for number in range(30):
        add(queue, f"r{number}", key="abc"[number % 3], prompt=1 + number % 7, weight=1.0 + number % 2)
    shown = [waiting.generation.request for waiting in queue.in_order(MODEL)]
    assert [place(queue).generation.request for _ in range(30)] == shown


requests = st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(1, 50))


@given(
    st.lists(requests, min_size=1, max_size=120),
    st.lists(st.booleans(), max_size=200),
    st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
)
def test_two_keys_that_wait_are_never_further_apart_than_one_request_of_each(
    coming: list[tuple[str, int, int]], steps: list[bool], weights: tuple[float, float, float]
) -> None:
    """Theorem 1 of start-time fair queueing: over any time in which both have requests waiting, what they got by their
    weights differs by no more than their largest requests by their weights."""
    queue, weight = PlacementQueue(), dict(zip("abc", weights, strict=True))
    got: dict[str, float] = defaultdict(float)
    since: dict[frozenset[str], dict[str, float]] = {}
    left = list(enumerate(coming))
    for adds in [*steps, *[False] * len(coming)]:
        if adds and left:
            number, (key, prompt, output) = left.pop()
            add(queue, f"r{number}", key=key, prompt=prompt, max_tokens=output, weight=weight[key])
        elif len(queue):
            generation = place(queue).generation
            size = generation.prompt_length + (generation.stopping.max_tokens or 0)
            got[generation.key] += size / generation.weight
        waiting = {queued.generation.key for queued in queue}
        pairs = {frozenset((a, b)) for a in waiting for b in waiting if a < b}
        since = {pair: since.get(pair, dict(got)) for pair in pairs}
        for pair, before in since.items():
            one, other = (got[key] - before.get(key, 0.0) for key in sorted(pair))
            assert abs(one - other) <= sum(100 / weight[key] for key in pair) + 1e-6


# Who gives way.


def test_who_fills_the_queue_keeps_nobody_else_out_of_it() -> None:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig(queue_limit=10))
    for heard in (engine("a", waiting=8), detokenizer()):
        core.lifecycle(heard, at(0))
    for number in range(10):
        core.route(route(f"a{number}", key="a", arrival=float(number)), at(1))
    assert summary(core.route(route("b0", key="b"), at(1))) == [("rejected", "a9", "overloaded"), ("queued", "b0")]
    assert summary(core.route(route("a10", key="a"), at(1))) == [("rejected", "a10", "overloaded")]
    for number in range(1, 6):
        core.route(route(f"b{number}", key="b", weight=2.0), at(1))
    waiting = Counter(queued.generation.key for queued in core.queue)
    assert waiting == {"a": 4, "b": 6}
    assert RequestId("a0") in core.queue


def test_the_last_of_the_longest_is_given_up_by_weight() -> None:
    queue = PlacementQueue()
    for number in range(6):
        add(queue, f"a{number}", key="a", weight=3.0)
    for number in range(3):
        add(queue, f"b{number}", key="b", priority=-number)
    assert queue.surplus(add(queue, "c0", key="c")).generation.request == "b0"
    assert queue.surplus(add(queue, "b3", key="b")).generation.request == "b3"


# What an engine is given ahead.


def placed(core: Coordinator, count: int, key: str) -> int:
    lines = [summary(core.route(route(f"{key}{number}", key=key), at(1)))[0] for number in range(count)]
    return sum(line[0] == "place" for line in lines)


def test_requests_of_keys_wait_in_the_coordinator_rather_than_in_an_engine() -> None:
    def core(waiting: int = 0, running: int = 0) -> Coordinator:
        made = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
        for heard in (engine("e", max_running=40, max_waiting=500, waiting=waiting, running=running), detokenizer()):
            made.lifecycle(heard, at(0))
        return made

    assert placed(core(), 200, "") == 200
    assert placed(core(), 200, "a") == 50  # a quarter more than run at once
    assert placed(core(waiting=1), 200, "a") == 49  # it has just arrived there
    assert placed(core(waiting=8, running=12), 200, "a") == 0  # blocks are short: no more than 12 run
    assert placed(core(waiting=9, running=40), 200, "a") == 1
