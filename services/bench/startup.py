"""`bench startup`: from asking for one more engine to its first token, stage by stage as its own processes report.

The other engines are drained meanwhile, so that a request made at the same moment waits for the new one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.bench.client.api import Api, BenchRequest, first_model
from services.bench.client.http_client import HttpClient
from services.bench.errors import BenchError
from services.bench.options import natural, output_group, output_options, parse, positive
from services.bench.report import Report, Table, machine_line
from services.bench.stack_bus import StackProcesses, bus_arguments, stack_bus
from shared import topics
from shared.bus import Bus, BusError, EndpointError
from shared.ids import InstanceId
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle

ADMIN_TIMEOUT = 35.0
RETRY_PAUSE = 0.02
KNOWN_AFTER = 3 * HEARTBEAT_SECONDS
"""Seconds of listening after which every process has said something."""
STAGES = ("process", "bus", "libraries", "device", "ranks", "digest", "kernels", "weights", "profile", "warm_up")
"""Of a worker's start, in their order; what is between them is `other`."""


class ScaleOut(NamedTuple):
    """One more engine, in seconds from the request for it."""

    stages: Mapping[str, float]
    """Of the rank that took longest, `spawn` before and what follows until the engine is ready behind them; none of a
    standby, which was started before."""
    ready: float
    """Until the engine takes requests."""
    first_token: float
    processor: float
    """Processor time of that rank, which hardly depends on how busy the machine is."""


def startup_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser("baton bench startup", description=__doc__)
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument("--model", help="as the server names it; default: the first that it offers")
    made.add_argument("--api-key", help="sent as bearer token")
    bus_arguments(made)
    made.add_argument("--repetitions", type=natural, default=3, help="default: %(default)s")
    made.add_argument("--timeout", type=positive, default=600.0, help="seconds until a start is given up")
    made.add_argument("--model-dir", type=Path, help="the model's files, on this machine; for --cold")
    made.add_argument(
        "--cold", action="store_true", help="drop the model's files from the page cache before each repetition"
    )
    made.add_argument(
        "--standby",
        action="store_true",
        help="wait beforehand until an engine of the stack stands by (baton up --standby)",
    )
    output_group(made)
    given = parse(made, argv)
    if given.cold and given.model_dir is None:
        made.error("--cold: --model-dir must say where the model's files are")
    return given


async def main(argv: Sequence[str]) -> int:
    """The exit code. Raises BenchError where an engine does not start."""
    options = startup_options(argv)
    logging.getLogger("shared").addHandler(logging.NullHandler())  # what fails is raised
    report = Report(output_options(options))
    report.show(f"{machine_line()}, {'cold disk' if options.cold else 'page cache as it is'}\n")
    async with _stack(options) as stack:
        found = []
        for _ in range(options.repetitions):
            if options.cold:
                drop_from_page_cache(options.model_dir)
            found.append(await stack.scale_out(standby=options.standby))
    report.end(
        {"cold": options.cold, "standby": options.standby, "startups": [each._asdict() for each in found]},
        "\n".join(_table(found)),
    )
    return 0


def _table(found: Sequence[ScaleOut]) -> list[str]:
    columns = {name: [each.stages[name] for each in found] for name in found[0].stages}
    columns["engine ready"] = [each.ready for each in found]
    columns["first token"] = [each.first_token for each in found]
    columns["worker's processor time"] = [each.processor for each in found]
    rows = [
        (name, *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))))
        for name, seconds in columns.items()
    ]
    return Table(("stage", "median s", "min", "max"), rows).lines()


def drop_from_page_cache(folder: Path) -> None:
    """Has the kernel forget the files of a folder, so that they are read from the disk next. Raises BenchError."""
    if not hasattr(os, "posix_fadvise"):
        raise BenchError("--cold: this system cannot be told to forget files")
    for path in folder.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


