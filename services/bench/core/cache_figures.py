"""What a run tells of the server's prefix cache: hit rate, time to first token with and without a hit, turn by turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from services.bench.core.outcome import Outcome
from services.bench.core.statistics import mean, percent_name, percentile

MOSTLY = 0.5
"""From this share of its prompt on, a request counts as cached: every chat shares the few tokens of its template."""


def hit_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Cached prompt tokens / prompt tokens (SGLang's definition: Zheng et al., NeurIPS 2024); None where no usage
    tells of cached tokens."""
    told = [o for o in outcomes if o.cached_tokens is not None]
    tokens = sum(o.prompt_tokens for o in told)
    return sum(o.cached_tokens or 0 for o in told) / tokens if tokens else None


def is_cached(outcome: Outcome) -> bool:
    return (outcome.cached_tokens or 0) >= MOSTLY * outcome.prompt_tokens > 0


def cache_figures(completed: Sequence[Outcome], percents: Sequence[float]) -> dict[str, Any]:
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


def turn_figures(completed: Sequence[Outcome], percents: Sequence[float]) -> list[dict[str, Any]]:
    """By the turn of the conversation, the first one first; those that no request reached are not there."""
    by_turn: defaultdict[int, list[Outcome]] = defaultdict(list)
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


def _ttft(name: str, outcomes: Sequence[Outcome], percents: Sequence[float]) -> dict[str, float | None]:
    """None for each where there is no such request: 0 ms would be a lie."""
    seconds = [o.ttft for o in outcomes]
    figures = {"mean": mean(seconds), "median": percentile(seconds, 50)}
    figures |= {f"p{percent_name(percent)}": percentile(seconds, percent) for percent in percents}
    return {f"{key}_{name}_ms": value * 1000 if seconds else None for key, value in figures.items()}
