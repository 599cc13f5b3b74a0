"""`bench profile`: what an engine takes for prompts by their length, and for tokens by batch size and context length.

These are the two tables by which `baton plan --profile FILE` computes how many engines a load needs, as the profiler of
NVIDIA Dynamo's SLA planner makes them. One engine of a running stack is measured, by requests over HTTP, so it may be
any that can be served: several ranks, a device elsewhere, pods. What counts is the time at the engine, since that is
what targets are and what engines report later: prefill comes from the engine's own sums, and the time between tokens
from when they arrive, in which a constant way does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from math import ceil
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from services.bench.client.api import Api, BenchRequest, first_model
from services.bench.client.http_client import HttpClient
from services.bench.datasets.writers import PromptWriter, TokenWriter, seen_vocabulary
from services.bench.errors import BenchError
from services.bench.options import checked, natural, output_group, output_options, parse, positive
from services.bench.report import Report, Table, machine_line
from services.bench.stack_bus import StackProcesses, bus_arguments, stack_bus
from services.bench.statistics import RequestOutcome
from shared.bus import Bus
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import EngineReport, LatencySums, Lifecycle, WorkerReport
from shared.models.profile_file import DecodePoint, MeasuredEngine, PrefillPoint, ProfileFile

KNOWN_AFTER = 2.5
"""Seconds of listening after which every process has said something."""
REPORT_TIMEOUT = 30.0
"""Seconds in which an engine must report a request that it has answered."""
ASK_EVERY = 0.5
MIN_TOKENS = 8
"""Of each sequence while all decode, for a mean."""
LONGER = 4
"""How often longer answers are asked for where not all sequences decoded together for so long."""
ROOM = 0.9
"""Share of the KV memory that a measurement may fill: what else is cached there shall not be in its way."""
ATTEMPTS = 3
"""For each repetition: others, such as the engine's own canaries, may come between."""
CONTEXTS = (128, 512, 2048, 8192)
PROMPTS = (16, 128, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 16, 32, 64, 128, 256)


class EngineView(NamedTuple):
    """The engine that is measured, as it reports itself."""

    instance: InstanceId
    engine: EngineReport
    worker: WorkerReport

    @property
    def kv_tokens(self) -> int:
        """That its KV memory holds."""
        return self.engine.blocks_total * self.engine.model.block_size

    @property
    def measured(self) -> MeasuredEngine:
        """As it stands in the file. Raises BenchError where the worker does not say how long its steps are."""
        if self.worker.max_batch_tokens is None:
            raise BenchError(f"{self.instance}: its worker is of a release that does not say how long its steps are")
        return MeasuredEngine(
            model=self.engine.model.name,
            device=self.worker.device,
            gpus=self.worker.world_size,
            block_size=self.engine.model.block_size,
            max_num_seqs=self.engine.max_running,
            max_batch_tokens=self.worker.max_batch_tokens,
            kv_tokens=self.kv_tokens,
        )


def profile_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser(
        "baton bench profile",
        description="What an engine takes for prompts by their length, and for tokens by batch size and context: "
        "the file for baton plan --profile. The stack must have one engine that serves, and nothing else to do.",
    )
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument("--model", help="as the server names it; default: the first that it offers")
    made.add_argument("--api-key", help="sent as bearer token")
    bus_arguments(made)
    lengths = checked(_ascending, lambda values: len(values) >= 2 and values[0] >= 1, "two or more rising numbers")
    grid = made.add_argument_group("what is measured", "By default as much of it as the engine holds, and its limits.")
    grid.add_argument("--prompt-lengths", type=lengths, help=f"tokens; default: of {_listed(PROMPTS)}")
    grid.add_argument("--batch-sizes", type=lengths, help=f"sequences; default: of {_listed(BATCHES)}")
    grid.add_argument("--context-lengths", type=lengths, help=f"tokens of each; default: of {_listed(CONTEXTS)}")
    grid.add_argument("--output-len", type=natural, default=64, help="tokens of a sequence; default: %(default)s")
    grid.add_argument("--repetitions", type=natural, default=3, help="of each point; the median counts")
    made.add_argument("--vocab-size", type=natural, help="draw token ids below this; default: ask the server")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout", type=positive, default=600.0, help="seconds a request may take")
    output_group(made)
    return parse(made, argv)


