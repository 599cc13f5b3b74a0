"""Transfers that cannot be done: reported as failed, with nothing wrong left behind; only bugs raise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kvstore.arena.owned_arena import OwnedArena
from kvstore.arena.shared_bandwidth import SharedBandwidth
from kvstore.core.copy_budget import MIN_BURST
from services.worker.kv import rank_heads
from services.worker.kv import transfers as transfers_module
from services.worker.kv.copier import BoundCopier, TransferChunk
from services.worker.kv.plain_copier import PlainKvCopier
from services.worker.kv.rank_heads import RankHeads
from services.worker.kv.transfers import CHUNK_BYTES, BrokenTransfer
from shared.ids import ArenaId
from tests.support.kv.ranks import ARENA, BLOCKS, OpsKind, Rank, make_arena, make_layout, reserve, transfer

LAYOUT = make_layout("float32")


@pytest.fixture(params=["torch", "native", "staged", "plain"])
def kind(request: pytest.FixtureRequest) -> OpsKind:
    name: OpsKind = request.param
    return name


@pytest.fixture
def arena(tmp_path: Path) -> OwnedArena:
    return make_arena(tmp_path, LAYOUT)


@pytest.fixture
def rank(kind: OpsKind, arena: OwnedArena, tmp_path: Path) -> Rank:
    rank = Rank(kind, LAYOUT, tmp_path)
    rank.compute()
    return rank


def test_a_slot_that_has_become_anothers_is_neither_read_nor_written(rank: Rank, arena: OwnedArena) -> None:
    assert rank.save([0, 1], [0, 1]) == "done"
    before = bytes(arena.payload(1))
    reserve(arena, 1, 1000)
    assert rank.save([2, 3], [0, 1]) == "late"
    assert bytes(arena.payload(1)) == before
    assert not arena.is_written(1)
    assert rank.load([4, 5], [0, 1]) == "late"


def test_others_may_run_while_blocks_are_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that launch steps wait 5 ms for Python's lock where nobody lets go of it."""
    layout = make_layout("float32", layers=10)
    make_arena(tmp_path, layout)
    rank = Rank("plain", layout, tmp_path)
    given_away: list[float] = []
    monkeypatch.setattr("services.worker.kv.rank_heads.time.sleep", given_away.append)
    for transfers, ask in enumerate((rank.save, rank.load), start=1):
        assert ask([0, 1, 2], [0, 1, 2]) == "done"
        assert given_away == [0.0] * (transfers * 3 * 4 * 10 // rank_heads._CELLS_AT_ONCE)


def test_what_could_not_be_loaded_is_zeros(rank: Rank, arena: OwnedArena) -> None:
    """Not what an earlier owner left, and never half of a number that is none."""
    untouched = rank.block(6)
    assert rank.save([0, 1], [0, 1]) == "done"
    arena.payload(1)[100] ^= 1
    assert rank.load([4, 5], [0, 1]) == "failed"
    assert not rank.block(5).any()
    assert torch.equal(rank.block(6), untouched)


def test_heads_that_nobody_wrote_are_not_loaded(rank: Rank) -> None:
    assert rank.load([1], [3]) == "failed"


def test_an_arena_that_is_not_there_or_another_fails_until_the_right_one_comes(
    rank: Rank, arena: OwnedArena, tmp_path: Path
) -> None:
    asked = transfer("save", [1], [1])
    gone = replace(asked, path="gone.arena")
    assert rank.transfers.run(gone, lambda: False) == "failed"
    assert rank.transfers.run(replace(asked, arena=ArenaId(5)), lambda: False) == "failed"
    assert rank.transfers.run(asked, lambda: False) == "done"
    arena.path.unlink()
    again = OwnedArena.create(arena.path, ArenaId(5), LAYOUT, BLOCKS)
    reserve(again, 1, 2)
    assert rank.transfers.run(replace(asked, arena=ArenaId(5)), lambda: False) == "done", "mapped anew"
    assert again.is_written(1)
    (tmp_path / "broken.arena").write_bytes(b"no arena")
    assert rank.transfers.run(replace(asked, path="broken.arena"), lambda: False) == "failed"


@pytest.mark.parametrize("path", ["../some.arena", "/etc/passwd", "sub/some.arena", ""])
def test_only_files_of_the_stores_directory_are_opened(rank: Rank, path: str) -> None:
    assert rank.transfers.run(replace(transfer("save", [1], [1]), path=path), lambda: False) == "failed"


def test_another_layout_is_not_touched(rank: Rank, tmp_path: Path) -> None:
    other = make_arena(tmp_path, make_layout("float32", model="a fine-tune"))
    assert rank.save([1], [1]) == "failed"
    assert not other.checksum(1, 0)


def test_a_slot_that_the_arena_does_not_have_fails(rank: Rank) -> None:
    assert rank.save([1], [BLOCKS]) == "failed"
    assert rank.save([1], [2**32 - 1]) == "failed"


def test_a_block_that_the_rank_does_not_have_is_a_bug(rank: Rank) -> None:
    with pytest.raises(BrokenTransfer, match=f"block {BLOCKS} of {BLOCKS}"):
        rank.save([BLOCKS], [1])
    with pytest.raises(BrokenTransfer, match="2 blocks, 1 slots"):
        rank.save([0, 1], [1])


def test_a_transfer_of_nothing_is_done(rank: Rank) -> None:
    assert rank.save([], []) == "done"


class ReservedMeanwhile(OwnedArena):
    """Its slots become another's as checksums are written or compared."""

    def write_checksum(self, slot: int, cell: int, value: int | None = None) -> None:
        super().write_checksum(slot, cell, value)
        self.set_generation(slot, 1000)

    def verify(self, slot: int, cell: int) -> bool:
        sound = super().verify(slot, cell)
        self.set_generation(slot, 1000)
        return sound


@pytest.fixture
def overtaken(tmp_path: Path) -> tuple[OwnedArena, BoundCopier, TransferChunk]:
    arena = make_arena(tmp_path, LAYOUT)
    rank = Rank("torch", LAYOUT, tmp_path)
    rank.compute()
    heads = RankHeads(ReservedMeanwhile.open(arena.path, ARENA), 0, LAYOUT.kv_heads, 0, LAYOUT.layers)
    chunk = TransferChunk(*(torch.tensor([3], dtype=t).numpy() for t in (torch.int32, torch.uint32, torch.uint64)))
    chunk.generations[0] = 4
    return arena, PlainKvCopier(rank.caches).bind(heads), chunk


def test_a_slot_that_becomes_anothers_during_the_copy_loses_its_checksums(
    overtaken: tuple[OwnedArena, BoundCopier, TransferChunk],
) -> None:
    arena, copier, chunk = overtaken
    assert copier.save(chunk) == "other generation"
    assert not any(arena.checksum(3, cell) for cell in range(arena.geometry.cells))


def test_a_slot_that_becomes_anothers_during_a_load_is_not_believed(
    overtaken: tuple[OwnedArena, BoundCopier, TransferChunk], tmp_path: Path
) -> None:
    arena, copier, chunk = overtaken
    copier.save(chunk)
    arena.set_generation(3, 4)
    for cell in range(arena.geometry.cells):
        arena.write_checksum(3, cell)
    assert copier.load(chunk) == "other generation"


def test_a_transfer_stops_between_two_pieces(tmp_path: Path, kind: OpsKind) -> None:
    layout = make_layout("float32", layers=64, head_dim=128)
    make_arena(tmp_path, layout)
    rank = Rank(kind, layout, tmp_path)
    assert BLOCKS * rank.share.num_heads * 64 * 2 * 16 * 128 * 4 > 2 * CHUNK_BYTES
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    everything = transfer("save", range(BLOCKS), range(BLOCKS))
    assert rank.transfers.run(everything, stopped) == "stopped"
    assert asked == 3
    assert rank.transfers.run(everything, lambda: False) == "done"


def waited(kind: str) -> float:
    return float(transfers_module.COPY_WAITS.labels(kind)._value.get())


def test_copies_wait_for_their_share_of_the_hosts_bandwidth_and_stop_when_told_to(tmp_path: Path) -> None:
    make_arena(tmp_path, LAYOUT)
    rank = Rank("torch", LAYOUT, tmp_path)
    rank.compute()
    bandwidth = SharedBandwidth.publish(tmp_path, 2**20)
    before = waited("save")
    assert rank.save([1], [1]) == "done"
    assert waited("save") == before, "there is a burst"
    bandwidth.take(2 * MIN_BURST)  # by other processes: four seconds and more
    stops = iter((False, True, True))
    asked = transfer("save", [2], [2])
    assert rank.transfers.run(asked, lambda: next(stops)) == "stopped"
    assert waited("save") > before + 3.0
    SharedBandwidth.publish(tmp_path, 0)
    assert rank.save([2], [2]) == "done"
