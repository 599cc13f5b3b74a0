"""A real KV store process: how it refuses to start, and what is left of it after `kill -9`."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from kvstore.arena.directory import StoreDirectory
from tests.support.cluster.nats_server import NatsServer
from tests.support.kv.arenas import chain, new_directory, remove
from tests.support.kv.store_process import PATIENCE, StoreProcess, clients
from tests.support.paths import REPOSITORY


def test_a_directory_that_another_store_works_in_ends_the_start() -> None:
    directory = new_directory()
    other = StoreDirectory(directory)
    started = subprocess.run(
        [sys.executable, "-m", "kvstore", "--node", "n", "--directory", str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    other.close()
    remove(directory)
    assert started.returncode == 2
    assert started.stderr == f"kvstore: {directory}: another store works here\n"


async def test_what_was_committed_is_there_after_a_kill_and_what_was_not_comes_back(shared_nats: NatsServer) -> None:
    store = StoreProcess(shared_nats.url, "killed", "--lease-seconds", "3", memory=16 * 4096)
    names = chain("killed", 6)
    async with clients(shared_nats.url, store) as (engine,):
        assert await engine.save(names) == 6
        before = engine.arena.arena
        await engine.find(names)
        await engine.reserve(chain("never written", 3))
        store.kill()
        store.start()
        await engine.attach()
        engine.report = None
        assert engine.arena.arena == before
        assert await engine.found(names) == (6, 0)
        async with asyncio.timeout(PATIENCE):
            while (report := engine.report) is None or not report.slots or report.reserved or report.pinned:
                await asyncio.sleep(0.02)
        slots = engine.arena.slots
        assert await engine.save(chain("all of it", slots)) == slots