def _ascending(text: str) -> tuple[int, ...]:
    values = tuple(int(each) for each in text.split(","))
    if list(values) != sorted(set(values)):
        raise ValueError(text)
    return values


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


async def main(argv: Sequence[str]) -> int:
    """The exit code. Raises BenchError where nothing can be measured."""
    options = profile_options(argv)
    logging.getLogger("shared").addHandler(logging.NullHandler())  # what fails is raised
    report = Report(output_options(options))
    async with _profiler(options) as profiler:
        view = profiler.engine()
        grid = grid_of(view, options)
        report.show(f"{view.instance}, {view.worker.device}, {view.engine.model.name} on {machine_line()}\n")
        prefill: list[PrefillPoint] = []
        decode: list[DecodePoint] = []
        report.show("\n".join(prefill_table(prefill).lines()))
        for tokens in grid.prompts:
            seconds = await profiler.prefill(tokens, options.repetitions)
            prefill.append(PrefillPoint(prompt_tokens=tokens, seconds=seconds))
            report.show(prefill_table(prefill).lines()[-1])
        for batch, context in grid.decode:
            seconds = await profiler.itl(batch, context, options.output_len, options.repetitions)
            decode.append(DecodePoint(batch_size=batch, context_tokens=context, itl_seconds=seconds))
    try:
        file = ProfileFile(engine=view.measured, prefill=tuple(prefill), decode=tuple(decode))
    except ValueError as error:
        raise BenchError(str(error)) from None
    report.end(msgspec.to_builtins(file), "\n".join(["", *decode_table(decode).lines()]))
    return 0


# ---- what is measured


class Grid(NamedTuple):
    """The points of a profile."""

    prompts: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    """Batch size and context length."""


def grid_of(view: EngineView, options: argparse.Namespace) -> Grid:
    """What was asked for, and otherwise what the engine holds. Raises BenchError for points that it does not hold."""
    longest = view.engine.model.max_model_len
    widest, memory = view.engine.max_running, int(ROOM * view.kv_tokens)
    prompts = _chosen("--prompt-lengths", options.prompt_lengths, PROMPTS, min(longest - 1, memory))
    # A measurement lies in the middle of a sequence's output; what repeats it for longer lies behind.
    half = options.output_len // 2
    room = min(longest, memory) - options.output_len
    contexts = _chosen("--context-lengths", options.context_lengths, CONTEXTS, room + half, least=half + 1)
    batches = _chosen("--batch-sizes", options.batch_sizes, BATCHES, widest)
    cells = tuple(
        (batch, context)
        for batch in batches
        for context in contexts
        if batch * (context - half + options.output_len) <= memory
    )
    if sum(context == contexts[1] for _, context in cells) < 2:
        raise BenchError(
            f"the engine's KV memory, {view.kv_tokens:,} tokens, does not hold batches of {batches[:2]} sequences with "
            f"contexts of {contexts[:2]} tokens: give smaller --batch-sizes and --context-lengths"
        )
    return Grid(prompts, cells)


def _chosen(
    flag: str, asked: tuple[int, ...] | None, usual: Sequence[int], most: int, least: int = 1
) -> tuple[int, ...]:
    """Those asked for; else the usual ones that are possible, and the bound where that is nearer than the last."""
    if asked is None:
        within = tuple(each for each in usual if least <= each < most)
        found = (*within, most) if most <= usual[-1] else (*within, usual[-1]) if usual[-1] not in within else within
        if len(found) >= 2 and found[0] >= least:
            return found
        raise BenchError(f"{flag}: of {_listed(usual)} the engine holds {_listed(found)}: two are needed; give others")
    if asked[0] < least or asked[-1] > most:
        raise BenchError(f"{flag} {_listed(asked)}: from {least} to {most} is possible on this engine")
    return asked


