"""A real KV store process: how it refuses to start, and what is left of it after `kill -9`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

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


async def test_what_was_evicted_to_an_ssd_is_found_after_a_kill_without_the_arena(
    shared_nats: NatsServer, tmp_path: Path
) -> None:
    """As after a reboot, which takes what is in memory."""
    ssd = ("--kv-ssd", str(tmp_path / "ssd"), "--kv-ssd-size", "4MiB")
    store = StoreProcess(shared_nats.url, "rebooted", *ssd, memory=16 * 4096)
    names = chain("rebooted", 30)
    async with clients(shared_nats.url, store) as (engine,):
        for at in range(0, 30, 5):
            await engine.save(names[at : at + 5])
            async with asyncio.timeout(PATIENCE):  # so that nothing is evicted before it was written
                while (report := engine.report) is None or report.tiers[0].stored < at - 5:
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(PATIENCE):
            while engine.report is None or (kept := engine.report.tiers[0].stored) < 16:
                await asyncio.sleep(0.02)
        store.kill()
        for arena in store.directory.glob("*.arena"):
            arena.unlink()
        engine.report = None
        store.start()
        await engine.attach()
        async with asyncio.timeout(PATIENCE):
            while engine.report is None or not engine.report.tiers[0].present:
                await asyncio.sleep(0.02)
        found, lower = await engine.found(names[:10])
        assert (found, lower) == (10, 10)
        assert kept >= 16
        engine.report = None
        async with asyncio.timeout(PATIENCE):
            while engine.report is None or engine.report.tiers[0].hits < 10:
                await asyncio.sleep(0.02)
        [tier] = engine.report.tiers
        assert (tier.name, tier.present, tier.problem, tier.bytes_total) == ("ssd", True, "", 4 * 2**20)


def test_a_folder_of_something_else_ends_the_start_by_name(shared_nats: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    directory = new_directory()
    started = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore", "--node", "n", "--nats-url", shared_nats.url),
            *("--directory", str(directory), "--kv-ssd", str(tmp_path)),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    remove(directory)
    assert started.returncode == 2
    assert f"kvstore: kv-ssd: {tmp_path}: holds 'thesis.tex'" in started.stderr
