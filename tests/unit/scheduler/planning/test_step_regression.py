"""What is fitted to the times of steps: the same for an engine with few requests as for one with many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

import pytest

from services.scheduler.core.planning.step_regression import FIRST_STEPS, StepRegression, StepRegressions
from shared.messages.lifecycle import StepTimeFit

Step = tuple[int, int, float]


def fitted(steps: Iterable[Step]) -> StepTimeFit:
    regression = StepRegression()
    for step in steps:
        regression.record(*step)
    fit = regression.report()
    assert fit is not None
    return fit


def seconds(tokens: int, blocks: int, slowness: float = 1.0) -> float:
    return slowness * (0.004 + 0.00002 * tokens + 0.000001 * blocks)


def steps(mean: int, slowness: float = 1.0, count: int = 200, noise: float = 0.0) -> Iterator[Step]:
    """Of an engine that has about `mean` sequences, in contexts of any length."""
    random = Random(7)
    for _ in range(count):
        tokens = random.randint(mean * 3 // 4, mean * 5 // 4)
        blocks = tokens * random.randint(20, 60)
        yield tokens, blocks, seconds(tokens, blocks, slowness) * random.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_engines_are_alike_at_the_same_step_whatever_they_have_to_do(noise: float) -> None:
    few, many = fitted(steps(8, noise=noise)), fitted(steps(64, noise=noise))
    assert few.seconds < many.seconds, "its own steps are shorter"
    tokens, blocks = 32, 32 * 40
    for fit in (few, many):
        assert fit.seconds_at(tokens, blocks) == pytest.approx(seconds(tokens, blocks), rel=0.1 if noise else 0.02)


def test_a_slow_engine_with_few_requests_is_seen_to_be_slow() -> None:
    slow, quick = fitted(steps(16, slowness=2.0, noise=0.1)), fitted(steps(32, noise=0.1))
    tokens, blocks = 24, 24 * 40
    assert slow.seconds_at(tokens, blocks) / quick.seconds_at(tokens, blocks) == pytest.approx(2, rel=0.15)


def test_of_steps_that_are_all_alike_nothing_is_known_but_their_mean() -> None:
    fit = fitted((10, 400, 0.01) for _ in range(50))
    assert (fit.tokens, fit.blocks) == (10, 400)
    assert fit.seconds == pytest.approx(0.01)
    assert fit.seconds_at(20, 800) == pytest.approx(0.01)


def test_more_work_never_takes_less_time_and_none_takes_no_less_than_none() -> None:
    random = Random(3)
    for _ in range(200):
        fit = fitted((random.randint(1, 9), random.randint(0, 99), random.uniform(0.001, 1)) for _ in range(30))
        assert fit.token_seconds >= 0
        assert fit.block_seconds >= 0
        assert fit.seconds_at(0, 0) > 0
        assert fit.seconds - fit.token_seconds * fit.tokens - fit.block_seconds * fit.blocks >= -1e-9


def test_the_first_step_which_meets_compilers_counts_for_little() -> None:
    slow_start = fitted([(10, 400, 30.0), *steps(10, count=60)])
    assert slow_start.seconds_at(10, 400) == pytest.approx(seconds(10, 400), rel=0.15)


def test_an_interrupted_step_counts_for_little_and_a_change_that_lasts_is_believed() -> None:
    before = [*steps(10)]
    assert fitted([*before, (10, 400, 5.0)]).seconds_at(10, 400) < 1.2 * seconds(10, 400)
    throttled = [*before, *steps(10, slowness=3.0)]
    assert fitted(throttled).seconds_at(10, 400) == pytest.approx(3 * seconds(10, 400), rel=0.1)


def test_nothing_is_reported_before_a_few_steps_of_a_kind() -> None:
    both = StepRegressions()
    for _ in range(FIRST_STEPS - 1):
        both.record(300, 20, 0.02, prefills=True)
        both.record(0, 20, 0.02, prefills=False)
        both.record(5, 20, 0.0, prefills=False)
    assert both.report() is None
    both.record(300, 20, 0.02, prefills=True)
    report = both.report()
    assert report is not None
    assert report.prompts is not None
    assert report.decodes is None
