"""`bench latency`: how long one batch of equal requests takes, repeatedly; `bench throughput`: every request at
once, and how many tokens a second come out. Answers come in one piece, not streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from services.bench.client.api import Api, BenchRequest
from services.bench.client.processor_time import CpuShare
from services.bench.datasets.single_turn import random_prompts
from services.bench.options import BatchOptions, batch_options
from services.bench.report import line, rule
from services.bench.session import all_at_once, finish, measured, of_the_server, prompt_writer, session, warm_up
from services.bench.statistics import BenchResult, RequestOutcome, mean, percent_name, percentile

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
THROUGHPUT_LINES = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Elapsed time (s):", "elapsed_time"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "requests_per_second"),
    ("Total token throughput (tok/s):", "tokens_per_second"),
    ("Output token throughput (tok/s):", "output_tokens_per_second"),
    ("Client CPU (s):", "client_cpu_s"),
)


async def latency(argv: Sequence[str]) -> int:
    """The exit code: 0 where every request succeeded. Raises BenchError where the server is not there."""
    options = batch_options("latency", "Time of one batch of equal requests, repeated.", argv)
    async with session(options) as api:
        batches = await _batches(options, api)
        for batch in batches[: options.warmup]:
            await warm_up(api.whole, batch)
        durations: list[float] = []

        async def load(done: Callable[[RequestOutcome], None]) -> BenchResult:
            runs = []
            for batch in batches[options.warmup :]:
                runs.append(await all_at_once(api.whole, batch, done, None))
                durations.append(runs[-1].duration)
            return _joined(runs)

        total = options.iterations * options.batch_size
        run, shares = await measured(load, total, "requests", options)
    result = {
        **of_the_server(api),
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
    return finish(options, result, _latency_lines(result), run, shares)


async def _batches(options: BatchOptions, api: Api) -> list[list[BenchRequest]]:
    """New prompts for every iteration: repeated ones would be found cached."""
    random, size = Random(options.seed), options.batch_size
    writer = await prompt_writer(options, api)
    count = size * (options.warmup + options.iterations)
    prompts = await random_prompts(writer, count, options.input_len, options.output_len, 0.0, random)
    return [prompts[start : start + size] for start in range(0, count, size)]


def _joined(runs: Sequence[BenchResult]) -> BenchResult:
    return BenchResult(
        [outcome for run in runs for outcome in run.outcomes],
        sum(run.duration for run in runs),
        max(run.peak_concurrency for run in runs),
        sum(run.client_cpu for run in runs),
    )


def _latency_lines(result: dict[str, Any]) -> list[str]:
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


async def throughput(argv: Sequence[str]) -> int:
    """The exit code: 0 where every request succeeded. Raises BenchError where the server is not there."""
    options = batch_options("throughput", "All requests at once: tokens per second.", argv)
    async with session(options) as api:
        writer = await prompt_writer(options, api)
        shape = options.input_len, options.output_len, 0.0
        prompts = await random_prompts(writer, options.warmup + options.num_prompts, *shape, Random(options.seed))
        await warm_up(api.whole, prompts[: options.warmup])

        async def load(done: Callable[[RequestOutcome], None]) -> BenchResult:
            return await all_at_once(api.whole, prompts[options.warmup :], done, options.max_concurrency)

        run, shares = await measured(load, options.num_prompts, "requests", options)
    result = _throughput_result(api, options, run, shares)
    lines = [rule(" Throughput Benchmark Result ", "="), *(line(title, result[key]) for title, key in THROUGHPUT_LINES)]
    return finish(options, result, lines, run, shares)


def _throughput_result(api: Api, options: BatchOptions, run: BenchResult, shares: Sequence[CpuShare]) -> dict[str, Any]:
    """Under the field names of vLLM's `bench throughput`, and a few more."""
    tokens_in = sum(outcome.prompt_tokens for outcome in run.completed)
    tokens_out = sum(outcome.output_tokens for outcome in run.completed)
    elapsed = max(run.duration, 1e-9)
    return {
        **of_the_server(api),
        "elapsed_time": run.duration,
        "num_requests": options.num_prompts,
        "completed": len(run.completed),
        "failed": len(run.failed),
        "total_num_tokens": tokens_in + tokens_out,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "requests_per_second": len(run.completed) / elapsed,
        "tokens_per_second": (tokens_in + tokens_out) / elapsed,
        "output_tokens_per_second": tokens_out / elapsed,
        "client_cpu_s": run.client_cpu,
        "server_cpu": [share._asdict() for share in shares],
    }
