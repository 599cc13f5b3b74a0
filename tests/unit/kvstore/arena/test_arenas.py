"""Mapping arenas: what a rank may rely on, and what it is told when a file is not what it should be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.arena.in_flight_block import is_sound
from kvstore.arena.mapped_arena import ArenaMissing, ArenaReplaced, ArenaUnreadable, MappedArena
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import FREE, PAGE, RESERVED, UnknownDtype
from shared.blocks import BlockHash
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout
from tests.support.kv.arenas import LARGE, SMALL, holds, name_of, new_directory, remove, write, write_cell

ARENA = ArenaId(77)
A, B = name_of("a"), name_of("b")


@pytest.fixture
def path() -> Iterator[Path]:
    directory = new_directory()
    yield directory / "some.arena"
    remove(directory)


def reserved(path: Path, slot: int = 1, name: BlockHash = A, layout: KvLayout = SMALL) -> OwnedArena:
    arena = OwnedArena.create(path, ARENA, layout, 4)
    arena.reserve(slot, 1, name, bytes(16), 16)
    return arena


def test_what_one_process_writes_another_sees(path: Path) -> None:
    store = reserved(path)
    rank = MappedArena.open(path, ARENA)
    write(rank, 1, A)
    assert store.is_written(1)
    assert store.is_sound(1)
    assert holds(store, 1, A)


def test_each_head_of_each_layer_has_its_own_bytes_and_checksum(path: Path) -> None:
    arena = reserved(path, layout=LARGE)
    write_cell(arena, 1, A, 2)
    assert [arena.verify(1, cell) for cell in range(6)] == [False, False, True, False, False, False]
    assert not arena.is_written(1)
    assert bytes(arena.cells(1, 0, 2)) == bytes(2 * arena.geometry.cell_bytes)
    assert len(arena.cells(1, 1, 2)) == 2 * arena.geometry.cell_bytes


def test_a_byte_that_changes_is_noticed(path: Path) -> None:
    arena = reserved(path)
    write(arena, 1, A)
    arena.cells(1, 1, 1)[100] ^= 1
    assert arena.verify(1, 0)
    assert not arena.verify(1, 1)
    assert not arena.is_sound(1)


def test_reserving_again_forgets_the_checksums(path: Path) -> None:
    arena = reserved(path)
    write(arena, 1, A)
    arena.free(1)
    assert arena.state(1) == FREE
    arena.reserve(1, 2, B, A, 16)
    assert (arena.state(1), arena.generation(1)) == (RESERVED, 2)
    assert not any(arena.checksum(1, head) for head in range(2))
    assert (arena.header(1).hash, arena.header(1).parent) == (B, A)


def test_a_block_is_carried_into_another_slot(path: Path) -> None:
    arena = reserved(path)
    write(arena, 1, A)
    block = arena.in_flight(1)
    assert is_sound(block, arena.shape)
    arena.reserve(3, 1, block.hash, block.parent, block.tokens)
    arena.fill(3, block)
    assert arena.is_sound(3)
    assert holds(arena, 3, A)
    with pytest.raises(ValueError, match="memoryview"):
        arena.fill(3, block._replace(payload=b"too short"))


def test_memory_that_is_given_back_reads_as_zeros_and_says_so(path: Path) -> None:
    arena = reserved(path)
    write(arena, 1, A)
    before = os.stat(path).st_blocks
    arena.give_memory_back(1, 2)
    assert os.stat(path).st_blocks < before
    assert (arena.state(1), arena.generation(1)) == (FREE, 2)
    assert bytes(arena.payload(1)) == bytes(arena.geometry.payload_bytes)


def test_nobody_else_may_read_an_arena(path: Path) -> None:
    reserved(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_arena_is_sparse_until_memory_is_taken(path: Path) -> None:
    arena = OwnedArena.create(path, ARENA, SMALL, 1000)
    assert os.stat(path).st_blocks * 512 == arena.geometry.payloads_at, "a full tmpfs must not kill who reads a header"
    before = os.stat(path).st_blocks
    assert arena.take_memory(5)
    assert (os.stat(path).st_blocks - before) * 512 == PAGE


@pytest.mark.parametrize(
    ("slot", "first", "count"), [(4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 3), (0, 2, 1), (0, 1, 0)]
)
def test_nobody_reaches_beyond_a_slot_or_the_arena(path: Path, slot: int, first: int, count: int) -> None:
    arena = reserved(path)
    with pytest.raises(IndexError):
        arena.cells(slot, first, count)


def test_a_view_outlives_the_arena_that_it_is_of(path: Path) -> None:
    arena = reserved(path)
    write(arena, 1, A)
    view = arena.cells(1, 0, 1)
    arena.close()
    arena.close()
    assert bytes(view[:8]) != bytes(8)


def test_a_file_that_is_gone_or_another_one_has_a_name(path: Path) -> None:
    with pytest.raises(ArenaMissing, match=r"some\.arena"):
        MappedArena.open(path, ARENA)
    reserved(path)
    with pytest.raises(ArenaReplaced, match="4d, not 4e"):
        MappedArena.open(path, ArenaId(78))


def test_a_file_that_is_no_arena_has_a_name(path: Path) -> None:
    for content in (b"", b"x" * 9000, b"BATONKV1" + b"\xff" * 9000):
        path.write_bytes(content)
        with pytest.raises(ArenaUnreadable, match=r"some\.arena"):
            MappedArena.open(path)
    reserved(path)
    with path.open("r+b") as file:
        file.truncate(5 * PAGE)
    with pytest.raises(ArenaUnreadable, match="20480 bytes, 24576 expected"):
        MappedArena.open(path)


def test_a_directory_in_the_place_of_an_arena_has_a_name(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ArenaUnreadable, match="Is a directory"):
        MappedArena.open(path)


def test_a_dtype_that_arenas_do_not_hold_is_named(path: Path) -> None:
    odd = KvLayout(model="m", dtype="int3", layers=1, kv_heads=1, head_dim=1)
    with pytest.raises(UnknownDtype, match="int3"):
        OwnedArena.create(path, ARENA, odd, 4)


def test_memory_is_taken_for_several_slots_at_once(path: Path) -> None:
    arena = OwnedArena.create(path, ARENA, SMALL, 1000)
    before = os.stat(path).st_blocks
    assert arena.take_memory(5, 6, 900) == 3
    assert (os.stat(path).st_blocks - before) * 512 == 3 * PAGE
    assert arena.take_memory() == 0
