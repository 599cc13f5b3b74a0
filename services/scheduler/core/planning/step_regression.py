"""How long this engine's steps take, as a function of what is in them. Coordinators compare engines by it. Pure.

An engine with few requests has short steps, however slow it is. So seconds are fitted to the tokens of a step and to
the KV blocks in use, and engines are compared at the same tokens and blocks: least squares over fading points, without
negative slopes, as more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from shared.messages.lifecycle import StepTimeFit, StepTimesReport

FADE = 0.98
"""The factor by which each further step reduces the weight of earlier ones: about 50 steps count."""
FIRST_STEPS = 8
"""Steps whose median is looked for before anything is known: the first one meets compilers and cold memory. And steps
after which what was fitted is fitted again."""
MAX_RATIO = 4.0
"""A step that takes more than this multiple of what was predicted was interrupted; it counts as this multiple."""
RIDGE = 1e-3
"""Variance of tokens and of blocks, relative to the squares of their means, that is added to what was seen: without a
spread of some percent slopes are not believed."""


class StepRegression:
    """Owns the fading sums of one kind of steps."""

    __slots__ = (
        "_bb",
        "_blocks",
        "_bs",
        "_first",
        "_fit",
        "_newer",
        "_seconds",
        "_tb",
        "_tokens",
        "_ts",
        "_tt",
        "_weight",
    )

    def __init__(self) -> None:
        self._first: list[tuple[int, int, float]] = []
        """The first steps: tokens, blocks, seconds."""
        self._weight = self._tokens = self._blocks = self._seconds = 0.0
        """Weight of the steps, and their means."""
        self._tt = self._tb = self._bb = self._ts = self._bs = 0.0
        """Weighted sums of products of deviations from the means."""
        self._fit: StepTimeFit | None = None
        self._newer = 0
        """Steps since `_fit`."""

    def record(self, tokens: int, blocks: int, seconds: float) -> None:
        """A step of so many tokens has taken so long, while so many KV blocks were in use."""
        if tokens <= 0 or seconds <= 0.0:
            return
        if self._fit is not None:
            self._accumulate(tokens, blocks, (min(seconds, MAX_RATIO * self._fit.seconds_at(tokens, blocks)),))
            self._newer += 1
            if self._newer >= FIRST_STEPS:
                self._solve()
            return
        self._first.append((tokens, blocks, seconds))
        if len(self._first) == FIRST_STEPS:
            longest = MAX_RATIO * median(seconds for _, _, seconds in self._first)
            for step_tokens, step_blocks, step_seconds in self._first:
                self._accumulate(step_tokens, step_blocks, (min(step_seconds, longest),))
            self._first.clear()
            self._solve()

    def record_alike(self, tokens: int, blocks: int, seconds: Sequence[float]) -> None:
        """Steps of so many tokens have taken so long, one after the other: the same as `record` for each of them."""
        left = [each for each in seconds if each > 0.0] if tokens > 0 else []
        while left and self._fit is None:
            self.record(tokens, blocks, left.pop(0))
        while left and self._fit is not None:
            most, count = MAX_RATIO * self._fit.seconds_at(tokens, blocks), FIRST_STEPS - self._newer
            part, left = left[:count], left[count:]
            self._accumulate(tokens, blocks, [min(each, most) for each in part])
            self._newer += len(part)
            if self._newer >= FIRST_STEPS:
                self._solve()

    def report(self) -> StepTimeFit | None:
        """None before the first few steps."""
        if self._newer:
            self._solve()
        return self._fit

    def _accumulate(self, tokens: float, blocks: float, seconds: Iterable[float]) -> None:
        """B. P. Welford, "Note on a method for calculating corrected sums of squares and products" (1962), with weights
        that fade."""
        weight, mean_tokens, mean_blocks, mean_seconds = self._weight, self._tokens, self._blocks, self._seconds
        tt, tb, bb, ts, bs = self._tt, self._tb, self._bb, self._ts, self._bs
        for each in seconds:
            before = weight * FADE
            weight = before + 1.0
            of_tokens, of_blocks, of_seconds = tokens - mean_tokens, blocks - mean_blocks, each - mean_seconds
            share = before / weight
            tt = tt * FADE + share * of_tokens * of_tokens
            tb = tb * FADE + share * of_tokens * of_blocks
            bb = bb * FADE + share * of_blocks * of_blocks
            ts = ts * FADE + share * of_tokens * of_seconds
            bs = bs * FADE + share * of_blocks * of_seconds
            mean_tokens += of_tokens / weight
            mean_blocks += of_blocks / weight
            mean_seconds += of_seconds / weight
        self._weight, self._tokens, self._blocks, self._seconds = weight, mean_tokens, mean_blocks, mean_seconds
        self._tt, self._tb, self._bb, self._ts, self._bs = tt, tb, bb, ts, bs

    def _solve(self) -> None:
        tokens, blocks, seconds = self._tokens, self._blocks, self._seconds
        tt = self._tt + RIDGE * self._weight * tokens * tokens
        bb = self._bb + RIDGE * self._weight * blocks * blocks
        by_tokens, by_blocks = _slopes(tt, self._tb, bb, self._ts, self._bs)
        explained = by_tokens * tokens + by_blocks * blocks
        if explained > seconds:  # an empty step would take less than no time
            by_tokens, by_blocks = by_tokens * seconds / explained, by_blocks * seconds / explained
        self._fit, self._newer = StepTimeFit(tokens, blocks, seconds, by_tokens, by_blocks), 0


def _slopes(tt: float, tb: float, bb: float, ts: float, bs: float) -> tuple[float, float]:
    """Least squares of two slopes, neither of them below 0. `tt` is above 0."""
    determinant = tt * bb - tb * tb
    if determinant > 0.0:
        by_tokens, by_blocks = (ts * bb - bs * tb) / determinant, (bs * tt - ts * tb) / determinant
        if by_tokens >= 0.0 and by_blocks >= 0.0:
            return by_tokens, by_blocks
    only_tokens, only_blocks = max(0.0, ts / tt), max(0.0, bs / bb) if bb > 0.0 else 0.0
    # What a slope alone explains of the variance.
    return (only_tokens, 0.0) if only_tokens * ts >= only_blocks * bs else (0.0, only_blocks)


class StepRegressions:
    """Owns the times of steps with prompt tokens, and of those without."""

    def __init__(self) -> None:
        self._prompts = StepRegression()
        self._decodes = StepRegression()

    def record(self, tokens: int, blocks: int, seconds: float, *, prefills: bool) -> None:
        """A step of so many tokens has taken so long, while so many KV blocks were in use. `prefills`: some of the
        tokens were of prompts."""
        (self._prompts if prefills else self._decodes).record(tokens, blocks, seconds)

    def record_decodes(self, tokens: int, blocks: int, seconds: Sequence[float]) -> None:
        """Steps without prompt tokens, of so many tokens each, have taken so long, one after the other."""
        self._decodes.record_alike(tokens, blocks, seconds)

    def report(self) -> StepTimesReport | None:
        """For coordinators; None before the first few steps."""
        prompts, decodes = self._prompts.report(), self._decodes.report()
        return None if prompts is None and decodes is None else StepTimesReport(prompts, decodes)
