"""Engines that only say how they are: what others hear of a large fleet, without its processes."""

from __future__ import annotations

import asyncio
import itertools
from typing import NamedTuple

from msgspec.structs import replace

from shared import topics
from shared.actor.heartbeat import Heartbeat
from shared.bus import Bus
from shared.bus.codec import decode
from shared.ids import EngineId, Incarnation, InstanceId
from shared.messages.kv_events import KvDump, KvDumpRequest, KvSource
from shared.messages.lifecycle import (
    HEARTBEAT_SECONDS,
    KEEP_ALIVE_SECONDS,
    HeartbeatInterval,
    Lifecycle,
    LifecycleRequest,
    WorkerReport,
)
from shared.topics import Topic
from tests.support.engines.coordinator_events import MODEL, card, engine

IMAGINED_HOST = "imagined"
SLICES = 10
"""Into which every half second is divided, so that not all engines speak at once."""


class _Process(NamedTuple):
    topic: Topic[Lifecycle]
    life: Lifecycle
    beat: Heartbeat


class ImaginedEngines:
    """Owns what a scheduler and a rank of each engine said last. All work: each look shows another load."""

    def __init__(self, bus: Bus, engines: int) -> None:
        self._bus = bus
        self._processes = [each for number in range(engines) for each in _processes_of(f"engine-{number}")]

    async def run(self) -> None:
        """Publishes until it is cancelled."""
        await self._bus.subscribe(topics.heartbeat_interval(), self._set_interval)
        await self._bus.subscribe(topics.lifecycle_requests(), self._request)
        await self._bus.tap(topics.kv_dump_requests(InstanceId("*")).subject, self._send_dump)
        loop = asyncio.get_running_loop()
        due = loop.time()
        for turn in itertools.count():
            for topic, life, beat in self._processes[turn % SLICES :: SLICES]:
                said = _at_work(replace(life, keep_alive=beat.keep_alive), turn)
                if beat.is_due(said, loop.time()):
                    beat.record_published(said, loop.time())
                    await self._bus.publish(topic, said)
            due += HEARTBEAT_SECONDS / SLICES
            await asyncio.sleep(due - loop.time())

    async def _send_dump(self, subject: str, payload: bytes) -> None:
        """No engine holds a block."""
        engine_id, asked = InstanceId(subject.split(".")[1]), decode(payload, KvDumpRequest)
        source = KvSource(instance=engine_id, model=MODEL, node=None)
        dump = KvDump(source=source, epoch=Incarnation(1), number=-1, part=0, parts=1, hashes=b"")
        await self._bus.publish(topics.kv_dumps(asked.coordinator), dump)

    async def _set_interval(self, interval: HeartbeatInterval) -> None:
        for each in self._processes:
            each.beat.set_interval(interval.keep_alive)

    async def _request(self, request: LifecycleRequest) -> None:
        for each in self._processes:
            each.beat.request()


def _processes_of(name: str) -> list[_Process]:
    scheduler = replace(engine(name, max_running=256), host=IMAGINED_HOST, keep_alive=KEEP_ALIVE_SECONDS)
    report = WorkerReport(engine=EngineId(name), rank=0, world_size=1, model=card(), num_blocks=100, device="sim")
    rank = Lifecycle(
        service="worker",
        instance=InstanceId(f"{name}-rank0"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=0,
        host=IMAGINED_HOST,
        started=0.0,
        worker=report,
    )
    return [
        _Process(topics.lifecycle_of("scheduler", scheduler.instance), scheduler, Heartbeat(KEEP_ALIVE_SECONDS)),
        _Process(topics.rank_lifecycles(EngineId(name)), rank, Heartbeat(KEEP_ALIVE_SECONDS)),
    ]


def _at_work(life: Lifecycle, turn: int) -> Lifecycle:
    if life.engine is None:
        assert life.worker is not None
        return replace(life, load=1 + turn % 2, worker=replace(life.worker, received=turn, published=turn))
    running = 100 + turn % 2
    return replace(life, load=running, engine=replace(life.engine, running=running, steps=turn, tokens=100 * turn))
