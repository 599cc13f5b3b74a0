"""The process of one rank, where an engine has several: a worker on a bus of its own, linked to that of the engine.

Ranks compute at the same time and exchange tensors by torch.distributed, which takes a process for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket

from services.offline.rank_link import FAILED, MAX_PAYLOAD, RankLink
from services.worker.__main__ import build
from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from shared import topics
from shared.actor import ActorRuntime, keep_from_collecting, run_loop
from shared.bus.memory_bus import MemoryBus
from shared.error_groups import innermost
from shared.ids import EngineId

DRAIN_SECONDS = 1.0
ORPHAN_SECONDS = 3.0
"""What a rank gets for an orderly end; one whose device hangs, or waits for a rank that is gone, ends without."""


def main(fd: int) -> None:
    """Until the other end closes. The engine's process decides what an interrupt means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_loop(_serve(socket.socket(fileno=fd)))


async def _serve(connected: socket.socket) -> None:
    link = await RankLink.of(connected)
    told = await link.next()
    if told is None:
        return
    # From the process that started this one, on a connection that nobody else has.
    config: WorkerConfig = pickle.loads(told.payload)
    bus = MemoryBus(MAX_PAYLOAD)
    plans = topics.engine_steps(EngineId(config.engine)).subject
    runtime = ActorRuntime(await build(config, bus), drain_timeout=DRAIN_SECONDS, when_set_up=keep_from_collecting)

    async def tell(subject: str, payload: bytes) -> None:
        if subject != plans:
            await link.send(subject, payload)

    async def listen() -> None:
        while (message := await link.next()) is not None:
            await bus.publish_raw(message.subject, message.payload)
        runtime.stop()
        asyncio.get_running_loop().call_later(ORPHAN_SECONDS, os._exit, 1)

    await bus.tap(">", tell)
    listening = asyncio.create_task(listen())
    try:
        await runtime.run()
    except* BackendError as errors:
        await link.send(FAILED, str(innermost(errors)).encode())
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        link.close()
