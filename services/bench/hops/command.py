"""`bench hops`: what each process and message between a request and its tokens costs, by the number of open streams.

One engine of the stack is measured, while a number of streams are open there. The times are those at which messages
pass on the bus, as an operator hears them, and at which a client has them; processor time is each process's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from services.bench.client.api import first_model
from services.bench.client.http_client import HttpClient
from services.bench.client.processes import find_stack, used
from services.bench.client.processor_time import CpuReading, cpu_shares
from services.bench.errors import BenchError
from services.bench.hops.figures import (
    ClientTimes,
    RequestHop,
    StepFigures,
    microseconds,
    request_hops,
    step_figures,
)
from services.bench.hops.recording import BusRecording
from services.bench.hops.streams import PATH, open_streams, stream_body
from services.bench.options import natural, output_group, output_options, parse, pid_list, positive
from services.bench.report import Report, Table, machine_line
from services.bench.stack_bus import bus_arguments, stack_bus
from shared.ids import RequestId

REFERENCE_STEP = 0.010
"""Seconds of the step that processor time is compared with."""
SEED = 1 << 40
"""Of the first request of the measurement itself; the others count up."""
SETTLE_SECONDS = 1.0
IDLE_SECONDS = 2.0
REQUEST_INTERVAL = 0.1
"""Seconds between two requests of one token beside the streams."""
REQUEST_TIMEOUT = 60.0
UNLOADED_CONCURRENCY = 4
PRIORITY = -15
"""Of this process, where it may choose: a message's time is noted when it runs, and it hardly does anything else."""
REAL_TIME_ACTORS = ("scheduler", "worker", "nats-server")
REAL_TIME_PRIORITY = 5
PATH_ACTORS = ("gateway", "tokenizer", "coordinator", "scheduler", "worker", "detokenizer", "nats-server")
"""In the order in which a request comes to them."""


class HopCosts(NamedTuple):
    """What was measured with one number of streams."""

    streams: int
    requests: list[RequestHop]
    """Of requests of one token that came meanwhile."""
    steps: StepFigures
    frame_bytes: float
    """A stream and step, to the client."""
    processor: Mapping[str, float]
    """Seconds a step, by kind of process, without what it takes when idle."""


def hops_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser("baton bench hops", description=__doc__)
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument("--model", help="as the server names it; default: the first that it offers")
    made.add_argument("--api-key", help="sent as bearer token")
    bus_arguments(made)
    made.add_argument("--pids", type=pid_list, default={}, help="NAME=PID,...: its processes; default: found by port")
    made.add_argument(
        "--streams", type=natural, nargs="+", default=[1, 64, 256], help="one measurement each; default: 1 64 256"
    )
    made.add_argument("--seconds", type=positive, default=5.0, help="of each measurement; default: %(default)s")
    made.add_argument("--requests", type=natural, default=400, help="of one token, with no streams open")
    made.add_argument("--output-len", type=natural, default=1024, help="tokens of a stream at most")
    made.add_argument(
        "--real-time",
        action="store_true",
        help="give scheduler, rank and bus processors before all others: what is left is what plans and results cost",
    )
    output_group(made)
    return parse(made, argv)


async def main(argv: Sequence[str]) -> int:
    """The exit code. Raises BenchError where the stack does not open so many streams."""
    options = hops_options(argv)
    report = Report(output_options(options))
    report.show(machine_line())
    async with _measurement(options) as measurement:
        idle = await measurement.idle_processor_time()
        hops, processor = await measurement.requests_alone(options.requests, idle)
        report.show("\n".join(["\nA request of one token, no stream open\n", *_request_lines(hops, processor)]))
        found: dict[str, Any] = {"request": _as_figures(hops), "request_processor_us": _in_us(processor), "levels": []}
        for streams in options.streams:
            costs = await measurement.with_streams(streams, options.seconds, options.output_len, idle)
            report.show("\n".join(_level_lines(costs)))
            found["levels"].append(_level_figures(costs))
            report.keep(found)
    report.end(found)
    return 0


# ---- measuring


