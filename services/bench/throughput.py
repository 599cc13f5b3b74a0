"""`bench throughput`: every request at once, not streamed; how many tokens a second come out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from services.bench.api import Api
from services.bench.core.outcome import Outcome, Run
from services.bench.core.processor_time import Share
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

LINES = (
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded."""
    options = batch_options("throughput", "All requests at once: tokens per second.", argv)
    return run_to_exit_code(lambda: throughput(options))


async def throughput(options: BatchOptions) -> int:
    async with session(options.target, options.ignore_eos) as api:
        writer = await make_writer(api, options.text, options.tokenizer, options.vocab_size)
        shape = options.input_len, options.output_len, 0.0
        prompts = await random_prompts(writer, options.warmup + options.num_prompts, *shape, Random(options.seed))
        await warm_up(api.whole, prompts[: options.warmup])

        async def load(done: Callable[[Outcome], None]) -> Run:
            return await all_at_once(api.whole, prompts[options.warmup :], done, options.max_concurrency)

        processes = server_processes(options.target.base_url, options.cpu, options.pids)
        run, shares = await measured(load, options.num_prompts, "requests", options.output, processes)
    result = _result(api, options, run, shares)
    lines = [rule(" Throughput Benchmark Result ", "="), *(line(title, result[key]) for title, key in LINES)]
    report(options.output, result, "\n".join([*lines, *share_lines(shares), "=" * WIDTH]))
    explain_failures(run)
    return 1 if run.failed else 0


def _result(api: Api, options: BatchOptions, run: Run, shares: Sequence[Share]) -> dict[str, Any]:
    """Under the field names of vLLM's `bench throughput`, and a few more."""
    tokens_in = sum(outcome.prompt_tokens for outcome in run.completed)
    tokens_out = sum(outcome.output_tokens for outcome in run.completed)
    elapsed = max(run.duration, 1e-9)
    return {
        **provenance(api, options.output.label),
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


if __name__ == "__main__":
    sys.exit(main())
