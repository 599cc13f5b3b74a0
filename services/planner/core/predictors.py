"""Predictors of a load from its past: one number per interval in, the next ones out."""

from __future__ import annotations

import warnings
from collections import deque
from itertools import islice
from typing import Literal, Protocol, get_args

PredictorName = Literal["constant", "seasonal", "arima"]
PREDICTORS: tuple[PredictorName, ...] = get_args(PredictorName)


class LoadPredictor(Protocol):
    """Learns one number per interval, and predicts the next ones."""

    def observe(self, value: float) -> None:
        """The value of the interval that has ended."""

    def predict(self, steps: int) -> list[float]:
        """The next `steps` values, none of them negative; zeros before anything was observed."""


def make_predictor(name: PredictorName, season: int) -> LoadPredictor:
    """`season`: intervals after which a seasonal load repeats itself."""
    match name:
        case "constant":
            return ConstantPredictor()
        case "seasonal":
            return SeasonalPredictor(season)
        case "arima":
            return ArimaPredictor()


class ConstantPredictor:
    """Owns the last value: it stays as it is."""

    def __init__(self) -> None:
        self._last = 0.0

    def observe(self, value: float) -> None:
        """As `LoadPredictor` has it."""
        self._last = value

    def predict(self, steps: int) -> list[float]:
        """As `LoadPredictor` has it."""
        return [self._last] * steps


class SeasonalPredictor:
    """Owns two seasons of values. Predicts what was a season before (seasonal naive method: Hyndman, Athanasopoulos,
    "Forecasting", 5.2), smoothed over neighbours, times how much more there is lately than there was a season before;
    in the first season, the last value."""

    NEIGHBOURS = 2
    """Intervals before and behind that are averaged, so that chance is not repeated."""
    LEVEL_INTERVALS = 4
    """The latest ones, of which the level is compared with that of a season before."""
    MAX_CHANGE = 2.0
    """The most by which the level changes from a season to the next, up or down."""

    def __init__(self, season: int) -> None:
        """`season`: intervals; at least twice as many as are averaged."""
        least = 2 * max(2 * self.NEIGHBOURS + 1, self.LEVEL_INTERVALS)
        if season < least:
            raise ValueError(f"season = {season} intervals: at least {least} are needed")
        self._season = season
        self._values: deque[float] = deque(maxlen=2 * season)

    def observe(self, value: float) -> None:
        """As `LoadPredictor` has it."""
        self._values.append(value)

    def predict(self, steps: int) -> list[float]:
        """As `LoadPredictor` has it."""
        values, season = list(self._values), self._season
        if len(values) < season + self.LEVEL_INTERVALS:
            return [values[-1] if values else 0.0] * steps
        now = len(values)
        before = values[now - self.LEVEL_INTERVALS - season : now - season]
        lately = values[now - self.LEVEL_INTERVALS :]
        level = sum(lately) / sum(before) if sum(before) > 0 else 1.0
        level = min(self.MAX_CHANGE, max(1 / self.MAX_CHANGE, level))
        return [level * self._around(values, now + step % season - season) for step in range(steps)]

    def _around(self, values: list[float], place: int) -> float:
        near = values[max(0, place - self.NEIGHBOURS) : place + self.NEIGHBOURS + 1]
        return sum(near) / len(near)


class ArimaPredictor:
    """Owns the latest values, of which an ARIMA model (Box, Jenkins 1970) is made anew for each prediction. Its order
    is the one with the least information criterion (AIC), chosen again from time to time.

    Needs statsmodels (the extra `planner`), which is imported at the first prediction.
    """

    MIN_VALUES = 12
    """Below so many it predicts the last value."""
    MAX_VALUES = 120
    ORDERS = ((0, 1, 1), (1, 1, 0), (1, 1, 1), (2, 1, 1), (1, 0, 0), (2, 0, 0))
    CHOICE_INTERVALS = 20
    """Observations after which the order is chosen again."""
    MAX_ITERATIONS = 50

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=self.MAX_VALUES)
        self._order = self.ORDERS[0]
        self._left = 0
        """Observations until the order is chosen again."""

    def observe(self, value: float) -> None:
        """As `LoadPredictor` has it."""
        self._values.append(value)
        self._left -= 1

    def predict(self, steps: int) -> list[float]:
        """As `LoadPredictor` has it. Raises ImportError without statsmodels."""
        values = list(self._values)
        last = values[-1] if values else 0.0
        if len(values) < self.MIN_VALUES or max(values) == min(values):
            return [last] * steps
        if self._left <= 0:
            fits = {order: self._fitted(values, order, steps) for order in self.ORDERS}
            self._order = min(fits, key=lambda order: fits[order][0])
            self._left = self.CHOICE_INTERVALS
            forecast = fits[self._order][1]
        else:
            _, forecast = self._fitted(values, self._order, steps)
        # Of short pasts a model may explode; nothing grows to several times what was ever seen in so few intervals.
        bound = 2 * max(values)
        return [min(bound, max(0.0, each)) if each == each else last for each in islice(forecast, steps)]

    def _fitted(self, values: list[float], order: tuple[int, int, int], steps: int) -> tuple[float, list[float]]:
        """The criterion and the forecast."""
        from statsmodels.tsa.arima.model import ARIMA

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged, or started elsewhere: the criterion judges it
            fit = ARIMA(values, order=order).fit(method_kwargs={"maxiter": self.MAX_ITERATIONS})
        return float(fit.aic), [float(each) for each in fit.forecast(steps)]
