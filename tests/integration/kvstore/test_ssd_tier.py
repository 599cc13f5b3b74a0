"""The SSD tier on real files, which are torn, spoilt, removed, of others, and for which there is no room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.core.layout import PAGE
from kvstore.tiers import ssd_tier
from kvstore.tiers.segment_files import MARKER, FolderRefused
from kvstore.tiers.ssd_tier import SsdTier
from shared.blocks import BlockHash
from tests.support.kv.random_blocks import SHAPE, chain, hashes

LAYOUT = "5eed" * 6
PATIENCE = 60.0
ROOMY = 64 * 2**20
SMALL = 2**20
"""Segments of 64 KiB: four records of blocks of SHAPE."""
RECORD = 3 * PAGE


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(folder: Path, limit: int = ROOMY) -> AsyncIterator[SsdTier]:
    tier = SsdTier(folder, limit)
    task = asyncio.create_task(tier.run())
    try:
        yield tier
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def write(tier: SsdTier, blocks: Sequence[InFlightBlock], layout: str = LAYOUT) -> None:
    await until(lambda: tier.is_present)
    assert all(tier.offer(layout, block) for block in blocks)
    await until(lambda: tier.bytes_in_flight == 0)


async def found(
    tier: SsdTier, names: Sequence[BlockHash], layout: str = LAYOUT, shape: BlockShape = SHAPE
) -> list[InFlightBlock]:
    async with asyncio.timeout(PATIENCE):
        return [block async for block in tier.fetch(layout, names, shape)]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.seg"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder))


def counted(counter: object, *labels: str) -> float:
    return counter.labels(ssd_tier.TIER, *labels)._value.get()  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def mounted(folder: Path, kind: str) -> Iterator[Path]:
    """A file system of its own, where this user may mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", "size=2m", "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"only root mounts file systems: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    with mounted(tmp_path / "tmpfs", "tmpfs") as folder:
        yield folder


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """Takes no O_DIRECT."""
    with mounted(tmp_path / "ramfs", "ramfs") as folder:
        yield folder


async def test_what_was_evicted_comes_back_as_it_was_in_files_and_after_a_restart(tmp_path: Path) -> None:
    blocks = chain(9, seed=1)
    async with running(tmp_path / "ssd", SMALL) as tier:
        await write(tier, blocks)
        assert await found(tier, hashes(blocks)) == blocks
        assert await found(tier, hashes(blocks), layout="0" * 24) == []
        assert (tier.report().blocks, tier.report().hits, tier.report().stored) == (9, 9, 9)
        assert tier.report().read_seconds > 0
        assert tier.report().write_seconds > 0
    async with running(tmp_path / "ssd", SMALL) as tier:
        await until(lambda: tier.is_present)
        assert await found(tier, hashes(blocks)) == blocks
        assert all(tier.has(LAYOUT, block.hash) for block in blocks)
        assert tier.offer(LAYOUT, blocks[0])
        assert tier.bytes_in_flight == 0
        more = chain(3, seed=2)
        await write(tier, more)
        assert await found(tier, hashes(more)) == more
        assert await found(tier, hashes(blocks)) == blocks


async def test_the_copy_is_made_before_the_offer_returns(tmp_path: Path) -> None:
    [block] = chain(1, seed=2)
    slot = bytearray(block.payload)
    async with running(tmp_path) as tier:
        await until(lambda: tier.is_present)
        tier.offer(LAYOUT, block._replace(payload=memoryview(slot)))
        slot[:] = bytes(len(slot))
        await until(lambda: tier.bytes_in_flight == 0)
        assert await found(tier, [block.hash]) == [block]


