"""The report of a simulation: the figures of `baton bench serve`, and what the fleet did for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.simulation.fleet import EngineLife
from deploy.simulation.front import SentRequest
from deploy.simulation.prompts import RequestRecord
from deploy.simulation.simulation import SimulationResult
from services.bench.report import Table, line, rule
from services.bench.serve import serve_lines
from services.bench.statistics import (
    BenchResult,
    Metric,
    RequestOutcome,
    cache_figures,
    hit_rate,
    meets,
    percentile,
    summary,
)

NEVER_ENDED = "no answer"


def outcomes(result: SimulationResult) -> list[RequestOutcome]:
    """Each request as a benchmark's client would have seen it."""
    return [_outcome(sent, result.records.get(sent.request.id)) for sent in result.sent]


def _outcome(sent: SentRequest, record: RequestRecord | None) -> RequestOutcome:
    prompt = sent.request.prompt_tokens
    if record is None or record.error is not None or not record.token_times:
        error = sent.error if record is None else record.error
        return RequestOutcome(sent.sent, sent.sent, prompt, 0, [], error or NEVER_ENDED)
    times = record.token_times.tolist()
    return RequestOutcome(sent.sent, times[-1], prompt, record.output_tokens, times, cached_tokens=record.cached_tokens)


def figures(
    result: SimulationResult, percents: Sequence[float], objectives: Mapping[Metric, float], devices: int
) -> dict[str, Any]:
    """All figures of a run, under the names of `bench serve`. `objectives`: seconds by metric; `devices`: of each
    engine."""
    requests = outcomes(result)
    run = BenchResult(requests, result.seconds, result.peak, 0.0)
    found = summary(run, percents, objectives)
    for clients_own in ("client_cpu_s", "client_cpu_us_per_token"):
        del found[clients_own]
    placed = sum(sent.request.prompt_tokens for sent in result.sent if sent.engine is not None)
    predicted = sum(sent.predicted_cached for sent in result.sent)
    hours = {engine: device_seconds(life, result.seconds) * devices / 3600 for engine, life in result.lives.items()}
    return {
        **found,
        **cache_figures(run.completed, percents),
        "predicted_cache_hit_rate": predicted / placed if placed else None,
        "slo_attainment": slo_attainment(requests, objectives),
        "engines": len(result.lives),
        "mean_engines": sum(hours.values()) * 3600 / devices / result.seconds if result.seconds else 0.0,
        "peak_engines": peak_engines(list(result.lives.values()), result.seconds),
        "gpu_hours": sum(hours.values()),
        "steps": sum(total.steps for total in result.totals),
        "by_engine": _by_engine(result, requests, percents, hours),
    }


def slo_attainment(requests: Sequence[RequestOutcome], objectives: Mapping[Metric, float]) -> dict[str, float]:
    """The share of all requests, failed ones included, that meet each objective, and `all` of them; empty without
    any."""
    if not objectives or not requests:
        return {}
    wanted: dict[str, Mapping[Metric, float]] = {metric: {metric: limit} for metric, limit in objectives.items()}
    wanted["all"] = objectives
    return {
        name: sum(each.error is None and meets(each, limits) for each in requests) / len(requests)
        for name, limits in wanted.items()
    }


def device_seconds(life: EngineLife, end: float) -> float:
    """For how long an engine had its devices, from the first request's sending to the end of the simulation."""
    return max(0.0, min(end, end if life.stopped is None else life.stopped) - max(0.0, life.started))


def peak_engines(lives: Sequence[EngineLife], end: float) -> int:
    """The most engines that had their devices at a time."""
    starts = [life.started for life in lives]
    return max((sum(_had_devices(life, at, end) for life in lives) for at in starts), default=0)


def _had_devices(life: EngineLife, at: float, end: float) -> bool:
    return life.started <= at < (end if life.stopped is None else life.stopped)


def _by_engine(
    result: SimulationResult, requests: Sequence[RequestOutcome], percents: Sequence[float], hours: Mapping[Any, float]
) -> list[dict[str, Any]]:
    by_engine: defaultdict[str | None, list[RequestOutcome]] = defaultdict(list)
    for sent, outcome in zip(result.sent, requests, strict=True):
        by_engine[sent.engine].append(outcome)
    rows = []
    for total in result.totals:
        completed = [each for each in by_engine[total.engine] if each.error is None]
        seconds = device_seconds(result.lives[total.engine], result.seconds)
        rows.append(
            {
                "engine": total.engine,
                "requests": len(by_engine[total.engine]),
                "output_tokens": sum(each.output_tokens for each in completed),
                "cache_hit_rate": hit_rate(completed),
                "median_ttft_ms": percentile([each.ttft for each in completed], 50) * 1000,
                "p99_ttft_ms": percentile([each.ttft for each in completed], 99) * 1000,
                "steps": total.steps,
                "busy": total.busy / seconds if seconds else 0.0,
                "gpu_hours": hours[total.engine],
            }
        )
    return rows


def text(result: Mapping[str, Any], percents: Sequence[float], *, by_engine: bool) -> str:
    """The table of one run. `result`: what `figures` made."""
    lines = [*serve_lines(result, percents), rule("Fleet (simulated)")]
    lines += [line("Mean engines:", result["mean_engines"]), line("Most engines at a time:", result["peak_engines"])]
    lines.append(line("GPU-hours:", result["gpu_hours"]))
    lines.append(line("Steps of all engines:", result["steps"]))
    if result["predicted_cache_hit_rate"] is not None:
        lines.append(line("Predicted hit rate (% of prompt tokens):", 100 * result["predicted_cache_hit_rate"]))
    for name, share in result["slo_attainment"].items():
        lines.append(line(f"SLO attainment, {name} (%):", 100 * share))
    if by_engine:
        lines += [rule("By engine"), *_engine_table(result["by_engine"]).lines()]
    return "\n".join([*lines, "=" * 50])


def _engine_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("engine", "requests", "out tok", "hit %", "TTFT p50 ms", "p99", "steps", "busy %", "GPU-h")
    cells = [
        (
            row["engine"],
            f"{row['requests']}",
            f"{row['output_tokens']}",
            "-" if row["cache_hit_rate"] is None else f"{100 * row['cache_hit_rate']:.1f}",
            f"{row['median_ttft_ms']:.1f}",
            f"{row['p99_ttft_ms']:.1f}",
            f"{row['steps']}",
            f"{100 * row['busy']:.1f}",
            f"{row['gpu_hours']:.2f}",
        )
        for row in rows
    ]
    return Table(heads, cells)


def comparison(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each run, by its name."""
    heads = (
        "run",
        "failed",
        "hit %",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "ITL p99",
        "good req/s",
        "SLO %",
        "engines",
        "GPU-h",
    )
    return "\n".join(Table(heads, [_comparison_row(name, each) for name, each in results.items()]).lines())


def _comparison_row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    hit, good, slo = result.get("cache_hit_rate"), result["request_goodput"], result["slo_attainment"].get("all")
    milliseconds = ("median_ttft", "p99_ttft", "median_tpot", "p99_tpot", "p99_itl")
    return (
        name,
        f"{result['failed']}",
        "-" if hit is None else f"{100 * hit:.1f}",
        *(f"{result[f'{key}_ms']:.1f}" for key in milliseconds),
        "-" if good is None else f"{good:.2f}",
        "-" if slo is None else f"{100 * slo:.1f}",
        f"{result['mean_engines']:.1f}",
        f"{result['gpu_hours']:.2f}",
    )
