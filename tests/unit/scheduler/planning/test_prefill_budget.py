"""How many prompt tokens a step computes beside its decodes: the target for the time between tokens, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.planning.prefill_budget import (
    EFFICIENT_SHARE,
    FIRST_CHUNK,
    MIN_CHUNK,
    PrefillBudget,
    StepTimeEstimator,
)

LONG = (1 << 20, 1 << 20)
"""Tokens of all prompts that wait, and of the first: one that is longer than any step."""


def device(tokens: float) -> float:
    """A roofline: 8 ms for the weights, or 25 µs a token; and 1 ms for every step."""
    return 0.001 + max(0.008, 25e-6 * tokens)


def measured(*sizes: int) -> StepTimeEstimator:
    estimator = StepTimeEstimator()
    for tokens in sizes:
        for _ in range(20):
            estimator.record(tokens, device(tokens))
    return estimator


def test_times_are_those_of_the_sizes_that_were_measured() -> None:
    estimator = measured(16, 64, 256, 512, 1024, 2048)
    for tokens in (16, 64, 256, 512, 1024, 2048):
        assert estimator.seconds(tokens) == pytest.approx(device(tokens), rel=0.02)
    assert estimator.seconds(768) == pytest.approx(device(768), rel=0.1), "between two sizes"
    assert estimator.seconds(4096) == pytest.approx(2 * device(2048), rel=0.02), "as many a second as the largest"
    assert estimator.seconds(1) == pytest.approx(device(16), rel=0.02)


def test_before_the_first_step_nothing_is_known() -> None:
    estimator = StepTimeEstimator()
    estimator.record(0, 1.0)
    estimator.record(5, 0.0)
    assert (estimator.seconds(5), estimator.tokens_within(1.0), estimator.efficient_tokens()) == (None, None, None)


def test_the_most_tokens_for_a_time_is_the_inverse_and_grows_at_most_twofold_beyond_what_is_known() -> None:
    estimator = measured(16, 256, 512, 1024, 2048)
    assert estimator.tokens_within(device(900)) == pytest.approx(900, rel=0.1)
    assert estimator.tokens_within(0.001) == 0.0
    assert estimator.tokens_within(10.0) == pytest.approx(4096, rel=0.02)


def test_a_step_that_met_a_compiler_is_believed_by_nobody_for_long() -> None:
    estimator = measured(64, 128)
    estimator.record(256, 5.0)
    assert estimator.seconds(256) == pytest.approx(2 * device(128), rel=0.3), "two smaller steps would be quicker"


def test_the_efficient_size_is_the_least_with_most_of_the_best_rate() -> None:
    sizes = (16, 64, 128, 256, 512, 1024, 2048)
    best = max(tokens / device(tokens) for tokens in sizes)
    expected = next(tokens for tokens in sizes if tokens / device(tokens) >= EFFICIENT_SHARE * best)
    assert measured(*sizes).efficient_tokens() == pytest.approx(expected, rel=0.05)


def driven(target: float, decodes: int, steps: int = 300, budget: int = 2048, slower: float = 1.0) -> list[int]:
    """The chunks that a device of that speed is given, beside as many decodes."""
    prefill = PrefillBudget(target)
    chunks = []
    for _ in range(steps):
        chunks.append(prefill.chunk(decodes, budget, *LONG))
        tokens = decodes + chunks[-1]
        prefill.record(tokens, slower * device(tokens), prefills=True)
    return chunks


def test_chunks_become_as_large_as_the_target_allows() -> None:
    chunks = driven(0.026, decodes=100)
    assert chunks[0] == FIRST_CHUNK
    assert chunks[-1] + 100 == pytest.approx(1000, rel=0.1)
    assert all(device(100 + chunk) < 1.15 * 0.026 for chunk in chunks)


def test_below_the_efficient_chunk_only_where_the_target_cannot_be_kept_otherwise() -> None:
    prefill = PrefillBudget(0.0095)
    prefill.estimator = measured(16, 64, 128, 256, 512, 1024, 2048)
    efficient = prefill.estimator.efficient_tokens()
    assert efficient is not None
    assert MIN_CHUNK <= prefill.chunk(64, 2048, *LONG) < efficient
    assert device(64 + prefill.chunk(64, 2048, *LONG)) <= 0.0097
    late = PrefillBudget(0.004)
    late.estimator = prefill.estimator
    assert late.chunk(64, 2048, *LONG) == int(efficient), "the decodes alone take longer, whatever the chunk"


def test_without_decodes_or_a_target_a_step_is_as_large_as_it_may_be() -> None:
    prefill = PrefillBudget(0.001)
    prefill.record(2048, 1.0, prefills=True)
    assert prefill.chunk(0, 2048, *LONG) == 2048
    without = PrefillBudget(None)
    without.record(2048, 1.0, prefills=True)
    assert without.chunk(100, 1948, *LONG) == 1948
    assert without.estimator.seconds(5) is None, "nothing is kept that nothing needs"


@pytest.mark.parametrize(
    ("seconds_of", "settled"),
    [
        (lambda tokens: 0.010 + tokens / 1250, 300),  # as a CPU: 250 ms are 300 tokens
        (lambda tokens: 0.010 + tokens / 200, 48),  # a larger model
        (lambda tokens: max(0.6, tokens / 2000), 2048),  # bound by weights: what is smaller takes as long
        (lambda tokens: 0.004 + tokens / 40_000, 2048),  # a GPU
    ],
)
@pytest.mark.parametrize("decodes", [0, 60])
def test_a_step_with_prompts_takes_no_longer_than_the_target_where_that_costs_no_speed(
    seconds_of: Callable[[float], float], settled: int, decodes: int
) -> None:
    prefill, steps = PrefillBudget(None, 0.25), []
    for _ in range(120):
        steps.append(decodes + prefill.chunk(decodes, 2048 - decodes, *LONG))
        prefill.record(steps[-1], seconds_of(steps[-1]), prefills=True)
        prefill.record(1, 5.0, prefills=False)
    assert steps[0] == 2048, "nothing is known yet"
    wanted = max(settled, 2 * decodes)  # as many tokens of prompts as are decoded, however slow the device is
    assert sorted(steps[20:])[60] == pytest.approx(wanted, rel=0.1)
    rate = sum(steps) / sum(map(seconds_of, steps))
    assert rate > 0.88 * max(tokens / seconds_of(tokens) for tokens in range(1, 2049))


def mean_first_token(prompts: int, length: int, decodes: int, chunk: Callable[[int, int], int]) -> tuple[float, float]:
    """Seconds until a prompt of a burst is computed on the average, and until the last is. A prompt that is computed
    decodes from then on. `chunk`: of the tokens that decode and those that wait."""
    now, left, ended = 0.0, [length] * prompts, []
    while left:
        room = chunk(decodes + len(ended), sum(left))
        now += device(decodes + len(ended) + min(room, sum(left)))
        while left and room:
            taken = min(room, left[0])
            room, left[0] = room - taken, left[0] - taken
            if not left[0]:
                ended.append(now)
                left.pop(0)
    return sum(ended) / prompts, now


@pytest.mark.parametrize("decodes", [0, 48])
def test_prompts_of_a_burst_are_computed_one_after_the_other_as_far_as_that_gives_first_tokens_sooner(
    decodes: int,
) -> None:
    prefill = PrefillBudget(None, 0.25)
    prefill.estimator = measured(64, 128, 256, 512, 1024, 2048)
    chosen, last = mean_first_token(16, 128, decodes, lambda planned, left: prefill.chunk(planned, 2048, left, 128))
    at_once, whole = mean_first_token(16, 128, decodes, lambda planned, left: 2048)
    assert chosen < 0.8 * at_once
    assert last < 1.25 * whole
    best = min(mean_first_token(16, 128, decodes, lambda planned, left, n=n: n)[0] for n in range(64, 2049, 64))  # type: ignore[misc]
    assert chosen < 1.1 * best


def test_bursts_of_short_prompts_find_out_what_is_efficient() -> None:
    """Where no step was larger than one of these prompts, nothing is known of the sizes that several make."""
    prefill = PrefillBudget(None, 0.25)
    prefill.estimator = measured(16, 64, 128)

    def chunk(planned: int, left: int) -> int:
        room = prefill.chunk(planned, 2048, left, 128)
        tokens = planned + min(room, left)
        prefill.record(tokens, device(tokens), prefills=True)
        return room

    for _ in range(3):
        mean, last = mean_first_token(16, 128, 0, chunk)
    best, whole = mean_first_token(16, 128, 0, lambda planned, left: 384)
    assert mean < 1.05 * best
    assert last < 1.05 * whole


def test_a_prompt_alone_is_computed_in_as_few_steps_as_before() -> None:
    prefill = PrefillBudget(None, 0.25)
    prefill.estimator = measured(64, 128, 256, 512, 1024, 2048)
    assert prefill.chunk(16, 2032, 1500, 1500) == 1500
    without = PrefillBudget(0.25)
    without.estimator = prefill.estimator
    assert without.chunk(16, 2032, 4096, 128) == 2032, "only of steps that have a time for prompts"


def test_a_device_that_becomes_slower_gets_smaller_chunks() -> None:
    prefill = PrefillBudget(0.026)
    for slower in (1.0, 2.0):
        for _ in range(200):
            chunk = prefill.chunk(100, 2048, *LONG)
            prefill.record(100 + chunk, slower * device(100 + chunk), prefills=True)
    assert 2.0 * device(100 + prefill.chunk(100, 2048, *LONG)) < 1.15 * 0.026


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.floats(1e-5, 10.0)), max_size=60),
    st.floats(1e-4, 1.0),
    st.integers(0, 512),
    st.integers(0, 8192),
)
def test_some_of_a_prompt_is_computed_in_every_step_and_never_more_than_allowed(
    steps: list[tuple[int, float]], target: float, decodes: int, budget: int
) -> None:
    prefill = PrefillBudget(target)
    for tokens, seconds in steps:
        prefill.record(tokens, seconds, prefills=True)
    assert min(budget, MIN_CHUNK) <= prefill.chunk(decodes, budget, *LONG) <= budget
    times = [prefill.estimator.seconds(tokens) for tokens in (1, 10, 100, 1000, 10_000)]
    assert times == sorted(times, key=lambda each: each or 0.0), "more tokens never take less"
