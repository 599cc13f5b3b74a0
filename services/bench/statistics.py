"""The outcome of one request of a benchmark, and of all of them. Seconds throughout."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import floor, sqrt
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args


class RequestOutcome(NamedTuple):
    """One request. `token_times` are on the clock of `start`; without any, the whole answer came at `end`."""

    start: float
    end: float
    """When the last tokens came."""
    prompt_tokens: int
    output_tokens: int
    token_times: list[float]
    error: str | None = None
    cached_tokens: int | None = None
    """Cached prompt tokens according to the server's usage; None if it does not report them."""
    text: str = ""
    """The answer, if it was to be kept."""
    turn: int = 0
    """Which question of its conversation this is, from 0."""

    @property
    def latency(self) -> float:
        """From its start to its last token."""
        return self.end - self.start

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return (self.token_times[0] if self.token_times else self.end) - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token, the first left out, as vLLM's benchmark has it; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: between frames that carry tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class BenchResult(NamedTuple):
    """All requests of a benchmark."""

    outcomes: list[RequestOutcome]
    duration: float
    """From the first request's start to the last one's end."""
    peak_concurrency: int
    client_cpu: float
    """Processor seconds of the load generator itself."""

    @property
    def completed(self) -> list[RequestOutcome]:
        """The requests that were answered, in the order of the run."""
        return [o for o in self.outcomes if o.error is None]

    @property
    def failed(self) -> list[RequestOutcome]:
        """The requests that were not, in the order of the run."""
        return [o for o in self.outcomes if o.error is not None]


# The figures of a serving benchmark, defined and named as in vLLM's `bench serve`, so that results compare.


Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)


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
    """The arithmetic mean; 0 for no values."""
    return fmean(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the population, as numpy's `std`."""
    middle = mean(values)
    return sqrt(mean([(value - middle) ** 2 for value in values]))


def spread(seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles, by the names that fields of results have."""
    seconds = sorted(seconds)  # once: each percentile of millions would sort them anew
    values = [mean(seconds), percentile(seconds, 50), *(percentile(seconds, percent) for percent in percents)]
    return dict(zip(spread_names(percents), values, strict=True))


def spread_names(percents: Sequence[float]) -> list[str]:
    """The keys of a `spread`: mean, median, p99, p99.9 …"""
    return ["mean", "median", *(f"p{percent_name(percent)}" for percent in percents)]


def samples(completed: Sequence[RequestOutcome], metric: Metric) -> list[float]:
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
    """`["ttft:500", "tpot:50"]` as seconds by metric. Raises ValueError, naming the pair."""
    objectives: dict[Metric, float] = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        metric: Metric | None = next((m for m in ("ttft", "tpot", "e2el") if m == name), None)
        try:
            seconds = float(limit) / 1000
        except ValueError:
            seconds = -1.0
        if metric is None or not seconds > 0:
            raise ValueError(f"{pair!r}: METRIC:MILLISECONDS is expected, METRIC one of ttft, tpot, e2el")
        objectives[metric] = seconds
    return objectives


def meets(outcome: RequestOutcome, objectives: Mapping[Metric, float]) -> bool:
    """Whether every objective holds. One token has no time per output token: it meets any."""
    reached: dict[Metric, float] = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(reached[metric] <= limit for metric, limit in objectives.items())


def peak_tokens_per_second(completed: Sequence[RequestOutcome]) -> int:
    """The most frames with tokens that came within one second of the run, counted from its start."""
    begin = min((o.start for o in completed), default=0.0)
    seconds = Counter(int(time - begin) for o in completed for time in o.token_times)
    return max(seconds.values(), default=0)


def percent_name(percent: float) -> str:
    """A percentile as in field names: 99 for 99.0, 99.9 for 99.9."""
    return str(int(percent)) if percent == int(percent) else str(percent)


def summary(run: BenchResult, percents: Sequence[float], objectives: Mapping[Metric, float]) -> dict[str, Any]:
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
        seconds = samples(completed, metric)
        figures = spread(seconds, percents) | {"std": deviation(seconds)}
        result |= {f"{name}_{metric}_ms": value * 1000 for name, value in figures.items()}
    return result


# What a run tells of the server's prefix cache: hit rate, time to first token with and without a hit, turn by turn.


MOSTLY = 0.5
"""From this share of its prompt on, a request counts as cached: every chat shares the few tokens of its template."""


def hit_rate(outcomes: Sequence[RequestOutcome]) -> float | None:
    """Cached prompt tokens / prompt tokens (SGLang's definition: Zheng et al., NeurIPS 2024); None where no usage
    tells of cached tokens."""
    told = [o for o in outcomes if o.cached_tokens is not None]
    tokens = sum(o.prompt_tokens for o in told)
    return sum(o.cached_tokens or 0 for o in told) / tokens if tokens else None


def is_cached(outcome: RequestOutcome) -> bool:
    """Whether at least half of the prompt was found in the server's prefix cache."""
    return (outcome.cached_tokens or 0) >= MOSTLY * outcome.prompt_tokens > 0


def cache_figures(completed: Sequence[RequestOutcome], percents: Sequence[float]) -> dict[str, Any]:
    """Empty where the server does not tell of cached tokens. Times in milliseconds."""
    told = [o for o in completed if o.cached_tokens is not None]
    if not told:
        return {}
    cached, uncached = [o for o in told if is_cached(o)], [o for o in told if not is_cached(o)]
    return {
        "total_cached_tokens": sum(o.cached_tokens or 0 for o in told),
        "cache_hit_rate": hit_rate(told),
        "cached_requests": len(cached),
        "uncached_requests": len(uncached),
        **_ttft("cached_ttft", cached, percents),
        **_ttft("uncached_ttft", uncached, percents),
    }


def turn_figures(completed: Sequence[RequestOutcome], percents: Sequence[float]) -> list[dict[str, Any]]:
    """By the turn of the conversation, the first one first; those that no request reached are not there."""
    by_turn: defaultdict[int, list[RequestOutcome]] = defaultdict(list)
    for outcome in completed:
        by_turn[outcome.turn].append(outcome)
    return [
        {
            "turn": turn + 1,
            "completed": len(outcomes),
            "mean_input_tokens": mean([o.prompt_tokens for o in outcomes]),
            "cache_hit_rate": hit_rate(outcomes),
            **_ttft("ttft", outcomes, percents),
        }
        for turn, outcomes in sorted(by_turn.items())
    ]


def _ttft(name: str, outcomes: Sequence[RequestOutcome], percents: Sequence[float]) -> dict[str, float | None]:
    """None for each where there is no such request: 0 ms would be a lie."""
    seconds = [o.ttft for o in outcomes]
    figures = spread(seconds, percents).items()
    return {f"{key}_{name}_ms": value * 1000 if seconds else None for key, value in figures}