class HopMeasurement:
    """Owns the recording of the bus, and the clients of the requests whose hops are followed."""

    def __init__(
        self, recording: BusRecording, client: HttpClient, options: argparse.Namespace, model: str, pids: dict[str, int]
    ) -> None:
        self._recording = recording
        self._client = client
        self._options = options
        self._model = model
        self._pids = pids
        self._seed = SEED

    async def idle_processor_time(self) -> Mapping[str, float]:
        """Processor seconds a second, by kind of process, while nothing is asked for."""
        before = used(self._pids)
        await asyncio.sleep(IDLE_SECONDS)
        return _by_actor(before, used(self._pids), IDLE_SECONDS, {})

    async def requests_alone(
        self, requests: int, idle: Mapping[str, float]
    ) -> tuple[list[RequestHop], Mapping[str, float]]:
        """The hops of requests of one token, a few at a time, and processor seconds a request by kind of process."""
        clients: dict[int, ClientTimes] = {}
        await self._one_token({})  # whatever is made at the first request is made
        left = iter(range(requests))

        async def ask() -> None:
            for _ in left:
                await self._one_token(clients)

        self._recording.begin()
        before, began = used(self._pids), time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(UNLOADED_CONCURRENCY)))
        took = time.perf_counter() - began
        processor = _by_actor(before, used(self._pids), took, idle)
        self._recording.end()
        each = {actor: seconds * took / requests for actor, seconds in processor.items()}
        return request_hops(self._recording, clients), each

    async def with_streams(self, streams: int, seconds: float, tokens: int, idle: Mapping[str, float]) -> HopCosts:
        """The hops of tokens, and of requests that come meanwhile, while so many streams are open."""
        options, clients = self._options, dict[int, ClientTimes]()
        others: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if streams > 1:
            others = open_streams(options.base_url, self._model, options.api_key, streams - 1, tokens)
        async with others, self._probe(tokens) as probe:
            await probe.has_begun()
            await asyncio.sleep(SETTLE_SECONDS)
            request = self._request_of(probe.seed)
            self._recording.begin()
            probe.begin()
            before, began = used(self._pids), time.perf_counter()
            while time.perf_counter() - began < seconds:
                await self._one_token(clients)
                await asyncio.sleep(REQUEST_INTERVAL)
            took = time.perf_counter() - began
            processor = _by_actor(before, used(self._pids), took, idle)
            self._recording.end()
            if probe.ended:
                raise BenchError(f"a stream of {tokens} tokens ended before the measurement: a longer --output-len")
        steps = step_figures(self._recording, request, probe.frames)
        a_step = {actor: share * took / steps.steps for actor, share in processor.items()}
        frame_bytes = probe.bytes / max(1, probe.frames[-1][1] - probe.frames[0][1]) if probe.frames else 0.0
        return HopCosts(streams, request_hops(self._recording, clients), steps, frame_bytes, a_step)

    async def _one_token(self, clients: dict[int, ClientTimes]) -> None:
        self._seed += 1
        seed, first = self._seed, 0.0

        def on_data(data: bytes, now: float) -> None:
            nonlocal first
            first = first or now

        sent = time.perf_counter()
        body = stream_body(self._model, 1, seed=seed)
        status = await self._client.post(PATH, body, on_data, REQUEST_TIMEOUT)
        if status != 200:
            raise BenchError(f"a request of one token: HTTP {status}")
        clients[seed] = ClientTimes(sent, first)

    @contextlib.asynccontextmanager
    async def _probe(self, tokens: int) -> AsyncIterator[_ProbeStream]:
        self._seed += 1
        probe = _ProbeStream(self._seed)
        self._recording.begin()  # so that its name is known
        stream = asyncio.create_task(probe.run(self._client, self._model, tokens))
        try:
            yield probe
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    def _request_of(self, seed: int) -> RequestId:
        for each in self._recording.messages("tokenize"):
            if each.message.sampling.seed == seed:
                return RequestId(each.message.request)
        raise BenchError("the bus has not passed the request: is --nats-url this stack's?")


class _ProbeStream:
    """Owns when the pieces of one stream arrived."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.frames: list[tuple[float, int]] = []
        self.bytes = 0
        self.ended = False
        self._count = 0
        self._begun = asyncio.Event()

    async def has_begun(self) -> None:
        """Returns once its first piece has arrived. Raises BenchError."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await self._begun.wait()
        except TimeoutError:
            raise BenchError(f"a stream did not begin within {REQUEST_TIMEOUT:g} s") from None

    def begin(self) -> None:
        """Forgets what arrived, but for its number."""
        self.frames, self.bytes = [], 0

    async def run(self, client: HttpClient, model: str, tokens: int) -> None:
        """Reads to its end."""
        await client.post(PATH, stream_body(model, tokens, seed=self.seed), self._on_data, REQUEST_TIMEOUT)
        self.ended = True

    def _on_data(self, data: bytes, now: float) -> None:
        self._begun.set()
        self._count += data.count(b"data:")
        if self.frames:  # bytes behind the first piece belong to the frames counted behind it
            self.bytes += len(data)
        self.frames.append((now, self._count))


@contextlib.asynccontextmanager
async def _measurement(options: argparse.Namespace) -> AsyncIterator[HopMeasurement]:
    pids = options.pids or find_stack(options.base_url)
    if not pids:
        raise BenchError("the stack's processes are not to be seen here: run it on their machine, or give --pids")
    client = HttpClient(options.base_url, options.api_key)
    async with stack_bus(options) as bus:
        try:
            with contextlib.suppress(PermissionError):
                os.nice(PRIORITY)
            recording = BusRecording()
            await recording.listen(bus)
            with _processors_first(pids) if options.real_time else contextlib.nullcontext():
                yield HopMeasurement(recording, client, options, options.model or await first_model(client), pids)
        finally:
            client.close()