class BenchedStack:
    """Owns what was heard of the stack's processes."""

    def __init__(self, bus: Bus, api: Api, timeout: float) -> None:
        self._bus, self._api, self._timeout = bus, api, timeout
        self._processes = StackProcesses(bus)

    async def listen(self) -> None:
        """Returns once every process has said something."""
        await self._processes.listen(KNOWN_AFTER)

    async def scale_out(self, *, standby: bool) -> ScaleOut:
        """Has one more engine, waits for its first token, and stops it again. `standby`: once one stands by, which is
        what scaling takes then. Raises BenchError."""
        if standby:
            await self._until(lambda: any(life.is_standby for life in self._processes.lives.values()))
        schedulers = [life for life in self._processes.lives.values() if life.service == "scheduler"]
        engines = [life.instance for life in schedulers if not life.standby]
        for engine in engines:
            await self._admin("drain", instance=engine, force=True)
        await self._until(lambda: all(self._processes.lives[engine].phase == "draining" for engine in engines))
        new: list[InstanceId] = []
        try:
            asked, began = time.time(), time.perf_counter()
            first_token = asyncio.create_task(self._first_token())
            new = await self._one_more(len(engines))
            ready = time.perf_counter() - began
            token = await first_token - began
            slowest = await self._slowest_rank(new)
            loaded_before = slowest["began"] < asked
        finally:
            for engine in engines:
                await self._admin("undrain", instance=engine)
            await self._until(lambda: all(self._processes.lives[engine].phase == "ready" for engine in engines))
            await self._admin("scale", service="engines", count=len(engines))
        await self._until(lambda: not any(name in self._processes.lives for name in new))
        return ScaleOut({} if loaded_before else _stages(slowest, asked, ready), ready, token, slowest["processor"])

    async def _one_more(self, engines: int) -> list[InstanceId]:
        """Starts one more than `engines`; its scheduler and its ranks, once they are ready."""
        answer = await self._admin("scale", service="engines", count=engines + 1)
        new, lives = [InstanceId(name) for name in answer["started"]], self._processes.lives
        await self._until(lambda: all(name in lives and lives[name].phase == "ready" for name in new))
        return new

    async def _until(self, condition: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                while not condition():
                    self._processes.news.clear()
                    await self._processes.news.wait()
        except TimeoutError:
            phases = {name: life.phase for name, life in self._processes.lives.items()}
            raise BenchError(f"after {self._timeout:g} s the processes are {phases}") from None

    async def _admin(self, endpoint: str, **request: Any) -> dict[str, Any]:
        try:
            body = msgspec.json.encode(request)
            answer = await self._bus.request_raw(f"{topics.ADMIN}.{endpoint}", body, ADMIN_TIMEOUT)
        except EndpointError as error:
            raise BenchError(f"{endpoint}: {error.text}") from None
        except BusError as error:
            raise BenchError(f"{endpoint}: {error}") from None
        return dict(msgspec.json.decode(answer))

    async def _first_token(self) -> float:
        """When the first token of a request came, on `time.perf_counter`'s clock; it is made again while refused."""
        deadline = time.perf_counter() + self._timeout
        prompt = BenchRequest([1, 2, 3, 4], 4, 2)
        while True:
            outcome = await self._api.stream(prompt)
            if outcome.error is None:
                return outcome.token_times[0]
            if time.perf_counter() > deadline:
                raise BenchError(f"no first token: {outcome.error}")
            await asyncio.sleep(RETRY_PAUSE)

    async def _slowest_rank(self, new: Sequence[InstanceId]) -> dict[str, float]:
        """What the rank reports that was ready last. Raises BenchError."""
        ranks = [self._processes.lives[name] for name in new if self._processes.lives[name].service == "worker"]
        return max([await _metrics(life) for life in ranks], key=lambda each: each["began"] + each["total"])


def _stages(rank: Mapping[str, float], asked: float, ready: float) -> dict[str, float]:
    """They add up to `ready`."""
    stages = {"spawn": rank["began"] - asked} | {name: rank[name] for name in STAGES if name in rank}
    stages["other"] = stages["spawn"] + rank["total"] - sum(stages.values())
    stages["registration"] = ready - sum(stages.values())
    return stages


async def _metrics(life: Lifecycle) -> dict[str, float]:
    """What a process reports of its start: seconds by stage, and `began`, its start in Unix seconds. Its own clock of
    that (`process_start_time_seconds`) is exact to a second only; it is on the bus behind the first two stages."""
    client = HttpClient(f"http://127.0.0.1:{life.metrics_port}")
    try:
        response = await client.call("GET", "/metrics")
    finally:
        client.close()
    found = {}
    for family in text_string_to_metric_families(response.body.decode()):
        for sample in family.samples:
            if sample.name == "baton_startup_seconds":
                found[sample.labels["stage"]] = sample.value
    if not {"process", "bus", "total", "processor"} <= found.keys():
        raise BenchError(f"{life.instance} says nothing of its start")
    return found | {"began": life.started - found["process"] - found["bus"]}


@asynccontextmanager
async def _stack(options: argparse.Namespace) -> AsyncIterator[BenchedStack]:
    client = HttpClient(options.base_url, options.api_key)
    async with stack_bus(options) as bus:
        try:
            model = options.model or await first_model(client)
            stack = BenchedStack(bus, Api(client, model, "completions", timeout=options.timeout), options.timeout)
            await stack.listen()
            yield stack
        finally:
            client.close()