# ---- measuring


def serving_engine(lives: Sequence[Lifecycle]) -> EngineView:
    """The only engine that takes requests, by what the stack's processes say. Raises BenchError where there are others,
    or it has something to do."""
    serving = [
        (life.instance, life.engine)
        for life in lives
        if life.service == "scheduler" and life.phase == "ready" and not life.standby and life.engine is not None
    ]
    if len(serving) != 1:
        names = ", ".join(sorted(name for name, _ in serving)) or "none"
        raise BenchError(f"one engine must serve, so that all requests go there; there is {names} (baton drain)")
    ((name, engine),) = serving
    if engine.role == "prefill":
        raise BenchError(f"{name} only computes prompts; profile a plain engine of the same kind")
    if engine.running or engine.waiting:
        raise BenchError(f"{name} has {engine.running + engine.waiting} requests: profile an idle engine")
    for life in lives:
        if life.worker is not None and life.worker.engine == EngineId(name) and life.worker.rank == 0:
            return EngineView(name, engine, life.worker)
    raise BenchError(f"{name}: its worker is not heard")


class EngineProfiler:
    """Owns the prompts that were made for the engine, and what was heard of the stack."""

    def __init__(self, bus: Bus, api: Api, writer: PromptWriter, random: Random) -> None:
        self._bus, self._api, self._writer, self._random = bus, api, writer, random
        self._processes = StackProcesses(bus)
        self._chosen: InstanceId | None = None
        self._prompts: dict[int, list[Any]] = {}
        """Of the decode measurements, by length: the same ones again and again, so that a prefix cache holds them."""

    async def listen(self) -> None:
        """Returns once every process has said something."""
        await self._processes.listen(KNOWN_AFTER)

    def engine(self) -> EngineView:
        """The one to measure. Raises BenchError as `serving_engine`."""
        view = serving_engine(list(self._processes.lives.values()))
        self._chosen = view.instance
        return view

    async def prefill(self, tokens: int, repetitions: int) -> float:
        """Seconds at the engine until the first token of prompts of so many tokens, none of which are cached. Raises
        BenchError."""
        found: list[float] = []
        before = await self._sums(0)
        for _ in range(ATTEMPTS * repetitions):
            await self._prefilled([BenchRequest(await self._writer.prompt(tokens, self._random), tokens, 1)])
            after = await self._sums(before.first_tokens + 1)
            if after.first_tokens == before.first_tokens + 1:
                found.append(after.first_token_seconds - before.first_token_seconds)
            before = after
            if len(found) == repetitions:
                return median(found)
        raise BenchError(f"{self._chosen} serves other requests, too: profile an idle engine")

    async def itl(self, batch: int, context: int, output: int, repetitions: int) -> float:
        """Seconds from token to token of each of so many sequences that decode together. Raises BenchError."""
        prompts = await self._cached_prompts(batch, context - output // 2)
        found: list[float] = []
        for longer in range(LONGER):
            tokens = output << longer
            while len(found) < repetitions:
                requests = [BenchRequest(body, None, tokens) for body in prompts]
                seconds = shared_itl(await self._decoded(requests))
                if seconds is None:
                    break
                found.append(seconds)
            else:
                return median(found)
        raise BenchError(
            f"{batch} sequences of {context} tokens did not decode together: a longer --output-len is needed"
        )

    async def _cached_prompts(self, count: int, tokens: int) -> list[Any]:
        """The first are those of smaller batches. Each is computed once, if there is a cache that keeps it."""
        known = self._prompts.setdefault(tokens, [])
        new = [await self._writer.prompt(tokens, self._random) for _ in range(count - len(known))]
        known += new
        await self._prefilled([BenchRequest(body, tokens, 1) for body in new])
        return known[:count]

    async def _prefilled(self, requests: Sequence[BenchRequest]) -> None:
        """Raises BenchError where one is not. Not streamed: the one token may be no text yet."""
        _raise_failures(await asyncio.gather(*(self._api.whole(each) for each in requests)))

    async def _decoded(self, requests: Sequence[BenchRequest]) -> list[RequestOutcome]:
        """Raises BenchError where one is not."""
        outcomes = await asyncio.gather(*(self._api.stream(each) for each in requests))
        _raise_failures(outcomes)
        return outcomes

    async def _sums(self, first_tokens: int) -> LatencySums:
        """The engine's, once it has counted so many first tokens. Raises BenchError."""
        for _ in range(ceil(REPORT_TIMEOUT / ASK_EVERY)):
            self._processes.news.clear()
            await self._processes.ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY):
                    while True:
                        await self._processes.news.wait()
                        self._processes.news.clear()
                        if (sums := self._reported()).first_tokens >= first_tokens:
                            return sums
        raise BenchError(f"{self._chosen} does not report what it has answered; is --nats-url this stack's?")

    def _reported(self) -> LatencySums:
        life = None if self._chosen is None else self._processes.lives.get(self._chosen)
        if life is None or life.engine is None:
            raise BenchError(f"{self._chosen} is gone")
        return life.engine.latency or LatencySums()