@contextlib.contextmanager
def _processors_first(pids: dict[str, int]) -> Iterator[None]:
    """Gives processors to what plans and results pass through, and to this process, which notes when they do, before
    all others. Raises BenchError where that is not allowed."""
    first = [pids[name] for name, reading in used(pids).items() if reading.actor in REAL_TIME_ACTORS]
    threads = [int(thread) for pid in (*first, os.getpid()) for thread in os.listdir(f"/proc/{pid}/task")]
    before = {thread: (os.sched_getscheduler(thread), os.sched_getparam(thread)) for thread in threads}
    try:
        for thread in threads:
            policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK  # what opens the streams is a process of ours
            os.sched_setscheduler(thread, policy, os.sched_param(REAL_TIME_PRIORITY))
        yield
    except PermissionError as error:
        raise BenchError(f"--real-time: the system does not allow it to this user ({error.strerror})") from None
    finally:
        for thread, (former, parameters) in before.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(thread, former, parameters)


def _by_actor(
    before: Mapping[str, CpuReading], after: Mapping[str, CpuReading], took: float, idle: Mapping[str, float]
) -> dict[str, float]:
    """Processor seconds a second by kind of process, beyond what it takes when idle."""
    found = dict.fromkeys(PATH_ACTORS, 0.0)
    for share in cpu_shares(before, after, 0, took):
        if share.actor in found:
            found[share.actor] += share.cores
    return {actor: max(0.0, cores - idle.get(actor, 0.0)) for actor, cores in found.items()}


# ---- showing


def _request_lines(hops: Sequence[RequestHop], processor: Mapping[str, float]) -> list[str]:
    spent = ", ".join(f"{actor} {seconds * 1e6:,.0f}" for actor, seconds in processor.items())
    total = sum(processor.values()) * 1e6
    return [*_request_table(hops).lines(), f"\nprocessor µs a request: {spent}; all {total:,.0f}"]


def _request_table(hops: Sequence[RequestHop]) -> Table:
    rows = [
        (
            hop.name,
            f"{hop.bytes:,.0f}",
            f"{microseconds(hop.seconds, 50):,.0f}",
            f"{microseconds(hop.seconds, 99):,.0f}",
        )
        for hop in hops
    ]
    return Table(("a request's hop", "bytes", "p50 µs", "p99 µs"), rows)


def _level_lines(costs: HopCosts) -> list[str]:
    steps = costs.steps
    rate = steps.tokens / steps.seconds
    each = steps.seconds / max(1, steps.steps - 1)
    title = f"{costs.streams} streams: {steps.steps:,} steps of {each * 1e3:.1f} ms, {rate:,.0f} tokens/s"
    return [
        f"\n{title}\n",
        *_step_table(costs).lines(),
        f"\nplan + result p50 {microseconds(steps.plan_and_result, 50):,.0f} µs, "
        f"p99 {microseconds(steps.plan_and_result, 99):,.0f} µs\n",
        *_request_table(costs.requests).lines(),
    ]


def _step_table(costs: HopCosts) -> Table:
    tokens = costs.steps.tokens / costs.steps.steps
    rows, shown = [], set[str]()
    for hop in costs.steps.hops:
        size = costs.frame_bytes * costs.streams if hop.actor == "gateway" else hop.bytes
        latencies = [f"{microseconds(hop.seconds, percent):,.0f}" if hop.seconds else "-" for percent in (50, 99)]
        spent = ("", "", "") if hop.actor in shown else _spent(costs.processor[hop.actor], tokens)
        shown.add(hop.actor)
        rows.append((hop.name, f"{size:,.0f}", f"{size / tokens:,.1f}", *latencies, *spent))
    rows.append(("nats-server", "", "", "", "", *_spent(costs.processor["nats-server"], tokens)))
    rows.append(("all", "", "", "", "", *_spent(sum(costs.processor.values()), tokens)))
    heads = ("a token's hop", "bytes/step", "/token", "p50 µs", "p99 µs", "processor µs/step", "/token", "of 10 ms")
    return Table(heads, rows)


def _spent(seconds: float, tokens: float) -> tuple[str, str, str]:
    return f"{seconds * 1e6:,.0f}", f"{seconds * 1e6 / tokens:,.1f}", f"{seconds / REFERENCE_STEP:.1%}"


def _as_figures(hops: Sequence[RequestHop]) -> dict[str, dict[str, float]]:
    return {hop.name: {"bytes": hop.bytes, **_latency(hop.seconds)} for hop in hops}


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    return {"count": len(seconds), "p50_us": microseconds(seconds, 50), "p99_us": microseconds(seconds, 99)}


def _in_us(processor: Mapping[str, float]) -> dict[str, float]:
    return {actor: seconds * 1e6 for actor, seconds in processor.items()}


def _level_figures(costs: HopCosts) -> dict[str, Any]:
    steps = costs.steps
    return {
        "streams": costs.streams,
        "steps": steps.steps,
        "seconds": steps.seconds,
        "tokens": steps.tokens,
        "hops": {hop.name: {"bytes_per_step": hop.bytes, **_latency(hop.seconds)} for hop in steps.hops},
        "frame_bytes": costs.frame_bytes,
        "processor_us_per_step": _in_us(costs.processor),
        "plan_and_result": _latency(steps.plan_and_result),
        "request": _as_figures(costs.requests),
    }
