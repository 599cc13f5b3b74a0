"""How slow each engine is beside the others of its model, by the step times that they report. Pure.

All are compared at the same step, of the median engine's tokens and blocks: one with few requests has short steps, and
would seem quick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2
from statistics import median
from typing import NamedTuple

from shared.ids import InstanceId, ModelName
from shared.messages.lifecycle import EngineReport, StepTimeFit, StepTimesReport

GRADES_PER_OCTAVE = 4
"""Slowdowns are told apart in steps of 19%: so engines that are alike have the same one, whatever their noise."""
HYSTERESIS = 0.75
"""Of a grade: so far a slowdown moves from the one that an engine has before it gets another."""
MAX_GRADE = 3 * GRADES_PER_OCTAVE
"""No engine counts as slower than 8 times the median, nor as quicker than an eighth of it."""
COMPARE_SECONDS = 1.0
"""Between two comparisons of all engines."""
MEMORY_SECONDS = 60.0
"""After so long without a step what an engine reported is forgotten, and it gets requests like the others: a machine
that was busy with something else is not avoided for ever."""


class Slowdown(NamedTuple):
    """What an engine's work costs, as a multiple of what the median engine's does."""

    prefill: float = 1.0
    decode: float = 1.0


NO_SLOWDOWN = Slowdown()
"""Also that of an engine that has measured nothing."""


class _Grades(NamedTuple):
    prefill: int = 0
    decode: int = 0

    @property
    def slowdown(self) -> Slowdown:
        return Slowdown(2.0 ** (self.prefill / GRADES_PER_OCTAVE), 2.0 ** (self.decode / GRADES_PER_OCTAVE))


MEDIAN_GRADES = _Grades()


class _MeasuredEngine(NamedTuple):
    model: ModelName
    steps: int
    stepped_at: float
    """When the number of its steps was last seen to change, in monotonic seconds."""
    times: StepTimesReport | None


class EngineSlowdowns:
    """Owns the newest step times of each engine, and its slowdown."""

    def __init__(self) -> None:
        self._measured: dict[InstanceId, _MeasuredEngine] = {}
        self._grades: dict[InstanceId, _Grades] = {}
        self.unlike: dict[InstanceId, Slowdown] = {}
        """Of the engines that are not as fast as the median one."""
        self._compared_at: float | None = None

    def record(self, engine: InstanceId, report: EngineReport, now: float) -> None:
        """An engine has reported."""
        before = self._measured.get(engine)
        stepped = before is None or before.steps != report.steps
        stepped_at = now if before is None or stepped else before.stepped_at
        self._measured[engine] = _MeasuredEngine(report.model.name, report.steps, stepped_at, report.step_times)

    def forget(self, engine: InstanceId) -> None:
        """An engine is gone, or is another process now."""
        self._measured.pop(engine, None)
        self._grades.pop(engine, None)
        self.unlike.pop(engine, None)

    def of(self, engine: InstanceId) -> Slowdown:
        """That of the last comparison; the median's where it has measured nothing."""
        return self.unlike.get(engine, NO_SLOWDOWN)

    def compare(self, now: float) -> list[InstanceId]:
        """Compares all engines, if that is due. Returns those whose slowdown has changed."""
        if self._compared_at is not None and now - self._compared_at < COMPARE_SECONDS:
            return []
        self._compared_at = now
        changed: list[InstanceId] = []
        for model in {each.model for each in self._measured.values()}:
            changed += self._compare(model, now)
        return changed

    def _compare(self, model: ModelName, now: float) -> list[InstanceId]:
        of_model = [name for name, each in self._measured.items() if each.model == model]
        known = {
            name: each.times
            for name in of_model
            if (each := self._measured[name]).times is not None and now - each.stepped_at <= MEMORY_SECONDS
        }
        prefill = _relative({name: times.prompts for name, times in known.items() if times is not None})
        decode = _relative({name: times.decodes for name, times in known.items() if times is not None})
        changed = []
        for name in of_model:
            before = self._grades.get(name, MEDIAN_GRADES)
            grades = _Grades(_grade(prefill.get(name), before.prefill), _grade(decode.get(name), before.decode))
            if grades != before:
                changed.append(name)
                self._grades[name] = grades
                self.unlike.pop(name, None)
                if grades != MEDIAN_GRADES:
                    self.unlike[name] = grades.slowdown
        return changed


def _relative(fits: Mapping[InstanceId, StepTimeFit | None]) -> dict[InstanceId, float]:
    """Of each engine with a fit how long a step takes there, as a multiple of the median engine's."""
    found = {name: fit for name, fit in fits.items() if fit is not None}
    if len(found) < 2:
        return {}
    tokens, blocks = _median(fit.tokens for fit in found.values()), _median(fit.blocks for fit in found.values())
    seconds = {name: fit.seconds_at(tokens, blocks) for name, fit in found.items()}
    middle = _median(seconds.values())
    return {name: each / middle for name, each in seconds.items()}


def _median(values: Iterable[float]) -> float:
    return float(median(values))


def _grade(relative: float | None, before: int) -> int:
    """The nearest grade; the one before where that is not far."""
    if relative is None:
        return 0
    exact = max(-MAX_GRADE, min(MAX_GRADE, GRADES_PER_OCTAVE * log2(relative)))
    return before if abs(exact - before) < HYSTERESIS else round(exact)
