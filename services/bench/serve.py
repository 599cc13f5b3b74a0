"""`bench serve`: requests as clients would make them, at a rate or a concurrency, streamed and timed token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from services.bench.client.api import Api, BenchRequest
from services.bench.client.load import LoadGenerator, arrivals
from services.bench.client.processor_time import CpuShare
from services.bench.datasets.multi_turn import ConversationScript, conversation, scripts
from services.bench.datasets.single_turn import (
    random_prompts,
    read_conversations,
    shared_prefix_prompts,
    sharegpt_prompts,
)
from services.bench.datasets.writers import LocalTokenizer, PromptWriter, TextWriter
from services.bench.options import ServeOptions, serve_options
from services.bench.report import Table, line, rule
from services.bench.session import Load, finish, measured, of_the_server, prompt_writer, session, warm_up
from services.bench.statistics import (
    METRICS,
    BenchResult,
    Metric,
    RequestOutcome,
    cache_figures,
    is_cached,
    percent_name,
    spread_names,
    summary,
    turn_figures,
)

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


async def main(argv: Sequence[str]) -> int:
    """The exit code: 0 where every request succeeded. Raises BenchError where the server is not there or the warm-up
    fails."""
    options = serve_options(argv)
    async with session(options) as api:
        work = await make_work(options, api)
        await warm_up(api.stream, work.warm_up)
        run, shares = await measured(_load(options, api, work), options.num_prompts, "requests", options)
    result = _result(options, api, run, shares)
    status = finish(options, result, serve_lines(result, options.percentiles), run, shares)
    _compare_lengths(work.measured, run)
    if options.dataset == "random" and (warning := found_cached(run.completed)):
        print(warning, file=sys.stderr)
    return status


class Work(NamedTuple):
    """The load of a dataset: requests to warm up with, and what each client asks."""

    warm_up: list[BenchRequest]
    """Others than the measured ones, so that these do not find themselves cached."""
    measured: list[BenchRequest]
    """Where they are known before."""
    conversations: Sequence[ConversationScript] = ()
    """Where the prompts depend on the answers."""


def _load(options: ServeOptions, api: Api, work: Work) -> Load:
    clients = len(work.conversations) or len(work.measured)
    starts = arrivals(clients, options.request_rate, options.burstiness, Random(options.seed))

    async def load(done: Callable[[RequestOutcome], None]) -> BenchResult:
        send = partial(api.stream, keep_text=bool(work.conversations))
        generator = LoadGenerator(send, options.max_concurrency, done)
        if not work.conversations:
            return await generator.run(work.measured, starts)
        sessions = [conversation(script, api.endpoint == "chat") for script in work.conversations]
        return await generator.run_sessions(sessions, starts)

    return load


def _result(options: ServeOptions, api: Api, run: BenchResult, shares: Sequence[CpuShare]) -> dict[str, Any]:
    rate = options.request_rate
    result = {
        **of_the_server(api),
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else None,
        "dataset": options.dataset,
        "output_len_distribution": options.output_distribution and str(options.output_distribution),
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


def _details(run: BenchResult) -> dict[str, Any]:
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


def _compare_lengths(prompts: Sequence[BenchRequest], run: BenchResult) -> None:
    """Warns if the server did not count or generate the requested number of tokens."""
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


def found_cached(completed: Sequence[RequestOutcome]) -> str | None:
    """A warning where random prompts, of which no two are alike, were in the server's prefix cache: the figures are
    of a server that has not computed them."""
    if not (cached := sum(map(is_cached, completed))):
        return None
    return (
        f"bench: half or more of the prompt was cached for {cached} of {len(completed)} requests, as behind another "
        "run with the same --seed; another --seed draws other prompts"
    )


def serve_lines(result: Mapping[str, Any], percents: Sequence[float]) -> list[str]:
    """The table's lines. `result` is what `statistics.summary` made, with the options of the run."""
    lines = [rule(" Serving Benchmark Result ", "=")]
    lines += [line(title, result[key]) for title, key in COUNTS if result.get(key) is not None]
    for metric in METRICS:
        lines.append(rule(TITLES[metric]))
        for name in spread_names(percents):
            lines.append(line(f"{name.capitalize()} {metric.upper()} (ms):", result[f"{name}_{metric}_ms"]))
    return lines + _cache_lines(result, percents) + _turn_lines(result.get("turns", []), percents)


