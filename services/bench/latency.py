"""`bench latency`: how long one batch of equal requests takes, again and again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from services.bench.api import Api, Prompt
from services.bench.core.outcome import Outcome, Run
from services.bench.core.statistics import mean, percent_name, percentile
from services.bench.core.table import WIDTH, line, rule, share_lines
from services.bench.datasets.choice import make_writer
from services.bench.datasets.random_lengths import random_prompts
from services.bench.options import BatchOptions, batch_options
from services.bench.session import (
    all_at_once,
    explain_failures,
    measured,
    provenance,
    report,
    run_to_exit_code,
    server_processes,
    session,
    warm_up,
)

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded."""
    options = batch_options("latency", "Time of one batch of equal requests, repeated.", argv)
    return run_to_exit_code(lambda: latency(options))


async def latency(options: BatchOptions) -> int:
    async with session(options.target, options.ignore_eos) as api:
        batches = await _batches(options, api)
        for batch in batches[: options.warmup]:
            await warm_up(api.whole, batch)
        durations: list[float] = []

        async def load(done: Callable[[Outcome], None]) -> Run:
            runs = []
            for batch in batches[options.warmup :]:
                runs.append(await all_at_once(api.whole, batch, done, None))
                durations.append(runs[-1].duration)
            return _joined(runs)

        processes = server_processes(options.target.base_url, options.cpu, options.pids)
        total = options.iterations * options.batch_size
        run, shares = await measured(load, total, "requests", options.output, processes)
    result = {
        **provenance(api, options.output.label),
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "avg_latency": mean(durations),
        "latencies": durations,
        "percentiles": {percent_name(percent): percentile(durations, percent) for percent in PERCENTS},
        "failed": len(run.failed),
        "client_cpu_s": run.client_cpu,
        "server_cpu": [share._asdict() for share in shares],
    }
    report(options.output, result, "\n".join([*_lines(result), *share_lines(shares), "=" * WIDTH]))
    explain_failures(run)
    return 1 if run.failed else 0


async def _batches(options: BatchOptions, api: Api) -> list[list[Prompt]]:
    """New prompts for every iteration: repeated ones would be found cached."""
    random, size = Random(options.seed), options.batch_size
    writer = await make_writer(api, options.text, options.tokenizer, options.vocab_size)
    count = size * (options.warmup + options.iterations)
    prompts = await random_prompts(writer, count, options.input_len, options.output_len, 0.0, random)
    return [prompts[start : start + size] for start in range(0, count, size)]


def _joined(runs: Sequence[Run]) -> Run:
    return Run(
        [outcome for run in runs for outcome in run.outcomes],
        sum(run.duration for run in runs),
        max(run.peak_concurrency for run in runs),
        sum(run.client_cpu for run in runs),
    )


def _lines(result: dict[str, Any]) -> list[str]:
    shape = f"batch of {result['batch_size']}, {result['input_len']} tokens in, {result['output_len']} out"
    return [
        rule(" Latency Benchmark Result ", "="),
        line("Shape:", shape),
        line("Iterations:", len(result["latencies"])),
        line("Failed requests:", result["failed"]),
        line("Avg latency (s):", f"{result['avg_latency']:.4f}"),
        *(line(f"P{name} latency (s):", f"{value:.4f}") for name, value in result["percentiles"].items()),
        line("Client CPU (s):", result["client_cpu_s"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
