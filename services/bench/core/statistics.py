"""The figures of a serving benchmark, defined and named as in vLLM's `bench serve`, so that results compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor, sqrt
from typing import Any, Literal, get_args

from services.bench.core.outcome import Outcome, Run

Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)


class GoodputError(ValueError):
    """A service-level objective that cannot be understood."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the closest ranks, as numpy does by default; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Of the population, as numpy's `std`."""
    middle = mean(values)
    return sqrt(mean([(value - middle) ** 2 for value in values]))


def samples(completed: Sequence[Outcome], metric: Metric) -> list[float]:
    """Every measurement of `metric`, in seconds."""
    match metric:
        case "ttft":
            return [o.ttft for o in completed]
        case "tpot":
            return [tpot for o in completed if (tpot := o.tpot) is not None]
        case "itl":
            return [itl for o in completed for itl in o.itls]
        case "e2el":
            return [o.latency for o in completed]


def parse_goodput(pairs: Sequence[str]) -> dict[Metric, float]:
    """`["ttft:500", "tpot:50"]` as seconds by metric. Raises GoodputError, naming the pair."""
    objectives: dict[Metric, float] = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        metric: Metric | None = next((m for m in ("ttft", "tpot", "e2el") if m == name), None)
        try:
            seconds = float(limit) / 1000
        except ValueError:
            seconds = -1.0
        if metric is None or not seconds > 0:
            raise GoodputError(f"{pair!r}: METRIC:MILLISECONDS is expected, METRIC one of ttft, tpot, e2el")
        objectives[metric] = seconds
    return objectives


def meets(outcome: Outcome, objectives: Mapping[Metric, float]) -> bool:
    """Whether every objective holds. One token has no time per output token: it meets any."""
    reached: dict[Metric, float] = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(reached[metric] <= limit for metric, limit in objectives.items())


def peak_tokens_per_second(completed: Sequence[Outcome]) -> int:
    """The most frames with tokens that came within one second of the run, counted from its start."""
    begin = min((o.start for o in completed), default=0.0)
    seconds = Counter(int(time - begin) for o in completed for time in o.token_times)
    return max(seconds.values(), default=0)


def percent_name(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def summary(run: Run, percents: Sequence[float], objectives: Mapping[Metric, float]) -> dict[str, Any]:
    """The result under vLLM's field names; times in milliseconds, rates per second."""
    completed = run.completed
    duration = max(run.duration, 1e-9)
    tokens_in, tokens_out = sum(o.prompt_tokens for o in completed), sum(o.output_tokens for o in completed)
    good = sum(meets(o, objectives) for o in completed) / duration if objectives else None
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(completed),
        "failed": len(run.failed),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(completed) / duration,
        "request_goodput": good,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(completed),
        "max_concurrent_requests": run.peak_concurrency,
        "client_cpu_s": run.client_cpu,
        "client_cpu_us_per_token": run.client_cpu / tokens_out * 1e6 if tokens_out else None,
    }
    for metric in METRICS:
        result |= _figures(metric, samples(completed, metric), percents)
    return result


def _figures(metric: Metric, seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    figures = {"mean": mean(seconds), "median": percentile(seconds, 50), "std": deviation(seconds)}
    figures |= {f"p{percent_name(percent)}": percentile(seconds, percent) for percent in percents}
    return {f"{name}_{metric}_ms": value * 1000 for name, value in figures.items()}
