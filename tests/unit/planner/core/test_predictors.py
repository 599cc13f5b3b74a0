"""Predictors: constant, seasonal, ARIMA."""

from __future__ import annotations

from math import cos, pi

import pytest

from services.planner.core.predictors import (
    PREDICTORS,
    ArimaPredictor,
    ConstantPredictor,
    LoadPredictor,
    SeasonalPredictor,
    make_predictor,
)

SEASON = 24


def wave(place: int, level: float = 10.0) -> float:
    return level * (1 - 0.8 * cos(2 * pi * place / SEASON))


def taught(predictor: LoadPredictor, values: list[float]) -> LoadPredictor:
    for value in values:
        predictor.observe(value)
    return predictor


@pytest.mark.parametrize("name", PREDICTORS)
def test_without_a_past_nothing_is_expected_and_with_a_short_one_the_same_again(name: str) -> None:
    predictor = make_predictor(name, SEASON)
    assert predictor.predict(3) == [0.0, 0.0, 0.0]
    assert taught(predictor, [3.0, 5.0]).predict(2) == [5.0, 5.0]


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_load_that_stays_is_predicted_to_stay(name: str) -> None:
    assert taught(make_predictor(name, SEASON), [7.0] * 60).predict(4) == pytest.approx([7.0] * 4)


def test_the_constant_one_follows_the_last_value() -> None:
    assert taught(ConstantPredictor(), [1.0, 9.0]).predict(2) == [9.0, 9.0]


def test_the_seasonal_one_sees_the_next_rise_at_the_bottom() -> None:
    predictor = taught(SeasonalPredictor(SEASON), [wave(place) for place in range(2 * SEASON + 1)])
    predicted = predictor.predict(6)
    assert predicted == pytest.approx([wave(place) for place in range(1, 7)], rel=0.25)
    assert predicted[-1] > 3 * wave(0)


def test_the_seasonal_one_expects_twice_as_much_when_there_is_twice_as_much() -> None:
    values = [wave(place) for place in range(SEASON)] + [wave(place, 20.0) for place in range(SEASON + 8)]
    predicted = taught(SeasonalPredictor(SEASON), values).predict(1)
    assert predicted == pytest.approx([wave(8, 20.0)], rel=0.25)


def test_a_season_of_too_few_intervals_is_refused() -> None:
    with pytest.raises(ValueError, match="season = 5 intervals: at least 10 are needed"):
        SeasonalPredictor(5)


def test_arima_continues_a_rise_and_is_never_below_zero() -> None:
    rising = taught(ArimaPredictor(), [1.0 + 0.5 * place for place in range(30)])
    assert rising.predict(3)[-1] > 15.5
    falling = taught(ArimaPredictor(), [max(0.0, 10.0 - place) for place in range(13)])
    assert min(falling.predict(5)) >= 0.0
