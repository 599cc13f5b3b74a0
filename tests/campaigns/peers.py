"""`baton bench peers`: the whole ring and transformers' own continuous batching under one load, one after the other.

Both get the same prompts at the same times, with the same maximum concurrency, and no answer ends early. Greedy tokens
of some prompts are compared, too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from deploy.errors import CommandError
from deploy.model_choice import model_folder
from deploy.supervisor.background import stack_for_the_run
from deploy.supervisor.state_file import StackState
from services.bench.client.api import Api, BenchRequest
from services.bench.client.load import LoadGenerator, arrivals
from services.bench.errors import BenchError
from services.bench.options import ServeOptions
from services.bench.report import Report
from services.bench.serve import make_work
from services.bench.session import session, warm_up
from services.bench.statistics import BenchResult, RequestOutcome
from tests.campaigns.idle_watch import IdleWatch, idle_watch
from tests.campaigns.peers_options import PeersOptions, peers_options
from tests.campaigns.peers_report import described, shown
from tests.campaigns.transformers_peer.wire import PeerReady, PeerSettings
from tests.campaigns.transformers_process import Peer, peer

Send = Callable[[BenchRequest], Awaitable[RequestOutcome]]


class LoadFigures(NamedTuple):
    """One load on one of the two."""

    options: ServeOptions
    run: BenchResult
    idle: dict[str, float | None]
    """Shares of the workers' time; empty where they are not known."""


class Side(NamedTuple):
    """All that was measured of one of the two."""

    loads: list[LoadFigures]
    greedy: list[list[int]]
    ready: PeerReady | None = None
    """Of transformers: the settings that it chose."""


class Asked(NamedTuple):
    """What both get."""

    warm_up: list[list[BenchRequest]]
    measured: list[list[BenchRequest]]
    compared: list[BenchRequest]


def run_peers(argv: Sequence[str], up: str | None) -> None:
    """Raises CommandError; SystemExit for invalid flags, or 1 where a request failed."""
    options = peers_options(argv, up)
    report = Report(options.output)
    try:
        with tempfile.TemporaryDirectory(prefix="baton-peers-") as folder:
            model = model_folder(options.model, options.load_format, Path(folder))
            with stack_for_the_run(_up(options), options.logs) as state:
                asked, ours = asyncio.run(_ours(options, state))
            report.keep(described(options, ours, None))  # so that it is not lost where transformers fails
            theirs = asyncio.run(_theirs(report, options, model, asked, ours)) if options.with_peer else None
    except (BenchError, ValueError) as error:
        raise CommandError(str(error)) from None
    _report(report, options, ours, theirs)
    if any(load.run.failed for side in (ours, theirs) if side is not None for load in side.loads):
        raise SystemExit(1)


def _up(options: PeersOptions) -> list[str]:
    given = {"model": options.model, "load-format": options.load_format, "device": options.device}
    given |= {"dtype": options.dtype, "served-model-name": "peer"}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    threads = [] if options.threads is None else ["--set", f"worker.threads={options.threads}"]
    return [*flags, *threads, *options.up]


async def _ours(options: PeersOptions, state: StackState) -> tuple[Asked, Side]:
    target = options.loads[0].target._replace(base_url=state.url, model=state.model, api_key=state.api_key)
    async with session(replace(options.loads[0], target=target, ignore_eos=True)) as api, idle_watch(state) as watch:
        asked = await _asked(options, api)
        greedy = list(await asyncio.gather(*(_greedy(api, prompt) for prompt in asked.compared)))
        loads = [load async for load in _loads(options, asked, api.stream, watch)]
    return asked, Side(loads, greedy)


async def _theirs(report: Report, options: PeersOptions, model: Path, asked: Asked, ours: Side) -> Side:
    """Written after every load: none of it is lost where the next one takes too long."""
    async with peer(_question(options, model, asked), options.loads[0].target.timeout) as other:
        found = Side([], await _compared(other, asked.compared), other.ready)
        async for load in _loads(options, asked, other.ask, None):
            found.loads.append(load)
            report.keep(described(options, ours, found))
        return found


async def _compared(other: Peer, prompts: Sequence[BenchRequest]) -> list[list[int]]:
    answers = await asyncio.gather(*(other.answer(prompt) for prompt in prompts))
    wrong = next((answer.error for answer in answers if answer.error is not None), None)
    if wrong is not None:
        raise CommandError(wrong)
    return [answer.tokens for answer in answers]


def _question(options: PeersOptions, model: Path, asked: Asked) -> PeerSettings:
    prompts = [prompt for part in (*asked.warm_up, *asked.measured, asked.compared) for prompt in part]
    most = max(load.max_concurrency or load.num_prompts for load in options.loads)
    return PeerSettings(
        folder=str(model),
        load_format="dummy" if options.load_format == "dummy" else "auto",
        device=options.device,  # type: ignore[arg-type]  # of the same choices
        dtype=options.dtype,  # type: ignore[arg-type]
        attention=options.attention,
        threads=options.threads,
        prompt_tokens=max(len(prompt.body) for prompt in prompts),
        output_tokens=max(prompt.output_tokens for prompt in prompts),
        requests=max(most, options.compared),
        settings=options.settings,
    )


async def _asked(options: PeersOptions, api: Api) -> Asked:
    made = [await make_work(load, api) for load in options.loads]
    first = options.loads[0]
    others = replace(first, num_prompts=max(1, options.compared), seed=first.seed + len(options.loads), warmup=0)
    compared = (await make_work(others, api)).measured[: options.compared]
    return Asked([each.warm_up for each in made], [each.measured for each in made], compared)


async def _greedy(api: Api, prompt: BenchRequest) -> list[int]:
    body = {"model": api.model, "prompt": prompt.body, "max_tokens": prompt.output_tokens, "temperature": 0.0}
    question = msgspec.json.encode(body | {"ignore_eos": True, "return_token_ids": True})
    response = await api.client.call("POST", "/v1/completions", question, timeout=600.0)
    if response.status != 200:
        raise CommandError(f"HTTP {response.status}: {response.body[:300].decode(errors='replace')}")
    tokens: list[int] = msgspec.json.decode(response.body)["choices"][0]["token_ids"]
    return tokens


async def _loads(
    options: PeersOptions, asked: Asked, send: Send, watch: IdleWatch | None
) -> AsyncIterator[LoadFigures]:
    for load, before, prompts in zip(options.loads, asked.warm_up, asked.measured, strict=True):
        await warm_up(send, before)
        starts = arrivals(len(prompts), load.request_rate, load.burstiness, Random(load.seed))
        if watch is not None:
            await watch.begin()
        run = await LoadGenerator(send, load.max_concurrency, lambda outcome: None).run(prompts, starts)
        yield LoadFigures(load, run, {} if watch is None else await watch.end())


def _report(report: Report, options: PeersOptions, ours: Side, theirs: Side | None) -> None:
    result = described(options, ours, theirs)
    report.end(result, shown(result))
    for name, side in (("baton", ours), ("transformers", theirs)):
        runs = [] if side is None else [load.run for load in side.loads]
        for error in sorted({str(each.error) for run in runs for each in run.failed}):
            print(f"failed ({name}): {error}", file=sys.stderr)
