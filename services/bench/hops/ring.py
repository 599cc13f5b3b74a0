"""`bench ring`: tokens a second through the whole ring, and the processor time that each kind of process spends on one.

Meant for a stack whose device is simulated (`baton up --device sim --sim-step-ms 0`): then nothing is computed, and
what is left is what passing a token on costs. On any other stack the worker's share is the model's.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from services.bench.client.api import first_model
from services.bench.client.http_client import HttpClient
from services.bench.client.processes import find_stack, used
from services.bench.client.processor_time import CpuReading, CpuShare, by_actor, cpu_shares, total
from services.bench.errors import BenchError
from services.bench.hops.streams import open_streams
from services.bench.options import natural, output_group, output_options, parse, pid_list, positive
from services.bench.report import Report, Table, machine_line

SETTLE_SECONDS = 1.0
METRICS_PATH = "/metrics"
GENERATED = b"baton_gateway_generation_tokens_total"
"""What gateways have written, by model; of each gateway where there are several."""
LOAD = "load generator"


class RingCosts(NamedTuple):
    """What was measured with one number of streams open."""

    streams: int
    tokens: float
    """Output tokens that gateways wrote."""
    seconds: float
    shares: list[CpuShare]
    """Of each kind of process, the hungriest first."""
    load: CpuShare
    """Of the process that reads the streams."""

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.tokens / self.seconds


def ring_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser("baton bench ring", description=__doc__)
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument("--model", help="as the server names it; default: the first that it offers")
    made.add_argument("--api-key", help="sent as bearer token")
    made.add_argument("--pids", type=pid_list, default={}, help="NAME=PID,...: its processes; default: found by port")
    made.add_argument(
        "--streams", type=natural, nargs="+", default=[16, 64, 256], help="one measurement each; default: 16 64 256"
    )
    made.add_argument("--seconds", type=positive, default=5.0, help="of each measurement; default: %(default)s")
    made.add_argument("--output-len", type=natural, default=1024, help="tokens of a stream at most; then a new one")
    output_group(made)
    return parse(made, argv)


async def main(argv: Sequence[str]) -> int:
    """The exit code. Raises BenchError where the stack does not open so many streams, or writes nothing."""
    options = ring_options(argv)
    pids = options.pids or find_stack(options.base_url)
    if not pids:
        raise BenchError("the stack's processes are not to be seen here: run it on their machine, or give --pids")
    report = Report(output_options(options))
    report.show(machine_line())
    client = HttpClient(options.base_url, options.api_key)
    levels: list[RingCosts] = []
    try:
        model = options.model or await first_model(client)
        for streams in options.streams:
            levels.append(await _measure(options, client, model, pids, streams))
            report.keep(_figures(levels))
    finally:
        client.close()
    report.end(_figures(levels), "\n".join(["", *ring_table(levels).lines()]))
    return 0


async def _measure(
    options: argparse.Namespace, client: HttpClient, model: str, pids: dict[str, int], streams: int
) -> RingCosts:
    others = open_streams(options.base_url, model, options.api_key, streams, options.output_len)
    async with others as reader:
        await asyncio.sleep(SETTLE_SECONDS)
        written = generated_tokens(await _metrics(client))
        before, began, load = used(pids), time.perf_counter(), _load(reader)
        await asyncio.sleep(options.seconds)
        after, took, load_after = used(pids), time.perf_counter() - began, _load(reader)
        tokens = generated_tokens(await _metrics(client)) - written
    if tokens <= 0:
        raise BenchError(f"{streams} streams are open, and no gateway wrote a token in {took:.1f} s")
    shares = by_actor(cpu_shares(before, after, int(tokens), took))
    (load_share,) = cpu_shares({LOAD: load}, {LOAD: load_after}, int(tokens), took)
    return RingCosts(streams, tokens, took, shares, load_share)


def _load(pid: int) -> CpuReading:
    times = psutil.Process(pid).cpu_times()
    return CpuReading(LOAD, times.user + times.system, 0)


async def _metrics(client: HttpClient) -> bytes:
    """Raises BenchError where the server has no such page."""
    response = await client.call("GET", METRICS_PATH)
    if response.status != 200:
        raise BenchError(f"{METRICS_PATH}: HTTP {response.status}; tokens are counted by what gateways say there")
    return response.body


def generated_tokens(page: bytes) -> float:
    """How many tokens the gateways of a page of metrics have written. 0 where it says nothing of them."""
    lines = [line for line in page.splitlines() if line.startswith(GENERATED)]
    return sum(float(line.rpartition(b" ")[2]) for line in lines)


def ring_table(levels: Sequence[RingCosts]) -> Table:
    """µs of processor time for each token, by kind of process."""
    actors = [share.actor for share in levels[-1].shares]
    rows = []
    for level in levels:
        spent = {share.actor: share.us_per_token for share in [*level.shares, total(level.shares), level.load]}
        costs = [f"{spent.get(actor, 0.0):,.1f}" for actor in [*actors, "all", LOAD]]
        rows.append((f"{level.streams}", f"{level.tokens_per_second:,.0f}", *costs))
    return Table(("streams", "tokens/s", *actors, "all", LOAD), rows)


def _figures(levels: Sequence[RingCosts]) -> Mapping[str, Any]:
    return {
        "levels": [
            {
                "streams": level.streams,
                "seconds": level.seconds,
                "output_throughput": level.tokens_per_second,
                "server_cpu": [share._asdict() for share in level.shares],
                "client_cpu_us_per_token": level.load.us_per_token,
            }
            for level in levels
        ]
    }
