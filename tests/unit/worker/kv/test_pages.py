"""Pages of KV memory, provided before blocks are used: in order, piece by piece, and no further than need be."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kvstore.core.layout import file_name
from services.worker.kv import pages as pages_ahead
from services.worker.kv.copier import BoundCopier, HostLayerCache, RankKvCache
from services.worker.kv.pages import PagePrefault
from services.worker.kv.rank_heads import RankHeads
from services.worker.kv.transfers import Transfers
from services.worker.ops.native.kernels import zeroed
from tests.support.kv.ranks import BLOCKS, Rank, make_arena, make_layout, transfer

LAYOUT = make_layout("float32")
KIB = 1024
_ENTRY_BYTES = 8

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages come when touched elsewhere")


class Device:
    """Two runs of some blocks, in memory of its own that nobody has touched."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.memory = [
            mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)
        ]
        self.tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in self.memory]
        self.runs = [HostLayerCache(tensor.data_ptr(), block_bytes) for tensor in self.tensors]
        self.share = RankKvCache(LAYOUT, 0, 1, True, blocks, self, 0, 1)

    def bind(self, heads: RankHeads) -> BoundCopier:
        raise NotImplementedError

    def resident(self, run: int) -> int:
        """Bytes of the run that have pages, as the system says: a bit of each page's entry in its table."""
        first, count = self.runs[run].address // mmap.PAGESIZE, len(self.memory[run]) // mmap.PAGESIZE
        with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
            table.seek(first * _ENTRY_BYTES)
            entries = memoryview(table.read(count * _ENTRY_BYTES)).cast("Q")
        return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB at first, 128 KiB ahead at most, 16 KiB at a time."""
    monkeypatch.setattr(pages_ahead, "FIRST_BYTES", 64 * KIB)
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 128 * KIB)
    monkeypatch.setattr(pages_ahead, "CHUNK_BYTES", 16 * KIB)


def steps(pages: PagePrefault) -> int:
    count = 0
    while pages.left:
        pages.provide_some()
        count += 1
    return count


@linux_only
@pytest.mark.usefixtures("small")
def test_what_is_used_first_has_its_pages_before_anybody_comes() -> None:
    device = Device(blocks=64, block_bytes=8 * KIB)
    pages = PagePrefault(device.share)
    assert steps(pages) == 4, "16 KiB a piece: four blocks of 16 KiB in two runs"
    assert [device.resident(run) for run in (0, 1)] == [32 * KIB, 32 * KIB]
    pages.used(1)
    assert steps(pages) == 2
    assert [device.resident(run) for run in (0, 1)] == [48 * KIB, 48 * KIB], "blocks 0 and 1 and four more"
    pages.used(5)
    assert [device.resident(run) for run in (0, 1)] == [48 * KIB, 48 * KIB], "nothing before it is its turn"
    steps(pages)
    assert [device.resident(run) for run in (0, 1)] == [96 * KIB, 96 * KIB], "blocks 0 to 5 and as many more"
    pages.used(20)
    steps(pages)
    assert [device.resident(run) for run in (0, 1)] == [240 * KIB, 240 * KIB], "eight more, in whole pieces"
    pages.used(63)
    steps(pages)
    assert device.resident(1) == 512 * KIB, "all there is, and no more"


@linux_only
@pytest.mark.usefixtures("small")
def test_of_a_small_model_few_tokens_have_their_pages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as fit into the bytes, which would be more memory than the model's own."""
    monkeypatch.setattr(pages_ahead, "FIRST_TOKENS", 2 * LAYOUT.block_size)
    device = Device(blocks=64, block_bytes=8 * KIB)
    pages = PagePrefault(device.share)
    steps(pages)
    assert device.resident(0) == 16 * KIB, "two blocks, where four fit into 64 KiB"


