"""How many engines a load needs, by the tables of one engine."""

from __future__ import annotations

from math import inf

import pytest

from services.planner.core.sizing import (
    OVERLOADED,
    CorrectionFactors,
    LatencyTargets,
    RequestLoad,
    SizeBounds,
    forecast_decode,
    forecast_mixed,
    forecast_prefill,
    size_disaggregated,
    size_mixed,
)
from tests.support.engines.planner_profiles import PROFILE

LOAD = RequestLoad(rate=20.0, prompt=1024, cached=0, output=100)
TARGETS = LatencyTargets(ttft=0.3, itl=0.015)
BOUNDS = SizeBounds(1, 32)
RIGHT = CorrectionFactors()


def mixed(load: RequestLoad = LOAD, targets: LatencyTargets = TARGETS, **given: object) -> int:
    size = size_mixed(PROFILE, load, targets, given.get("factors", RIGHT), given.get("bounds", BOUNDS))
    return size.mixed


def test_an_idle_engine_takes_what_its_tables_say() -> None:
    forecast = forecast_mixed(PROFILE, LOAD._replace(rate=0.001), 0.95)
    assert forecast.mean_ttft == pytest.approx(PROFILE.prefill(1024), rel=0.01)
    assert forecast.mean_itl == pytest.approx(PROFILE.itl(1, 1074), rel=0.01)


def test_prompts_make_decode_steps_longer() -> None:
    alone = forecast_decode(PROFILE, LOAD._replace(rate=5), 0.95)
    beside = forecast_mixed(PROFILE, LOAD._replace(rate=5), 0.95)
    assert beside.mean_itl > alone.mean_itl / (1 - 5 * 0.031)
    assert beside.itl > beside.mean_itl


def test_what_an_engine_cannot_serve_is_overload() -> None:
    assert forecast_mixed(PROFILE, LOAD._replace(rate=40), 0.95) == OVERLOADED
    assert forecast_prefill(PROFILE, LOAD._replace(rate=30), 0.95) == OVERLOADED
    assert forecast_decode(PROFILE, LOAD._replace(rate=200), 0.95) == OVERLOADED
    assert not OVERLOADED.meets(LatencyTargets())


def test_more_load_tighter_targets_and_worse_experience_need_more_engines() -> None:
    enough = mixed()
    assert 1 < enough < 8
    assert mixed(LOAD._replace(rate=40)) > enough
    assert mixed(targets=LatencyTargets(ttft=0.06, itl=0.015)) > enough
    assert mixed(targets=LatencyTargets(ttft=0.3, itl=0.008)) > enough
    assert mixed(factors=CorrectionFactors(6.0, 1.0)) > enough
    assert mixed(factors=CorrectionFactors(1.0, 1.5)) > enough
    assert mixed(LOAD._replace(prompt=256, cached=768)) < enough


def test_the_fewest_that_suffice_are_chosen_within_the_bounds() -> None:
    size = size_mixed(PROFILE, LOAD, TARGETS, RIGHT, BOUNDS)
    assert size.suffices
    assert size.forecast.meets(TARGETS)
    assert not forecast_mixed(PROFILE, LOAD.shared(size.mixed - 1), 0.95).meets(TARGETS)
    short = size_mixed(PROFILE, LOAD, TARGETS, RIGHT, SizeBounds(1, size.mixed - 1))
    assert (short.mixed, short.suffices) == (size.mixed - 1, False)
    assert mixed(LOAD._replace(rate=0.0)) == 1
    assert mixed(LOAD._replace(rate=0.0), bounds=SizeBounds(3, 9)) == 3


def test_prompts_and_decodes_are_counted_apart() -> None:
    size = size_disaggregated(PROFILE, PROFILE, LOAD, TARGETS, RIGHT, BOUNDS)
    assert size.suffices
    assert size.mixed == 0
    longer = size_disaggregated(PROFILE, PROFILE, LOAD._replace(output=1000), TARGETS, RIGHT, BOUNDS)
    assert (longer.prefill, longer.decode > size.decode) == (size.prefill, True)
    larger = size_disaggregated(PROFILE, PROFILE, LOAD._replace(prompt=4096), TARGETS, RIGHT, BOUNDS)
    assert larger.prefill > size.prefill


def test_a_budget_that_is_too_small_is_shared_in_proportion() -> None:
    load = RequestLoad(rate=100.0, prompt=1024, cached=0, output=100)
    free = size_disaggregated(PROFILE, PROFILE, load, TARGETS, RIGHT, BOUNDS)
    tight = size_disaggregated(PROFILE, PROFILE, load, TARGETS, RIGHT, SizeBounds(1, 6))
    assert tight.prefill + tight.decode == 6
    assert not tight.suffices
    assert tight.prefill / 6 == pytest.approx(free.prefill / (free.prefill + free.decode), abs=1 / 6)


def test_targets_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="ttft = 0"):
        LatencyTargets(ttft=0)
    with pytest.raises(ValueError, match="percentile = 1"):
        LatencyTargets(percentile=1)
    assert LatencyTargets().ttft == inf