def _cache_lines(result: Mapping[str, Any], percents: Sequence[float]) -> list[str]:
    """Nothing where the server does not tell of cached tokens."""
    if "cache_hit_rate" not in result:
        return []
    lines = [rule("Prefix cache"), line("Cached prompt tokens:", result["total_cached_tokens"])]
    lines += [line("Cache hit rate (% of prompt tokens):", 100 * (result["cache_hit_rate"] or 0.0))]
    for kind, said in (("cached", "half or more cached"), ("uncached", "less than half cached")):
        lines.append(line(f"Requests {said}:", result[f"{kind}_requests"]))
        times = [(name, result[f"{name}_{kind}_ttft_ms"]) for name in spread_names(percents)]
        lines += [line(f"{name.capitalize()} TTFT of these (ms):", ms) for name, ms in times if ms is not None]
    return lines


def _turn_lines(turns: Sequence[Mapping[str, Any]], percents: Sequence[float]) -> list[str]:
    if not turns:
        return []
    last = f"p{percent_name(percents[-1])}" if percents else "mean"
    rows = []
    for turn in turns:
        hit = "-" if turn["cache_hit_rate"] is None else f"{100 * turn['cache_hit_rate']:.1f}"
        times = f"{turn['median_ttft_ms']:.1f}", f"{turn[f'{last}_ttft_ms']:.1f}"
        rows.append((f"{turn['turn']}", f"{turn['completed']}", f"{turn['mean_input_tokens']:.0f}", hit, *times))
    heads = ("turn", "requests", "in tok", "hit %", "TTFT p50", last)
    return [rule("By turn (ms)"), *Table(heads, rows, names=0).lines()]


async def make_work(options: ServeOptions, api: Api) -> Work:
    """The requests of one run; the same for the same options and tokenizer. Raises BenchError."""
    random = Random(options.seed)
    if options.dataset == "multi-turn":
        return await _multi_turn(options, api, random)
    if options.dataset == "sharegpt":
        return await _sharegpt(options, api, random)
    writer = await prompt_writer(options, api)
    if options.dataset == "shared-prefix":
        return await _shared_prefix(options, writer, random)
    warm_up = await random_prompts(writer, options.warmup, options.input_len, options.output_len, 0.0, random)
    measured = await random_prompts(
        writer,
        options.num_prompts,
        options.input_len,
        options.output_distribution or options.output_len,
        options.range_ratio,
        random,
    )
    return Work(warm_up, measured)


async def _sharegpt(options: ServeOptions, api: Api, random: Random) -> Work:
    assert options.dataset_path is not None
    count = LocalTokenizer(options.tokenizer).count if options.tokenizer else api.count
    prompts = await sharegpt_prompts(
        read_conversations(options.dataset_path),
        count,
        options.warmup + options.num_prompts,
        api.endpoint == "chat",
        options.sharegpt_output_len,
        random,
    )
    return Work(prompts[: options.warmup], prompts[options.warmup :])


async def _shared_prefix(options: ServeOptions, writer: PromptWriter, random: Random) -> Work:
    other = options.prefixes._replace(prefixes=1)
    return Work(
        await shared_prefix_prompts(writer, other, options.warmup, random),
        await shared_prefix_prompts(writer, options.prefixes, options.num_prompts, random),
    )


async def _multi_turn(options: ServeOptions, api: Api, random: Random) -> Work:
    """What users say in the conversations of one run."""
    writer = await prompt_writer(options, api)
    assert isinstance(writer, TextWriter), "its answers are text, so all of it is"
    others = await scripts(writer, options.turns._replace(turns=1), options.warmup, random)
    measured = await scripts(writer, options.turns, options.num_conversations, random)
    return Work([script.prompt([], api.endpoint == "chat") for script in others], [], measured)
