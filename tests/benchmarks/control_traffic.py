"""What a process of an idle fleet hears and what that costs it, by its service and by the number of engines.

    python -m tests.benchmarks.control_traffic --engines 4 16
    python -m tests.benchmarks.control_traffic --engines 4 16 --release ../another-checkout
    python -m tests.benchmarks.control_traffic --engines 16 64 --budget 16
    python -m tests.benchmarks.control_traffic --engines 256 1024 --imagined --budget 128
    python -m tests.benchmarks.control_traffic --engines 4 --deaths

Real processes on a nats-server, which counts the messages and bytes of every connection: a ring of one of each service,
and engines with the simulated device. Nobody sends requests: all that is heard are lifecycles and canaries.
Processor time, as machines are shared. `--imagined`: the engines are not processes; one publishes what theirs would say
while all work, so that their load changes all the time. `--deaths`: how long it takes until a listener takes a
scheduler for gone that was killed (SIGKILL) or stands still (SIGSTOP), where no supervisor announces it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from services.bench.report import Table
from services.coordinator.core.fleet_heartbeat import REPEAT_SECONDS
from shared import topics
from shared.bus.nats_connection import NatsOptions, connect
from shared.messages.lifecycle import Lifecycle
from shared.registry import Registry
from tests.benchmarks.imagined_engines import IMAGINED_HOST, ImaginedEngines
from tests.integration.cluster.test_rolling_upgrade import MODEL, Processes
from tests.support.cluster.nats_server import NatsServer, nats_server
from tests.support.cluster.ports import free_port
from tests.support.paths import REPOSITORY

READY_SECONDS = 600.0
SETTLE_SECONDS = 5.0
COUNTED = ("out_msgs", "out_bytes")
"""By the server: what it sent to a connection."""


class Count(NamedTuple):
    """Of one process, since its start."""

    messages: int
    bytes: int
    processor: float
    """Seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--release", type=Path, default=REPOSITORY, help="a checkout; default: this one")
    parser.add_argument("--keep-alive", type=float, help="seconds; default: the services' own")
    parser.add_argument("--deaths", action="store_true", help="kill and stop schedulers, and say when that is noticed")
    parser.add_argument("--budget", type=float, help="the coordinator's lifecycle_budget; default: its own")
    parser.add_argument("--imagined", action="store_true", help="engines that only say how they are, and always work")
    given = parser.parse_args()
    flags = [] if given.keep_alive is None else [f"--heartbeat-interval-s={given.keep_alive}"]
    release = given.release.resolve()
    if given.deaths:
        for how, seconds in asyncio.run(deaths(release, given.engines[0], flags)):
            print(f"{how.name}: {seconds:.2f} s")
        return
    rows = []
    for engines in given.engines:
        found = asyncio.run(measured(release, engines, given.seconds, flags, given.budget, given.imagined))
        rows += [(str(engines), service, *(f"{value:,.1f}" for value in values)) for service, values in found.items()]
    titles = ("engines", "service", "messages/s", "bytes/s", "processor ms/s")
    print("\n".join(Table(titles, rows, names=2).lines()))


async def measured(
    release: Path, engines: int, seconds: float, flags: Sequence[str], budget: float | None, imagined: bool
) -> dict[str, tuple[float, float, float]]:
    """By service, each the mean of its processes: messages and bytes heard, and processor milliseconds, a second."""
    monitor = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        nats_server(Path(folder), more=f'http: "127.0.0.1:{monitor}"') as server,
    ):
        processes = Processes(server, Path(folder))
        bus = await connect(NatsOptions(servers=(server.url,)))
        speaking = asyncio.create_task(ImaginedEngines(bus, engines if imagined else 0).run())
        try:
            real = 0 if imagined else engines
            lives = await _started(processes, server, release, real, flags, budget)
            await asyncio.sleep(REPEAT_SECONDS + SETTLE_SECONDS if imagined else SETTLE_SECONDS)
            before, began = _counts(monitor, lives), time.monotonic()
            await asyncio.sleep(seconds)
            after, took = _counts(monitor, lives), time.monotonic() - began
        finally:
            speaking.cancel()
            await bus.close()
            processes.stop()
    by_service: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for name, count in after.items():
        change = [(new - old) / took for new, old in zip(count, before[name], strict=True)]
        by_service[lives[name].service].append((change[0], change[1], change[2] * 1000))
    return {service: _mean(values) for service, values in sorted(by_service.items())}


async def deaths(release: Path, engines: int, flags: Sequence[str]) -> list[tuple[signal.Signals, float]]:
    """Seconds from each signal to a scheduler until a listener's registry has it no more."""
    found = []
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        processes = Processes(server, Path(folder))
        try:
            lives = await _started(processes, server, release, engines, flags)
            bus = await connect(NatsOptions(servers=(server.url,)))
            registry = Registry()

            async def heard(life: Lifecycle) -> None:
                registry.record_lifecycle(life, bus.liveness_now())

            await bus.subscribe(topics.lifecycles("scheduler"), heard)
            schedulers = [life for life in lives.values() if life.service == "scheduler"]
            for how, victim in zip([signal.SIGKILL, signal.SIGSTOP] * 3, schedulers, strict=False):
                await asyncio.sleep(SETTLE_SECONDS)
                began = bus.liveness_now()
                os.kill(victim.pid, how)
                while registry.get("scheduler", victim.instance) is not None:
                    await asyncio.sleep(0.02)
                    registry.expire(bus.liveness_now())
                found.append((how, bus.liveness_now() - began))
                os.kill(victim.pid, signal.SIGCONT)
            await bus.close()
        finally:
            processes.stop()
    return found


async def _started(
    processes: Processes,
    server: NatsServer,
    release: Path,
    engines: int,
    more: Sequence[str],
    budget: float | None = None,
) -> dict[str, Lifecycle]:
    """The lifecycles of all processes, once every one is ready."""
    lives: dict[str, Lifecycle] = {}

    async def heard(life: Lifecycle) -> None:
        if life.phase == "ready" and life.host != IMAGINED_HOST:
            lives[life.instance] = life

    bus = await connect(NatsOptions(servers=(server.url,)))
    try:
        await bus.subscribe(topics.lifecycles(), heard)
        processes.start_ring(release, free_port(), [] if budget is None else [f"--lifecycle-budget={budget}"])
        for number in range(engines):
            name = f"engine-{number}"
            processes.start(release, "scheduler", name, "--world-size=1", *more)
            flags = (f"--engine={name}", f"--model={MODEL}", "--served-model-name=demo", "--device=sim", *more)
            processes.start(release, "worker", f"{name}-rank0", *flags)
        async with asyncio.timeout(READY_SECONDS):
            while len(lives) < 4 + 2 * engines:
                await asyncio.sleep(0.5)
    finally:
        await bus.close()
    return lives


def _counts(monitor: int, lives: dict[str, Lifecycle]) -> dict[str, Count]:
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/connz?limit=4096", timeout=30) as response:
        connections: list[dict[str, Any]] = json.load(response)["connections"]
    heard = {each["name"]: [each[key] for key in COUNTED] for each in connections if each.get("name") in lives}
    return {
        name: Count(heard[name][0], heard[name][1], sum(psutil.Process(life.pid).cpu_times()[:2]))
        for name, life in lives.items()
    }


def _mean(values: list[tuple[float, ...]]) -> tuple[float, float, float]:
    first, second, third = (sum(column) / len(values) for column in zip(*values, strict=True))
    return first, second, third


if __name__ == "__main__":
    main()
