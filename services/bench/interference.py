"""`bench interference`: how steady streams fare while long prompts arrive. Knows nothing of the server but its URL."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from services.bench.client.api import Api, BenchRequest
from services.bench.client.load import LoadGenerator, arrivals
from services.bench.client.processor_time import CpuShare
from services.bench.datasets.single_turn import random_prompts
from services.bench.errors import BenchError
from services.bench.interference_figures import Window, all_streaming_at, interference_figures
from services.bench.options import LoadOptions, load_options, natural, parse, parser, percent_list, positive, whole
from services.bench.report import INCHES, blank_figure, check_plot, line, rule, save
from services.bench.session import finish, measured, of_the_server, prompt_writer, session, warm_up
from services.bench.statistics import BenchResult, RequestOutcome, spread, spread_names
from shared.packing import NOT_DECODED

PROMPTS_PER_STREAM = 8
"""Different prompts first, then the same again: short prompts that are cached do not disturb the streams."""


class InterferenceOptions(LoadOptions, frozen=True, kw_only=True):
    """The flags of `bench interference`. Lengths are tokens, times seconds."""

    streams: int
    stream_input_len: int
    stream_output_len: int
    long_input_len: int
    long_output_len: int
    long_rate: float
    burstiness: float
    quiet: float
    duration: float
    percentiles: list[float]
    plot: Path | None
    beside: list[Path]


def interference_options(argv: Sequence[str] | None) -> InterferenceOptions:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = parser("interference", "Inter-token latency of steady streams before and while long prompts arrive.")
    load = made.add_argument_group("load")
    load.add_argument("--streams", type=natural, default=8, help="decoded all the time; default: %(default)s")
    load.add_argument("--stream-input-len", type=natural, default=32, help="default: %(default)s")
    load.add_argument(
        "--stream-output-len",
        type=natural,
        default=512,
        help="output tokens of a stream; a new stream then takes its place",
    )
    load.add_argument("--long-input-len", type=natural, default=1024, help="tokens; default: %(default)s")
    load.add_argument("--long-output-len", type=natural, default=8, help="default: %(default)s")
    load.add_argument("--long-rate", type=positive, default=0.5, help="long prompts per second; default: %(default)s")
    load.add_argument(
        "--burstiness", type=positive, default=1.0, help="of the long prompts; 1: Poisson; more: steadier"
    )
    load.add_argument("--quiet", type=positive, default=5.0, help="seconds before the first; default: %(default)s")
    load.add_argument("--duration", type=positive, default=20.0, help="seconds with long prompts; default: %(default)s")
    load.add_argument(
        "--warmup", type=whole, default=1, help="long and short prompts made before; default: %(default)s"
    )
    made.add_argument("--percentiles", type=percent_list, default=[99.0])
    made.add_argument("--plot", type=Path, help="draw latency over time to this .png, .svg or .pdf (needs matplotlib)")
    made.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="RESULT", help="earlier results to plot too"
    )
    return load_options(InterferenceOptions, made, parse(made, argv))


async def main(argv: Sequence[str]) -> int:
    """The exit code: 0 where every long prompt was answered. Raises BenchError where a stream fails or nothing is
    steady."""
    options = interference_options(argv)
    check_plot(options.plot)
    earlier = read_results(options.beside)
    async with session(options) as api:
        load = await _prepared(options, api)
        long_ones, shares = await measured(load.run, len(load.starts), "long prompts", options)
    result = _result(options, api, load, long_ones, shares)
    status = finish(options, result, _lines(result, options.percentiles), long_ones, shares)
    if options.plot is not None:
        plot_interference(options.plot, [*earlier, {**result, "label": options.output.label or "this run"}])
    return status


class _Interference:
    """Owns one run: the outcomes of the steady streams, and its start time."""

    def __init__(
        self, options: InterferenceOptions, api: Api, short: list[BenchRequest], long: list[BenchRequest]
    ) -> None:
        self._options, self._api = options, api
        self._short = itertools.cycle(short)
        rate = arrivals(len(long), options.long_rate, options.burstiness, Random(options.seed))
        self.starts = [options.quiet + start for start in rate if start < options.duration]
        self._long = long[: len(self.starts)]
        self.window = Window(0.0, 0.0, 0.0)
        self.firsts: list[RequestOutcome] = []
        """The first request of each stream."""
        self.steady: list[RequestOutcome] = []

    async def run(self, done: Callable[[RequestOutcome], None]) -> BenchResult:
        """The outcomes of the long prompts. Raises BenchError where a stream fails: nothing would be steady."""
        begin = time.perf_counter()
        disturbed = begin + self._options.quiet
        self.window = Window(begin, disturbed, disturbed + self._options.duration)
        streams = [asyncio.create_task(self._stream()) for _ in range(self._options.streams)]
        try:
            run = await LoadGenerator(self._api.stream, None, done).run(self._long, self.starts)
            await asyncio.gather(*streams)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        if all_streaming_at(self.firsts) >= disturbed:
            raise BenchError(
                "the streams had not all begun when the first long prompt came: a longer --quiet is needed"
            )
        return run

    async def _stream(self) -> None:
        first = True
        while time.perf_counter() < self.window.end:
            outcome = await self._api.stream(next(self._short))
            if outcome.error is not None:
                raise BenchError(f"a steady stream: {outcome.error}")
            self.steady.append(outcome)
            if first:
                self.firsts.append(outcome)
            first = False


async def _prepared(options: InterferenceOptions, api: Api) -> _Interference:
    random = Random(options.seed)
    writer = await prompt_writer(options, api)
    short_shape = options.stream_input_len, options.stream_output_len, 0.0
    long_shape = options.long_input_len, options.long_output_len, 0.0
    count = max(1, int(options.duration * options.long_rate))
    short = await random_prompts(writer, options.warmup + PROMPTS_PER_STREAM * options.streams, *short_shape, random)
    long = await random_prompts(writer, options.warmup + count, *long_shape, random)
    await warm_up(api.stream, [*short[: options.warmup], *long[: options.warmup]])
    return _Interference(options, api, short[options.warmup :], long[options.warmup :])


def _result(
    options: InterferenceOptions, api: Api, load: _Interference, long_ones: BenchResult, shares: Sequence[CpuShare]
) -> dict[str, Any]:
    ttfts = [outcome.ttft for outcome in long_ones.completed]
    shape = ("streams", "stream_input_len", "stream_output_len", "long_input_len", "long_output_len", "long_rate")
    return {
        **of_the_server(api),
        **{name: getattr(options, name) for name in shape},
        "quiet_seconds": options.quiet,
        "disturbed_seconds": options.duration,
        "long_prompts": len(long_ones.outcomes),
        "failed": len(long_ones.failed),
        **{f"{name}_long_ttft_ms": value * 1000 for name, value in spread(ttfts, options.percentiles).items()},
        **interference_figures(
            load.steady, all_streaming_at(load.firsts), load.window, sorted({99.0, *options.percentiles})
        ),
        "client_cpu_s": long_ones.client_cpu,
        "server_cpu": [share._asdict() for share in shares],
    }


def _lines(result: dict[str, Any], percents: Sequence[float]) -> list[str]:
    names = spread_names(percents)
    lines = [
        rule(" Interference Benchmark Result ", "="),
        line("Steady streams:", result["streams"]),
        line("Long prompts:", f"{result['long_prompts']} of {result['long_input_len']} tokens"),
        line("Failed:", result["failed"]),
        *(line(f"{n.capitalize()} TTFT of these (ms):", result[f"{n}_long_ttft_ms"]) for n in names),
    ]
    for phase, title in (("quiet", "Before"), ("disturbed", "While long prompts arrive")):
        figures = result[phase]
        lines += [rule(title), line("Tokens:", figures["tokens"]), line("Tokens/s:", figures["tokens_per_second"])]
        lines += [line(f"{n.capitalize()} ITL (ms):", figures[f"{n}_itl_ms"]) for n in [*names, "max"]]
    lines.append(line("Streams begun meanwhile:", result["streams_begun_meanwhile"]))
    if result["max_stream_ttft_ms"] is not None:
        lines.append(line("Max TTFT of these (ms):", result["max_stream_ttft_ms"]))
    ratio = result["p99_itl_ratio"]
    return [*lines, line("P99 ITL, times that before:", ratio if ratio is not None else "-")]


# The plot of `bench interference`: inter-token latency over time, beside that of earlier runs.


NEEDED = ("timeline", "quiet_seconds", "disturbed")


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of earlier runs. Raises BenchError if a file is not one."""
    results = []
    for path in paths:
        try:
            result = msgspec.json.decode(path.read_bytes())
        except (*NOT_DECODED, OSError) as error:
            raise BenchError(f"--beside {path}: {error}") from None
        if not isinstance(result, dict) or not all(key in result for key in NEEDED):
            raise BenchError(f"--beside {path}: no result of bench interference")
        results.append({**result, "label": result.get("label") or path.stem})
    return results


def plot_interference(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """One panel each, on the same scale. Raises BenchError."""
    figure = blank_figure(len(results), panel_width=1.5 * INCHES)
    panels = figure.subplots(1, len(results), sharex=True, sharey=True, squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        seconds = [each["second"] for each in result["timeline"]]
        for key, said in (("max_itl_ms", "longest"), ("median_itl_ms", "median")):
            panel.plot(seconds, [each[key] for each in result["timeline"]], ".", markersize=4, label=said)
        panel.axvline(result["quiet_seconds"], linestyle="--", color="gray", linewidth=1)
        panel.axhline(result["disturbed"]["p99_itl_ms"], linestyle=":", color="black", linewidth=1)
        panel.set(xlabel="s (dashed: long prompts begin; dotted: their ITL p99)", title=result.get("label") or "")
        panel.set_yscale("log")
    panels[0].set_ylabel("inter-token latency in ms")
    panels[0].legend()
    save(figure, path)
