"""The ranks of an engine that has several: a process each, linked to the bus of this one."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.offline.errors import EngineFailed
from services.offline.rank_link import FAILED, RankLink
from services.worker.config import WorkerConfig
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId

ROOT = Path(__file__).parents[2]
END_SECONDS = 5.0
"""From the closing of its link until a rank is killed."""
LOOK_EVERY = 0.02

START = """
import sys
sys.path.append(sys.argv[1])
from services.offline.rank_process import main
main(int(sys.argv[2]))
"""
"""Not `-m`: the package need not lie where the started interpreter would look for it."""


class RankProcesses:
    """Owns the processes. Ranks that share a step wait for each other, so the end of one is the end of all."""

    def __init__(self, configs: Sequence[WorkerConfig], bus: MemoryBus) -> None:
        self._configs = configs
        self._bus = bus
        self._links: list[RankLink] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    def stop(self) -> None:
        """`run` returns soon. Safe to call again."""
        self._stopping = True
        for link in self._links:
            link.close()

    async def run(self) -> None:
        """Until `stop`. Raises EngineFailed where a rank ends before."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for config in self._configs:
                    tasks.create_task(self._rank(config))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    async def _rank(self, config: WorkerConfig) -> None:
        here, there = socket.socketpair()
        with there:
            process = _started(there.fileno())
        self._processes.append(process)
        link = await RankLink.of(here)
        self._links.append(link)
        if self._stopping:
            link.close()
        await link.send("configuration", pickle.dumps(config))
        plans = topics.engine_steps(EngineId(config.engine))
        await self._bus.tap(plans.subject, link.send)
        reason = await self._heard(link) or f"rank {config.rank} ended with status {await _status(process)}"
        link.close()
        if not self._stopping:
            raise EngineFailed(reason)

    async def _heard(self, link: RankLink) -> str | None:
        """Passes on what the rank says until it is gone; why it cannot serve, where it said so."""
        while (message := await link.next()) is not None:
            if message.subject == FAILED:
                return message.payload.decode()
            await self._bus.publish_raw(message.subject, message.payload)
        return None


def _started(link: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START, str(ROOT), str(link)], pass_fds=[link], stdin=subprocess.DEVNULL
    )


async def _status(process: subprocess.Popen[bytes]) -> int | None:
    """None: it did not end in time."""
    try:
        async with asyncio.timeout(END_SECONDS):
            while process.poll() is None:
                await asyncio.sleep(LOOK_EVERY)
    except TimeoutError:
        return None
    return process.returncode
