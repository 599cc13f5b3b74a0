"""What long prompts do to streams that are being decoded: inter-token latencies before and while they arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from services.bench.statistics import RequestOutcome, percentile, spread

BIN_SECONDS = 0.25


class Window(NamedTuple):
    """The run, on the clock of the outcomes."""

    origin: float
    disturbed: float
    """From here on long prompts arrive."""
    end: float
    """What comes later does not count: streams go on while the last long prompts are done."""


class TokenGap(NamedTuple):
    """The time between two successive frames with tokens of one stream."""

    at: float
    """When it ended, in seconds after the run's start."""
    seconds: float


def token_gaps(outcomes: Sequence[RequestOutcome], window: Window) -> list[TokenGap]:
    """The gaps between tokens of all streams within the run."""
    return [
        TokenGap(later - window.origin, later - earlier)
        for outcome in outcomes
        for earlier, later in pairwise(outcome.token_times)
        if later < window.end
    ]


def all_streaming_at(firsts: Sequence[RequestOutcome]) -> float:
    """When the last of the first streams had its first token; the streams are steady from then on."""
    return max(outcome.start + outcome.ttft for outcome in firsts)


def interference_figures(
    outcomes: Sequence[RequestOutcome], steady_from: float, window: Window, percents: Sequence[float]
) -> dict[str, Any]:
    """Milliseconds. `steady_from` is on the outcomes' clock, before `window.disturbed`.

    A stream that waits for its first token has no inter-token latency: that shows in the tokens per second, and in the
    streams' own time to first token.
    """
    gaps = token_gaps(outcomes, window)
    begin, disturbed_at = steady_from - window.origin, window.disturbed - window.origin
    quiet = [gap.seconds for gap in gaps if begin <= gap.at < disturbed_at]
    disturbed = [gap.seconds for gap in gaps if gap.at >= disturbed_at]
    ttfts = [outcome.ttft for outcome in outcomes if window.disturbed <= outcome.start < window.end]
    before, then = percentile(quiet, 99), percentile(disturbed, 99)
    return {
        "quiet": _figures(quiet, window.disturbed - steady_from, percents),
        "disturbed": _figures(disturbed, window.end - window.disturbed, percents),
        "streams_begun_meanwhile": len(ttfts),
        "max_stream_ttft_ms": max(ttfts) * 1000 if ttfts else None,
        "p99_itl_ratio": then / before if before else None,
        "timeline": timeline(gaps),
    }


def timeline(gaps: Sequence[TokenGap]) -> list[dict[str, float]]:
    """Median and longest gap of each quarter of a second in which any ended."""
    bins: defaultdict[int, list[float]] = defaultdict(list)
    for gap in gaps:
        bins[int(gap.at / BIN_SECONDS)].append(gap.seconds)
    return [
        {
            "second": number * BIN_SECONDS,
            "median_itl_ms": percentile(seconds, 50) * 1000,
            "max_itl_ms": max(seconds) * 1000,
        }
        for number, seconds in sorted(bins.items())
    ]


def _figures(seconds: Sequence[float], duration: float, percents: Sequence[float]) -> dict[str, Any]:
    times = spread(seconds, percents) | {"max": max(seconds, default=0.0)}
    rate = len(seconds) / duration
    return {
        "tokens": len(seconds),
        "tokens_per_second": rate,
        **{f"{name}_itl_ms": value * 1000 for name, value in times.items()},
    }
