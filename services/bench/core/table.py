"""The result as the table that users of vLLM's benchmark know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.core.processor_time import Share, by_actor, total
from services.bench.core.statistics import METRICS, Metric, percent_name

WIDTH = 50
TURN_WIDTHS = (4, 9, 8, 8, 11, 10)
TITLES: dict[Metric, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
    ("Client CPU (s):", "client_cpu_s"),
    ("Client CPU per output token (us):", "client_cpu_us_per_token"),
)


def rule(title: str, fill: str = "-") -> str:
    return f"{title:{fill}^{WIDTH}}"


def line(title: str, value: object) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value!s:<10}"
    return f"{title:<40}{shown}".rstrip()


def serve_table(result: Mapping[str, Any], percents: Sequence[float], shares: Sequence[Share]) -> str:
    """`result` is what `statistics.summary` made, with the options of the run."""
    lines = [rule(" Serving Benchmark Result ", "=")]
    lines += [line(title, result[key]) for title, key in COUNTS if result.get(key) is not None]
    for metric in METRICS:
        lines.append(rule(TITLES[metric]))
        names = ["mean", "median", *(f"p{percent_name(percent)}" for percent in percents)]
        lines += [line(f"{name.capitalize()} {metric.upper()} (ms):", result[f"{name}_{metric}_ms"]) for name in names]
    lines += _cache_lines(result, percents) + _turn_lines(result.get("turns", []), percents)
    return "\n".join([*lines, *share_lines(shares), "=" * WIDTH])


def _cache_lines(result: Mapping[str, Any], percents: Sequence[float]) -> list[str]:
    """Nothing where the server does not tell of cached tokens."""
    if "cache_hit_rate" not in result:
        return []
    lines = [rule("Prefix cache"), line("Cached prompt tokens:", result["total_cached_tokens"])]
    lines += [line("Cache hit rate (% of prompt tokens):", 100 * (result["cache_hit_rate"] or 0.0))]
    names = ["mean", "median", *(f"p{percent_name(percent)}" for percent in percents)]
    for kind, said in (("cached", "half or more cached"), ("uncached", "less than half cached")):
        lines.append(line(f"Requests {said}:", result[f"{kind}_requests"]))
        times = [(name, result[f"{name}_{kind}_ttft_ms"]) for name in names]
        lines += [line(f"{name.capitalize()} TTFT of these (ms):", ms) for name, ms in times if ms is not None]
    return lines


def _turn_lines(turns: Sequence[Mapping[str, Any]], percents: Sequence[float]) -> list[str]:
    if not turns:
        return []
    last = f"p{percent_name(percents[-1])}" if percents else "mean"
    heads = ("turn", "requests", "in tok", "hit %", "TTFT p50", last)
    lines = [rule("By turn (ms)"), "".join(f"{head:>{w}}" for head, w in zip(heads, TURN_WIDTHS, strict=True))]
    for turn in turns:
        hit = "-" if turn["cache_hit_rate"] is None else f"{100 * turn['cache_hit_rate']:.1f}"
        times = f"{turn['median_ttft_ms']:.1f}", f"{turn[f'{last}_ttft_ms']:.1f}"
        cells = (turn["turn"], turn["completed"], f"{turn['mean_input_tokens']:.0f}", hit, *times)
        lines.append("".join(f"{cell:>{w}}" for cell, w in zip(cells, TURN_WIDTHS, strict=True)))
    return lines


def share_lines(shares: Sequence[Share]) -> list[str]:
    """Processor time by kind of process; nothing where the server's processes are not known."""
    if not shares:
        return []
    heads = f"{'actor':<18}{'s':>7}{'us/token':>9}{'cores':>6}{'sleeps/1k':>10}"
    actors = [_share_line(share) for share in by_actor(shares)]
    return [rule("Server CPU by actor"), heads, *actors, _share_line(total(shares))]


def _share_line(share: Share) -> str:
    figures = f"{share.seconds:>7.2f}{share.us_per_token:>9.1f}{share.cores:>6.2f}{share.sleeps_per_1000_tokens:>10.1f}"
    return f"{share.name[:17]:<18}{figures}"