def _raise_failures(outcomes: Sequence[RequestOutcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchError(outcome.error)


def shared_itl(outcomes: Sequence[RequestOutcome]) -> float | None:
    """Mean seconds from token to token while all of these were being decoded; None where that was for too few
    tokens."""
    begin = max(outcome.token_times[0] for outcome in outcomes)
    end = min(outcome.token_times[-1] for outcome in outcomes)
    means = []
    for outcome in outcomes:
        within = [time for time in outcome.token_times if begin <= time <= end]
        if len(within) <= MIN_TOKENS:
            return None
        per_frame = outcome.output_tokens / len(outcome.token_times)  # more than one where drafts are accepted
        means.append((within[-1] - within[0]) / (len(within) - 1) / per_frame)
    return fmean(means)


@contextlib.asynccontextmanager
async def _profiler(options: argparse.Namespace) -> AsyncIterator[EngineProfiler]:
    client = HttpClient(options.base_url, options.api_key)
    async with stack_bus(options) as bus:
        try:
            model = options.model or await first_model(client)
            api = Api(client, model, "completions", ignore_eos=True, timeout=options.timeout)
            known = range(options.vocab_size) if options.vocab_size else await seen_vocabulary(api.tokenize)
            profiler = EngineProfiler(bus, api, TokenWriter(known), Random(options.seed))
            await profiler.listen()
            yield profiler
        finally:
            client.close()


# ---- showing


def prefill_table(points: Sequence[PrefillPoint]) -> Table:
    """A row for each length."""
    rows = [
        (f"{point.prompt_tokens:,}", f"{point.seconds * 1e3:,.1f}", f"{point.prompt_tokens / point.seconds:,.0f}")
        for point in points
    ]
    return Table(("prompt tokens", "prefill ms", "tokens/s"), rows)


def decode_table(points: Sequence[DecodePoint]) -> Table:
    """Milliseconds: a row for each batch size, a column for each context."""
    measured = {(point.batch_size, point.context_tokens): point.itl_seconds for point in points}
    contexts = sorted({point.context_tokens for point in points})
    rows = [
        (
            f"{batch:,}",
            *(f"{measured[batch, each] * 1e3:,.2f}" if (batch, each) in measured else "-" for each in contexts),
        )
        for batch in sorted({point.batch_size for point in points})
    ]
    return Table(("ITL ms; batch size", *(f"{each:,} tokens" for each in contexts)), rows)
