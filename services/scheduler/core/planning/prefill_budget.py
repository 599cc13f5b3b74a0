"""How many prompt tokens a step may compute: beside decodes, so that the next tokens of these come in time, and at all,
so that prompts that come meanwhile are soon computed, too.

A. Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024), chooses one
chunk size by profiling a device. Here it follows from the steps as they are, so that it is right for longer contexts
and other batches, too. Pure: seconds are measured by the caller.
"""

from __future__ import annotations

from math import inf, log2, sqrt
from typing import NamedTuple

SIZES_PER_OCTAVE = 2
"""Sizes that are told apart, for each doubling of a step's tokens."""
GAIN, DEVIATION_GAIN = 1 / 8, 1 / 4
"""How much the newest step counts for the mean of its size, and for the deviation from it: those of RFC 6298."""
DEVIATIONS = 1.0
"""A size is expected to take its mean and so many mean deviations."""
DRIFT = 1 / 16
"""How much of what one step took more or less than predicted is believed of all other sizes: contexts grow, and other
work comes and goes."""
MAX_RATIO = 4.0
"""A step that takes more than this multiple of what was predicted was interrupted; it counts as this multiple."""
FIRST_CHUNK = 256
"""Prompt tokens beside decodes, as long as no step was measured."""
MIN_CHUNK = 16
"""Fewer prompt tokens than that are not worth a step's fixed cost; a block."""
EFFICIENT_SHARE = 0.8
"""A chunk is efficient if its tokens per second are at least this share of the best rate of any size."""
PREFILL_SHARE = 0.9
"""The same for steps that nobody's next token waits for: what they gain is a sooner first token; it may cost less."""
RETRY_EVERY = 32
"""Steps that are longer than they should be until half of one is tried again: it may have been interrupted."""
MAX_GROWTH = 2.0
"""A step computes no more than this multiple of the largest size that was measured: beyond it nothing is known."""


