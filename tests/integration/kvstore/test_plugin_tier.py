"""Tiers that installed packages bring: the one in docs/kv_tiers.md, word for word, and some that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.tiers.plugin_tier import FAILURES_IN_A_ROW, PluginRefused, PluginTier, plugin_tier
from shared.blocks import BlockHash
from shared.messages.lifecycle import TierReport
from tests.support.cluster.nats_server import NatsServer
from tests.support.kv import arenas
from tests.support.kv.random_blocks import SHAPE, chain, hashes
from tests.support.kv.store_process import PATIENCE, StoreProcess, clients
from tests.support.paths import REPOSITORY

LAYOUT = "5eed" * 6
PAGE = REPOSITORY / "docs" / "kv_tiers.md"


def example() -> str:
    return PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of packages with that tier, as pip would leave it."""
    packages = tmp_path / "packages"
    (metadata := packages / "folder_tier-1.0.dist-info").mkdir(parents=True)
    (packages / "folder_tier.py").write_text(example())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-tier\nVersion: 1.0\n")
    entry = PAGE.read_text(encoding="utf-8").split('"folder_tier:')[1].split('"')[0]
    (metadata / "entry_points.txt").write_text(
        f"[baton.kv_tiers]\nfolder = folder_tier:{entry}\nbroken = no_such_module:Tier\n"
    )
    return packages


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) < 100


async def test_an_installed_package_is_found_by_the_scheme_of_a_url(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    blocks = chain(4, seed=1)
    tier = plugin_tier(f"folder://{tmp_path}/kv")
    background = asyncio.create_task(tier.run())
    try:
        assert all(tier.offer(LAYOUT, block) for block in blocks)
        async with asyncio.timeout(PATIENCE):
            while tier.report().blocks != 4:
                await asyncio.sleep(0.01)
        assert [block async for block in tier.fetch(LAYOUT, hashes(blocks), SHAPE)] == blocks
        spoilt = tmp_path / "kv" / f"{LAYOUT}-{blocks[1].hash.hex()}"
        spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
        assert [block async for block in tier.fetch(LAYOUT, hashes(blocks), SHAPE)] == blocks[:1]
        assert (tier.report().name, tier.report().hits, tier.report().stored) == ("folder", 5, 4)
    finally:
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nosuch://:secret@host", "nosuch://…: no installed package brings it; there are: broken, folder"),
        (
            "folder://relative",
            "folder://…, folder-tier 1.0 (folder = folder_tier:FolderTier): ValueError('folder:///ABSOLUTE",
        ),
        ("broken://x", "ModuleNotFoundError"),
        ("redis://h", "has an option of its own"),
        ("/mnt/kv", "NAME://… is expected"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    installed: Path, monkeypatch: pytest.MonkeyPatch, url: str, why: str
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(PluginRefused) as refused:
        plugin_tier(url)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


class Misbehaving:
    """Raises, or returns what was not asked for."""

    name = "misbehaving"

    def __init__(self, returned: Sequence[InFlightBlock] = ()) -> None:
        self.returned = returned
        self.asked = 0

    def _raise(self) -> None:
        self.asked += 1
        raise RuntimeError("no")

    async def run(self) -> None:
        self._raise()

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        self._raise()
        return True

    def has(self, layout: str, name: BlockHash) -> bool:
        self._raise()
        return True

    async def fetch(
        self, layout: str, names: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        for block in self.returned:
            yield block
        self._raise()

    def report(self) -> TierReport:
        raise RuntimeError("no")


async def test_what_a_tier_raises_is_a_miss_and_it_is_left_alone_after_a_few(caplog: pytest.LogCaptureFixture) -> None:
    [block] = chain(1)
    foreign = Misbehaving()
    tier = PluginTier("misbehaving", foreign)
    for _ in range(FAILURES_IN_A_ROW + 5):
        assert not tier.offer(LAYOUT, block)
        assert not tier.has(LAYOUT, block.hash)
        assert [each async for each in tier.fetch(LAYOUT, [block.hash], SHAPE)] == []
    assert foreign.asked == FAILURES_IN_A_ROW
    assert not tier.report().present
    assert "RuntimeError('no')" in tier.report().problem
    background = asyncio.create_task(tier.run())
    async with asyncio.timeout(PATIENCE):
        while foreign.asked == FAILURES_IN_A_ROW:
            await asyncio.sleep(0.01)
    assert not background.done()
    background.cancel()


async def test_blocks_that_were_not_asked_for_or_are_not_sound_are_not_served() -> None:
    first, second, third = chain(3)
    swapped = PluginTier("misbehaving", Misbehaving([first, third, second]))
    assert [each async for each in swapped.fetch(LAYOUT, hashes([first, second, third]), SHAPE)] == [first]
    torn = PluginTier("misbehaving", Misbehaving([first._replace(payload=second.payload)]))
    assert [each async for each in torn.fetch(LAYOUT, [first.hash], SHAPE)] == []


async def test_a_store_uses_it_beside_its_own_tiers(shared_nats: NatsServer, installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join((str(installed), str(REPOSITORY)))
    inside = ("env", f"PYTHONPATH={path}", f"BATON_KVSTORE_KV_TIERS=folder://{tmp_path}/kv")
    store = StoreProcess(shared_nats.url, "plugin", memory=16 * 4096, inside=inside)
    names = arenas.chain("plugin", 30)
    async with clients(shared_nats.url, store) as (engine,):
        for at in range(0, 30, 5):
            await engine.save(names[at : at + 5])
        async with asyncio.timeout(PATIENCE):
            while engine.report is None or not engine.report.tiers or not engine.report.tiers[0].blocks:
                await asyncio.sleep(0.02)
        kept = {path.name.split("-")[1] for path in (tmp_path / "kv").iterdir()}
        gone = [name for name in names if name.hex() in kept]
        store.kill()
        for arena in store.directory.glob("*.arena"):
            arena.unlink()
        engine.report = None
        store.start()
        await engine.attach()
        async with asyncio.timeout(PATIENCE):
            while engine.report is None or not engine.report.tiers[0].blocks:
                await asyncio.sleep(0.02)
        assert engine.report.tiers[0].name == "folder"
        assert await engine.found(gone[:1]) == (1, 1)