async def test_files_never_take_more_than_allowed_and_what_was_used_last_stays(tmp_path: Path) -> None:
    blocks = chain(200, seed=3)
    async with running(tmp_path, SMALL) as tier:
        for at in range(0, 200, 10):
            await write(tier, blocks[at : at + 10])
            assert len(await found(tier, hashes(blocks[:4]))) == 4
            assert size_of(tmp_path) <= SMALL
        report = tier.report()
        assert report.blocks is not None
        assert report.evictions == 200 - report.blocks > 0
        assert report.bytes_used == size_of(tmp_path)
        assert await found(tier, hashes(blocks[-4:])) == blocks[-4:]
        assert await found(tier, hashes(blocks[4:12])) == []
    async with running(tmp_path, SMALL // 2) as tier:
        await until(lambda: tier.is_present)
        assert size_of(tmp_path) <= SMALL // 2
        assert await found(tier, hashes(blocks[-4:])) == blocks[-4:]


async def test_a_search_that_is_given_up_in_the_middle_leaves_the_tier_as_it_was(tmp_path: Path) -> None:
    shape = BlockShape(cells=1, cell_bytes=2**20)
    blocks = chain(40, shape, seed=4)
    async with running(tmp_path, 2**28) as tier:
        await write(tier, blocks)
        search = tier.fetch(LAYOUT, hashes(blocks), shape)
        assert await anext(search) == blocks[0]
        await search.aclose()
        assert await found(tier, hashes(blocks), shape=shape) == blocks


@pytest.mark.parametrize("harm", ["payload", "head", "torn"])
async def test_a_spoilt_record_is_a_miss_and_never_served(tmp_path: Path, harm: str) -> None:
    blocks = chain(3, seed=5)
    async with running(tmp_path) as tier:
        await write(tier, blocks)
        [path] = segments(tmp_path)
        record = PAGE + RECORD
        with path.open("r+b", buffering=0) as file:
            match harm:
                case "payload":
                    file.seek(record + PAGE + 77)
                    file.write(b"\x56")
                case "head":
                    file.seek(record + 20)
                    file.write(b"\x56")
                case "torn":
                    file.seek(record + 2 * PAGE)
                    file.write(bytes(PAGE))
        before = counted(metrics.TIER_SPOILED)
        assert await found(tier, hashes(blocks)) == blocks[:1]
        assert counted(metrics.TIER_SPOILED) == before + 1
        assert not tier.has(LAYOUT, blocks[1].hash)
        await write(tier, blocks)
        assert await found(tier, hashes(blocks)) == blocks
    async with running(tmp_path) as tier:
        await until(lambda: tier.is_present)
        assert await found(tier, hashes(blocks)) == blocks


async def test_a_segment_whose_end_was_not_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    blocks = chain(8, seed=6)
    async with running(tmp_path, SMALL) as tier:
        await write(tier, blocks)
    first, *_ = segments(tmp_path)
    with first.open("r+b") as file:  # its footer, and half of its last record
        at = PAGE + 4 * RECORD
        file.seek(at - PAGE)
        file.write(bytes(first.stat().st_size - at + PAGE))
    (first.parent / "00000099.seg").write_bytes(b"half of a head")
    async with running(tmp_path, SMALL) as tier:
        await until(lambda: tier.is_present)
        assert not (first.parent / "00000099.seg").exists()
        there = await found(tier, hashes(blocks))
        assert there == blocks[: len(there)]
        assert len(there) == 3
        assert await found(tier, hashes(blocks[4:])) == blocks[4:]


async def test_segments_of_another_layout_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = chain(2, seed=7)
    async with running(tmp_path) as tier:
        await write(tier, blocks)
    (tmp_path / LAYOUT).rename(tmp_path / ("0" * 24))
    async with running(tmp_path) as tier:
        await until(lambda: tier.is_present)
        assert await found(tier, hashes(blocks), layout="0" * 24) == []
        assert tier.report().blocks == 0
    assert f"it is of layout {LAYOUT}, in the folder of {'0' * 24}" in str([r.__dict__ for r in caplog.records])


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FolderRefused, match=r"holds 'thesis.tex' and is no KV tier"):
        SsdTier(tmp_path, ROOMY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"format": 2}')
    with pytest.raises(FolderRefused, match=r"format=2.* is not .*format=1"):
        SsdTier(tmp_path, ROOMY)


