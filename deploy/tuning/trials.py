"""What came of trying some settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.tuning.space import Settings

SAME = 0.01
"""Goodputs that differ by less than this share are equal; then the trial with the shortest requests is best."""


class TrialFailed(Exception):
    """These settings serve nothing: the text says why. The study goes on."""


class FinishedTrial(NamedTuple):
    """What a server with some settings was measured to do."""

    number: int
    settings: Settings
    figures: Mapping[str, Any] | None
    """Those of `bench serve`; None where they failed."""
    failure: str | None

    @property
    def goodput(self) -> float:
        """Requests per second that met the objectives; -1 where the settings failed."""
        return -1.0 if self.figures is None else float(self.figures["request_goodput"])

    @property
    def seconds(self) -> float:
        """Median time of a request; a tie is decided by it."""
        return float("inf") if self.figures is None else float(self.figures["median_e2el_ms"]) / 1000


def best_of(trials: Sequence[FinishedTrial]) -> FinishedTrial | None:
    """The best trial; None where no settings served anything within the objectives."""
    good = [each for each in trials if each.goodput > 0]
    if not good:
        return None
    most = max(each.goodput for each in good)
    return min((each for each in good if each.goodput >= most * (1 - SAME)), key=lambda each: each.seconds)
