"""`bench serve`: requests as clients would make them, at a rate or a concurrency, streamed and timed token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from services.bench.api import Api, Prompt
from services.bench.arrivals import arrivals
from services.bench.conversations import conversation
from services.bench.core.cache_figures import cache_figures, turn_figures
from services.bench.core.outcome import Outcome, Run
from services.bench.core.processor_time import Share
from services.bench.core.statistics import summary
from services.bench.core.table import serve_table
from services.bench.datasets.choice import make_conversations, make_prompts
from services.bench.load import Load
from services.bench.serve_options import ServeOptions, serve_options
from services.bench.session import (
    explain_failures,
    measured,
    provenance,
    report,
    run_to_exit_code,
    server_processes,
    session,
    warm_up,
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded. `argv` are the flags, without a program's name."""
    options = serve_options(argv)
    return run_to_exit_code(lambda: serve(options))


async def serve(options: ServeOptions) -> int:
    async with session(options.target, options.ignore_eos) as api:
        work = await _work(options, api)
        await warm_up(api.stream, work.warm_up)
        run, shares = await _measure(options, work)
    result = _result(options, api, run, shares)
    report(options.output, result, serve_table(result, options.percentiles, shares))
    explain_failures(run)
    _compare_lengths(work.prompts, run)
    return 1 if run.failed else 0


class _Work(NamedTuple):
    """What a dataset comes to: what to ask before, and what each client does."""

    warm_up: list[Prompt]
    clients: int
    load: Callable[[Callable[[Outcome], None], Sequence[float]], Awaitable[Run]]
    """Gets what to tell each outcome, and when each client starts."""
    prompts: list[Prompt]
    """Where they are known before."""


async def _work(options: ServeOptions, api: Api) -> _Work:
    if options.dataset == "multi-turn":
        return await _multi_turn(options, api)
    made = await make_prompts(options, api)

    async def load(done: Callable[[Outcome], None], starts: Sequence[float]) -> Run:
        return await Load(api.stream, options.max_concurrency, done).run(made.measured, starts)

    return _Work(made.warm_up, len(made.measured), load, made.measured)


async def _multi_turn(options: ServeOptions, api: Api) -> _Work:
    made = await make_conversations(options, api)

    async def ask(prompt: Prompt) -> Outcome:
        return await api.stream(prompt, keep_text=True)

    async def load(done: Callable[[Outcome], None], starts: Sequence[float]) -> Run:
        sessions = [conversation(script, api.endpoint == "chat") for script in made.measured]
        return await Load(ask, options.max_concurrency, done).run_sessions(sessions, starts)

    return _Work(made.warm_up, len(made.measured), load, [])


async def _measure(options: ServeOptions, work: _Work) -> tuple[Run, list[Share]]:
    starts = arrivals(work.clients, options.request_rate, options.burstiness, Random(options.seed))
    processes = server_processes(options.target.base_url, options.cpu, options.pids)

    async def load(done: Callable[[Outcome], None]) -> Run:
        return await work.load(done, starts)

    return await measured(load, options.num_prompts, "requests", options.output, processes)


def _result(options: ServeOptions, api: Api, run: Run, shares: Sequence[Share]) -> dict[str, Any]:
    rate = options.request_rate
    result = {
        **provenance(api, options.output.label),
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else None,
        "dataset": options.dataset,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "ignore_eos": options.ignore_eos,
        "seed": options.seed,
        "goodput_objectives_ms": {metric: limit * 1000 for metric, limit in options.goodput.items()},
        **summary(run, options.percentiles, options.goodput),
        **cache_figures(run.completed, options.percentiles),
        "server_cpu": [share._asdict() for share in shares],
        "error_kinds": sorted({outcome.error for outcome in run.outcomes if outcome.error is not None}),
    }
    if options.dataset == "multi-turn":
        result["turns"] = turn_figures(run.completed, options.percentiles)
    return {**result, **_details(run)} if options.output.detailed else result


def _details(run: Run) -> dict[str, Any]:
    """Each request's figures, in the order of the requests; in seconds, as in vLLM's result."""
    outcomes = run.outcomes
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft if o.error is None else 0.0 for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
        "turn_numbers": [o.turn + 1 for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def _compare_lengths(prompts: Sequence[Prompt], run: Run) -> None:
    """Says so where the server did not count or generate what was asked for."""
    if not prompts:
        return
    pairs = [(p, o) for p, o in zip(prompts, run.outcomes, strict=True) if o.error is None]
    longer = sum(p.tokens != o.prompt_tokens for p, o in pairs)
    shorter = sum(o.output_tokens < p.output_tokens for p, o in pairs)
    if longer:
        print(f"bench: the server counted another prompt length for {longer} of {len(pairs)} requests", file=sys.stderr)
    if shorter:
        text = f"bench: {shorter} of {len(pairs)} answers ended early; --ignore-eos gives every answer its full length"
        print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