@linux_only
@pytest.mark.usefixtures("small")
def test_no_more_is_provided_at_once_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "FIRST_TOKENS", 2 * LAYOUT.block_size)
    monkeypatch.setattr(pages_ahead, "CHUNK_BYTES", 256 * KIB)
    device = Device(blocks=64, block_bytes=8 * KIB)
    pages = PagePrefault(device.share)
    assert steps(pages) == 2
    assert [device.resident(run) for run in (0, 1)] == [16 * KIB, 16 * KIB], "two blocks, where a piece has 32"
    pages.used(0)
    assert steps(pages) == 2
    assert [device.resident(run) for run in (0, 1)] == [32 * KIB, 32 * KIB], "as many again"


@linux_only
def test_a_pool_has_small_pages_first_and_huge_ones_behind() -> None:
    pool = zeroed(8 << 20, grows=True)
    if not huge_pages_wanted(pool.data_ptr() + (4 << 20)):
        pytest.skip("this system has no huge pages")
    assert not huge_pages_wanted(pool.data_ptr())
    assert huge_pages_wanted(zeroed(8 << 20).data_ptr())


def huge_pages_wanted(address: int) -> bool:
    """Whether the system was advised to have them there: `hg` in /proc/PID/smaps (proc(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and inside:
            return "hg" in rest
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
    raise AssertionError("not mapped")


@linux_only
@pytest.mark.usefixtures("small")
def test_contents_stay_what_they_are() -> None:
    device = Device(blocks=16, block_bytes=8 * KIB)
    device.tensors[0][:] = 7
    steps(PagePrefault(device.share))
    assert bool((device.tensors[0] == 7).all())


def test_a_device_with_memory_of_its_own_needs_nothing() -> None:
    device = Device(blocks=4, block_bytes=KIB)
    device.runs = []
    pages = PagePrefault(device.share)
    pages.used(3)
    assert not pages.left


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_the_runs_of_caches_cover_every_block(kind: str, tmp_path: Path) -> None:
    rank = Rank("torch" if kind == "torch" else "native", LAYOUT, tmp_path)
    caches = [cache for halves in rank.caches for cache in halves]
    runs = rank.share.copier.runs
    assert [run.address for run in runs] == [cache.data_ptr() for cache in caches]
    assert all(run.block_bytes * BLOCKS == cache.nbytes for run, cache in zip(runs, caches, strict=True))


def prepared(transfers: Transfers) -> int:
    count = 0
    while transfers.prepare():
        count += 1
    return count


def test_an_arena_that_is_there_is_mapped_before_the_first_transfer(tmp_path: Path) -> None:
    made = make_arena(tmp_path, LAYOUT)
    rank = Rank("torch", LAYOUT, tmp_path)
    rank.compute()
    assert rank.save([1, 2], [0, 1]) == "done"
    for slot in (0, 1):
        made.commit(slot, used=1)
    (tmp_path / "some.arena").rename(tmp_path / file_name(LAYOUT))
    other = Rank("torch", LAYOUT, tmp_path)
    without = prepared(Transfers(other.share, tmp_path / "elsewhere"))
    assert prepared(other.transfers) == without + 1, "one piece of the arena, and the caches"
    asked = transfer("load", [3], [0])
    assert other.transfers.run(replace(asked, path=file_name(LAYOUT)), lambda: False) == "done"
    assert torch.equal(other.block(3), rank.block(1))


def test_another_arena_may_take_its_place_meanwhile(tmp_path: Path) -> None:
    made = make_arena(tmp_path, LAYOUT)
    for slot in range(0, BLOCKS, 2):
        made.commit(slot, used=1)
    (tmp_path / file_name(LAYOUT)).write_bytes((tmp_path / "some.arena").read_bytes())
    rank = Rank("torch", LAYOUT, tmp_path)
    assert rank.transfers.prepare()
    assert rank.save([1], [1]) == "done", "through the other file"
    prepared(rank.transfers)
    assert made.is_written(1)