async def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    async with running(tmp_path / "ssd") as tier:
        await write(tier, chain(1))
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "ssd", *(tmp_path / "ssd").glob("*/"))}
        assert modes == {0o700}
        assert {path.stat().st_mode & 0o777 for path in segments(tmp_path / "ssd")} == {0o600}


async def test_one_store_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path) as tier:
        await until(lambda: tier.is_present)
        with pytest.raises(FolderRefused, match="another store works here"):
            SsdTier(tmp_path, ROOMY)


async def test_a_removed_folder_costs_what_was_in_it_and_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    blocks = chain(6, seed=8)
    async with running(folder) as tier:
        await write(tier, blocks[:3])
        shutil.rmtree(folder)
        assert await found(tier, hashes(blocks)) == []
        assert not tier.has(LAYOUT, blocks[0].hash)
        async with asyncio.timeout(PATIENCE):
            while await found(tier, hashes(blocks)) != blocks:
                for block in blocks:
                    tier.offer(LAYOUT, block)
                await asyncio.sleep(0.02)
        assert size_of(folder) == tier.report().bytes_used


async def test_a_folder_that_cannot_be_had_yet_is_waited_for(tmp_path: Path) -> None:
    blocks = chain(2, seed=9)
    async with running(tmp_path / "disk" / "ssd") as tier:
        assert not tier.offer(LAYOUT, blocks[0])
        assert await found(tier, hashes(blocks)) == []
        assert "No such file" in tier.report().problem
        (tmp_path / "disk").mkdir()
        await write(tier, blocks)
        assert await found(tier, hashes(blocks)) == blocks
        assert tier.report().problem == ""


async def test_a_full_disk_costs_blocks_and_nothing_else(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_tier, "FULL_SECONDS", 0.3)
    blocks = chain(400, seed=10)
    hog = tmpfs / "ssd" / "lost+found"  # a name that the tier leaves alone
    async with running(tmpfs / "ssd") as tier:
        # Allowed 64 MiB on a disk of 2 MiB: it takes what there is.
        for at in range(0, 400, 50):
            await write(tier, blocks[at : at + 50])
            assert tier.is_present
        assert "No space left" in tier.report().problem
        async with asyncio.timeout(PATIENCE):
            while await found(tier, hashes(blocks[-4:])) != blocks[-4:]:
                tier.offer(LAYOUT, blocks[-4]), tier.offer(LAYOUT, blocks[-3])
                tier.offer(LAYOUT, blocks[-2]), tier.offer(LAYOUT, blocks[-1])
                await asyncio.sleep(0.02)
        # Somebody takes the rest, and gives it back.
        with contextlib.suppress(OSError), hog.open("wb") as file:
            while True:
                os.write(file.fileno(), bytes(PAGE))
        assert await found(tier, hashes(blocks[-4:])) == blocks[-4:]
        hog.unlink()
        more = chain(4, seed=11)
        async with asyncio.timeout(PATIENCE):
            while await found(tier, hashes(more)) != more:
                for block in more:
                    tier.offer(LAYOUT, block)
                await asyncio.sleep(0.02)
        assert tier.is_present


async def test_a_full_disk_is_read_after_a_restart(tmpfs: Path) -> None:
    blocks = chain(4, seed=13)
    async with running(tmpfs / "ssd", SMALL) as tier:
        await write(tier, blocks)
    with contextlib.suppress(OSError), (tmpfs / "hog").open("wb") as file:
        while True:
            os.write(file.fileno(), bytes(PAGE))
    async with running(tmpfs / "ssd", SMALL) as tier:
        await until(lambda: tier.is_present)
        assert await found(tier, hashes(blocks)) == blocks
        assert tier.report().problem == ""


async def test_a_file_system_without_direct_access_is_used_through_the_page_cache(
    ramfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    blocks = chain(3, seed=12)
    async with running(ramfs, SMALL) as tier:
        await write(tier, blocks)
        assert await found(tier, hashes(blocks)) == blocks
        assert tier.report().direct is False
        assert counted(metrics.TIER_DIRECT) == 0
    assert "without O_DIRECT" in caplog.text