class _Size:
    """The steps of about one size: their mean tokens, and mean and deviation of their seconds."""

    __slots__ = ("deviation", "seconds", "tokens")

    def __init__(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds, self.deviation = tokens, seconds, 0.0

    def record(self, tokens: float, seconds: float) -> None:
        self.deviation += DEVIATION_GAIN * (abs(seconds - self.seconds) - self.deviation)
        self.seconds += GAIN * (seconds - self.seconds)
        self.tokens += GAIN * (tokens - self.tokens)


class _Point(NamedTuple):
    tokens: float
    seconds: float


class StepTimeEstimator:
    """Owns how long steps take, by their tokens. Between two sizes it interpolates, beyond the largest it assumes as
    many tokens per second as there."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def record(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens, decodes and prompts together, took so long."""
        if tokens <= 0 or seconds <= 0.0:
            return
        predicted = self.seconds(tokens)
        if predicted is not None:
            seconds = min(seconds, MAX_RATIO * predicted)
        index = round(SIZES_PER_OCTAVE * log2(tokens))
        known = self._sizes.get(index)
        if known is None or predicted is None:
            self._sizes[index] = _Size(tokens, seconds)
            return
        factor = 1.0 + DRIFT * (seconds / predicted - 1.0)
        for size in self._sizes.values():
            size.seconds *= factor
        known.record(tokens, seconds)

    def seconds(self, tokens: float) -> float | None:
        """What a step of so many tokens is expected to take; None before the first one was measured."""
        points = self._points()
        if not points:
            return None
        before = points[0]
        if tokens <= before.tokens:
            return before.seconds
        for point in points[1:]:
            if tokens <= point.tokens:
                share = (tokens - before.tokens) / (point.tokens - before.tokens)
                return before.seconds + share * (point.seconds - before.seconds)
            before = point
        return before.seconds * tokens / before.tokens

    def tokens_within(self, seconds: float, max_growth: float = MAX_GROWTH) -> float | None:
        """The most tokens that a step is expected to compute in so many seconds, at most `max_growth` times the most
        that was measured; 0 where even the smallest takes longer. None before the first one was measured."""
        points = self._points()
        if not points:
            return None
        before = points[0]
        if before.seconds > seconds:
            return 0.0
        for point in points[1:]:
            if point.seconds > seconds:
                share = (seconds - before.seconds) / (point.seconds - before.seconds)
                return before.tokens + share * (point.tokens - before.tokens)
            before = point
        return before.tokens * min(max_growth, seconds / before.seconds)

    def knows(self, tokens: float) -> bool:
        """Whether a step of about this size was measured."""
        return round(SIZES_PER_OCTAVE * log2(tokens)) in self._sizes

    def efficient_tokens(self, share: float = EFFICIENT_SHARE) -> float | None:
        """The fewest tokens of a measured step at which the device computes this share of the tokens per second that it
        does at its best; None before the first one was measured."""
        points = self._points()
        if not points:
            return None
        best = max(point.tokens / point.seconds for point in points)
        return next(p.tokens for p in points if p.tokens / p.seconds >= share * best)

    def is_largest(self, tokens: float) -> bool:
        """Whether no larger step was measured."""
        return tokens >= max((size.tokens for size in self._sizes.values()), default=0.0)

    def _points(self) -> list[_Point]:
        """By tokens, rising. A size that seems slower than smaller steps in a row would be was interrupted, or met a
        compiler; one that seems quicker than a smaller one was measured at another time."""
        points: list[_Point] = []
        for index in sorted(self._sizes):
            size = self._sizes[index]
            tokens, seconds = size.tokens, size.seconds + DEVIATIONS * size.deviation
            if points:
                last = points[-1]
                if tokens <= last.tokens:
                    continue
                seconds = max(last.seconds, min(seconds, last.seconds * tokens / last.tokens))
            points.append(_Point(tokens, seconds))
        return points


class PrefillBudget:
    """Owns the times of steps, and the targets: for the time from one token to the next, and for how long a step with
    prompts takes.

    A chunk is the largest that keeps the targets. So it is below the efficient one only where the first could not be
    kept otherwise; and where the decodes alone take longer than the target, or any efficient step does, nothing is won
    by small chunks, and it is the efficient one. For the second target prompts get as many tokens as are decoded beside
    them at least: where decodes alone take about as long, prompts would wait until most of these have ended. Where
    several prompts wait, steps are shorter than it: in one all would have their first tokens when the last one has.
    """

    def __init__(self, itl_target: float | None, prefill_target: float | None = None) -> None:
        """In seconds; None: steps are as large as they may be."""
        self._target = itl_target
        self._prefill_target = prefill_target
        self._late = 0
        """Chunks that took longer than the second target."""
        self.estimator = StepTimeEstimator()

    def record(self, tokens: int, seconds: float, *, prefills: bool) -> None:
        """A step of so many tokens has ended so many seconds after the one before. `prefills`: whether it had prompt
        tokens."""
        if self._target is not None or (self._prefill_target is not None and prefills):
            self.estimator.record(tokens, seconds)

    def chunk(self, planned: int, budget: int, waiting: int, first: int) -> int:
        """Prompt tokens for a step in which `planned` tokens are decoded and `budget` more are allowed, 1 at least if
        any is. `waiting`: tokens of prompts that are not computed yet, `first`: of these the first prompt's."""
        if budget <= MIN_CHUNK:
            return budget
        chunk = self._beside(planned, budget) if planned else budget
        if self._prefill_target is not None:
            most = min(self._of_step(self._prefill_target) - planned, max(first, self._soonest(planned, waiting)))
            chunk = min(chunk, max(planned, most))
        return int(min(budget, max(MIN_CHUNK, chunk)))

    def _beside(self, planned: int, budget: int) -> float:
        """Without decodes nobody waits for the next token, and it is not asked."""
        if self._target is None:
            return budget
        within = self.estimator.tokens_within(self._target)
        if within is None:
            return FIRST_CHUNK
        chunk = int(within) - planned
        return chunk if chunk >= MIN_CHUNK else self.estimator.efficient_tokens() or FIRST_CHUNK

    def _soonest(self, planned: int, waiting: int) -> float:
        """Prompt tokens of a step with which the mean prompt is computed soonest.

        Of W waiting tokens in chunks of P, beside decodes and a fixed cost that are worth D tokens, a prompt is whole
        after (W / P + 1) / 2 steps of P + D on the average: least where P is the root of W * D. Below what is efficient
        the cost is not fixed: devices that are bound by their weights compute fewer tokens in the same time. Where the
        largest measured step is the only efficient one, a larger may be more so, and the next size is tried.
        """
        efficient = self.estimator.efficient_tokens(PREFILL_SHARE)
        if efficient is None:
            return inf
        if self.estimator.is_largest(efficient):
            efficient *= 2 ** (1 / SIZES_PER_OCTAVE)
        fixed = efficient * (1 / PREFILL_SHARE - 1)
        return max(efficient - planned, sqrt(waiting * (planned + fixed)))

    def _of_step(self, target: float) -> float:
        """Tokens of a step that takes so many seconds. The first steps are as large as they may be: most devices need
        no chunks, and a smaller step is tried where a larger one has taken too long."""
        within = self.estimator.tokens_within(target, max_growth=inf)
        efficient = self.estimator.efficient_tokens(PREFILL_SHARE)
        if within is None or efficient is None:
            return inf
        if within >= efficient:
            return within
        self._late += 1
        tries = self._late % RETRY_EVERY == 0 or not self.estimator.knows(efficient / 2)
        return efficient / 2 if tries else efficient
