"""One engine by itself for a measurement: a bus, a scheduler and a worker, each a process as `baton up` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from services.bench.errors import BenchError
from shared import topics
from shared.bus import Bus, BusError
from shared.bus.nats_connection import NatsOptions, connect
from shared.config import process_environment
from shared.ids import EngineId
from shared.messages.lifecycle import Lifecycle
from shared.messages.model_card import ModelCard

START_TIMEOUT = 300.0
STOP_TIMEOUT = 10.0
ENGINE = EngineId("engine-1")
HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def single_engine(
    nats_server: Path | None, scheduler: Mapping[str, str], worker: Mapping[str, str]
) -> AsyncIterator[tuple[Bus, EngineId, ModelCard]]:
    """`nats_server`: its program. `scheduler` and `worker`: their flags. Raises BenchError where they do not start."""
    if nats_server is None or "model" not in worker:
        raise BenchError("an engine needs a nats-server and a model: baton bench has both")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, contextlib.ExitStack() as processes:
        url = _start_bus(nats_server, Path(folder), processes)
        bus = await _connected(url)
        try:
            ready = await _watch(bus)
            common = {"nats-url": url, "log-level": "error"}
            _start(Path(folder), processes, "scheduler", {**common, "instance": ENGINE, **scheduler})
            named = {"instance": f"{ENGINE}-rank0", "engine": ENGINE}
            rank = _start(Path(folder), processes, "worker", {**common, **named, **worker})
            yield bus, ENGINE, await _card(ready, rank, Path(folder))
        finally:
            await bus.close()


def _start_bus(nats_server: Path, folder: Path, processes: contextlib.ExitStack) -> str:
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(f'host: "{HOST}"\nport: {port}\nmax_payload: {8 * 2**20}\n')
    _run(folder, processes, "nats-server", [str(nats_server), "-c", str(config)])
    return f"nats://{HOST}:{port}"


async def _connected(url: str) -> Bus:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT
    while True:
        try:
            return await connect(
                NatsOptions(servers=(url,), namespace="baton", name="baton-bench", connect_timeout=2.0)
            )
        except BusError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise BenchError(str(error)) from None
            await asyncio.sleep(0.05)


async def _watch(bus: Bus) -> asyncio.Future[ModelCard]:
    """The engine's model, once its scheduler is ready."""
    ready: asyncio.Future[ModelCard] = asyncio.get_running_loop().create_future()

    async def on_lifecycle(life: Lifecycle) -> None:
        if life.phase == "ready" and life.engine is not None and not ready.done():
            ready.set_result(life.engine.model)

    await bus.subscribe(topics.lifecycles(), on_lifecycle)
    return ready


async def _card(ready: asyncio.Future[ModelCard], rank: subprocess.Popen[bytes], folder: Path) -> ModelCard:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT
    while not ready.done():
        if rank.poll() is not None or asyncio.get_running_loop().time() > deadline:
            said = (folder / "worker.log").read_text(errors="replace").splitlines()
            raise BenchError("the worker did not start: " + " / ".join(said[-3:]))
        await asyncio.sleep(0.05)
    return ready.result()


def _start(
    folder: Path, processes: contextlib.ExitStack, service: str, flags: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    given = [f"--{name}={value}" for name, value in flags.items()]
    return _run(folder, processes, service, [sys.executable, "-m", f"services.{service}", *given])


def _run(folder: Path, processes: contextlib.ExitStack, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=process_environment())
    processes.callback(end_process, process)
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminates it, kills it where it does not end, and closes what was read of it."""
    if process.stdout is not None:
        process.stdout.close()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
