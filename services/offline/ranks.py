"""The ranks of an engine that has several: a process for each, linked to the engine's in-memory bus.

Ranks compute at the same time and exchange tensors by torch.distributed, which needs a process for each. Over the link
go messages of the bus as bytes: plans to the rank, everything else from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from services.offline.errors import EngineFailed
from services.worker.__main__ import build
from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from shared import topics
from shared.actor import ActorRuntime, keep_from_collecting, run_loop
from shared.addresses import loopback_interface, rank_interfaces
from shared.bus.memory_bus import MemoryBus
from shared.config import process_environment
from shared.error_groups import innermost
from shared.ids import EngineId

ROOT = Path(__file__).parents[__name__.count(".")]
"""The folder that contains the outermost package."""
EXIT_SECONDS = 5.0
"""From the closing of its link until a rank is killed."""
POLL_SECONDS = 0.02
DRAIN_SECONDS = 1.0
ORPHAN_SECONDS = 3.0
"""How long a rank without an engine may take to end in order; one whose device hangs is ended."""
MAX_PAYLOAD = 2**28
"""Bytes of one message: no server has to take it."""
FAILED = ""
"""The subject under which a rank reports why it cannot serve."""
_LENGTH_BYTES = 4

START = """
import sys
from importlib import import_module
sys.path.append(sys.argv[1])
import_module(sys.argv[2]).main(int(sys.argv[3]))
"""
"""Not `-m`: the package may lie where the started interpreter does not look for it."""


class BusMessage(Struct, frozen=True, array_like=True):
    """A message of the bus, with its payload encoded."""

    subject: str
    payload: bytes


class RankLink:
    """Owns one end of a connection between two processes of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, connected: socket.socket) -> RankLink:
        """Returns the end that uses a connected socket."""
        return cls(*await asyncio.open_connection(sock=connected))

    async def send(self, subject: str, payload: bytes) -> None:
        """Sends a message, and waits while the other end is far behind. Where that is gone, `next` reports it."""
        encoded = msgspec.msgpack.encode(BusMessage(subject, payload))
        self._writer.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def next(self) -> BusMessage | None:
        """Returns the next message; None once the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=BusMessage)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Closes the connection to the rank's process."""
        self._writer.close()


class RankProcesses:
    """Owns the processes. Ranks that share a step wait for each other, so the end of one is the end of all."""

    def __init__(self, configs: Sequence[WorkerConfig], bus: MemoryBus) -> None:
        self._configs = configs
        self._bus = bus
        self._links: list[RankLink] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    def stop(self) -> None:
        """Makes `run` return soon. Safe to call again."""
        self._stopping = True
        for link in self._links:
            link.close()

    async def run(self) -> None:
        """Runs the ranks until `stop`. Raises EngineFailed where a rank ends before."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for config in self._configs:
                    tasks.create_task(self._run_rank(config))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    async def _run_rank(self, config: WorkerConfig) -> None:
        here, there = socket.socketpair()
        with there:
            process = _start_process(there.fileno())
        self._processes.append(process)
        link = await RankLink.of(here)
        self._links.append(link)
        if self._stopping:
            link.close()
        await link.send("configuration", pickle.dumps(config))
        plans = topics.engine_steps(EngineId(config.engine))
        await self._bus.tap(plans.subject, link.send)
        reason = await self._forward(link) or f"rank {config.rank} ended with status {await _exit_status(process)}"
        link.close()
        if not self._stopping:
            raise EngineFailed(reason)

    async def _forward(self, link: RankLink) -> str | None:
        """Publishes what the rank sends, until it is gone. Returns why it cannot serve, where it has reported that."""
        while (message := await link.next()) is not None:
            if message.subject == FAILED:
                return message.payload.decode()
            await self._bus.publish_raw(message.subject, message.payload)
        return None


def _start_process(link: int) -> subprocess.Popen[bytes]:
    """It speaks to other ranks where no other machine reaches it, unless the user has chosen an interface."""
    environment = process_environment()
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START, str(ROOT), __name__, str(link)],
        pass_fds=[link],
        stdin=subprocess.DEVNULL,
        env=environment | rank_interfaces(loopback_interface(), environment),
    )


async def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """None where the process did not end in time."""
    try:
        async with asyncio.timeout(EXIT_SECONDS):
            while process.poll() is None:
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return None
    return process.returncode


def main(fd: int) -> None:
    """Runs a rank's process, a worker on a bus of its own, until the other end of the socket `fd` closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process decides what an interrupt means
    run_loop(_serve(socket.socket(fileno=fd)))


async def _serve(connected: socket.socket) -> None:
    link = await RankLink.of(connected)
    first = await link.next()
    if first is None:
        return
    # From the process that started this one, on a connection that no other process has.
    config: WorkerConfig = pickle.loads(first.payload)
    bus = MemoryBus(MAX_PAYLOAD)
    plans = topics.engine_steps(EngineId(config.engine)).subject
    runtime = ActorRuntime(
        await build(config, bus),
        drain_timeout=DRAIN_SECONDS,
        when_set_up=keep_from_collecting,
        block_size=config.block_size,
    )

    async def send(subject: str, payload: bytes) -> None:
        if subject != plans:
            await link.send(subject, payload)

    async def receive() -> None:
        while (message := await link.next()) is not None:
            await bus.publish_raw(message.subject, message.payload)
        runtime.stop()
        asyncio.get_running_loop().call_later(ORPHAN_SECONDS, os._exit, 1)

    await bus.tap(">", send)
    receiving = asyncio.create_task(receive())
    try:
        await runtime.run()
    except* BackendError as errors:
        await link.send(FAILED, str(innermost(errors)).encode())
    finally:
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
        link.close()
