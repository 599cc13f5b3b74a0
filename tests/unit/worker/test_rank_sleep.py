"""A rank that sleeps has loaded nothing, and wakes up when it is told to."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from services.worker.config import WorkerConfig
from services.worker.rank_sleep import RankSleep
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId, Incarnation
from shared.messages.worker import SleepRank, WakeRank

ENGINE = EngineId("engine-1")


async def test_it_sleeps_until_it_is_woken_and_deeper_where_it_is_told(memory_bus: MemoryBus) -> None:
    discarded: list[int] = []
    sleep = RankSleep(1, lambda: discarded.append(1))
    woken = asyncio.create_task(sleep.until_woken(memory_bus, ENGINE))
    await asyncio.sleep(0)
    await memory_bus.publish(topics.rank_orders(ENGINE), SleepRank(2))
    await memory_bus.flush()
    async with asyncio.timeout(60):
        while sleep.level != 2:
            await asyncio.sleep(0.005)
    assert (discarded, woken.done()) == ([1], False)
    for number in (5, 6):  # said again, as it still sleeps
        await memory_bus.publish(topics.rank_orders(ENGINE), WakeRank(Incarnation(number)))
    await asyncio.wait_for(woken, 60)
    assert (sleep.level, sleep.met_under) == (None, 5)


def test_ranks_that_wake_up_meet_where_none_has_met_before() -> None:
    config = WorkerConfig(engine="e", model="m", world_size=2, rendezvous="file:///run/ranks")
    assert config.meeting(None) == config
    assert config.meeting(Incarnation(0xAB)).rendezvous_url() == "file:///run/ranks-ab"
    remote = WorkerConfig(engine="e", model="m", world_size=2, rendezvous="tcp://h:1")
    assert remote.meeting(Incarnation(1)) == remote, "its store ends with the first rank's process"


def test_a_process_that_sleeps_has_not_imported_torch() -> None:
    code = "import services.worker.__main__, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
