"""The result as the table that users of vLLM's benchmark know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.core.processor_time import Share, total
from services.bench.core.statistics import METRICS, Metric, percent_name

WIDTH = 50
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
    return "\n".join([*lines, *share_lines(shares), "=" * WIDTH])


def share_lines(shares: Sequence[Share]) -> list[str]:
    """Processor time by process; nothing where the server's processes are not known."""
    if not shares:
        return []
    lines = [rule("Server CPU by process"), f"{'process':<24}{'s':>8}{'s/1k tok':>10}{'cores':>8}"]
    lines += [_share_line(share) for share in shares]
    return [*lines, _share_line(total(shares))]


def _share_line(share: Share) -> str:
    return f"{share.name[:23]:<24}{share.seconds:>8.2f}{share.per_1000_tokens:>10.3f}{share.cores:>8.2f}"
