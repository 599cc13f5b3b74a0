"""The bytes of an arena file: ranks, stores of another version and files found at a start must all agree on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstore.arena.mapped_arena import MappedArena
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import PAGE, Geometry, fingerprint, geometry
from shared.blocks import BlockHash
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout
from tests.support.kv.arenas import LARGE, SMALL, new_directory, remove

ARENA = ArenaId(0x0123456789ABCDEF)
FILE_HEADER = bytes.fromhex(
    "4241544f4e4b5632"  # BATONKV2
    "efcdab8967452301"  # arena id
    "0300000000000000"  # slots
    "1400000000000000"  # length of the layout
    "0000000000000000"
    "97a5736d616c6ca7666c6f6174313601020810c0"  # the layout, MessagePack
)
FORMER_FILE_HEADER = bytes.fromhex(
    "4241544f4e4b5632efcdab89674523010300000000000000"
    "1300000000000000"
    "0000000000000000"
    "96a5736d616c6ca7666c6f6174313601020810"  # without the size of values
)
COMMITTED_SLOT = bytes.fromhex(
    "0200000000000000"  # committed
    "0500000000000000"  # generation
    "000102030405060708090a0b0c0d0e0f"  # hash
    "101112131415161718191a1b1c1d1e1f"  # hash of the block before
    "10000000"  # tokens
    "00000000"
    "0700000000000000"  # order of use
    "0fcc03336f6c91e3"  # checksum of cell 0
    "63feb1c633f4b25a"  # and of cell 1
)


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


def arena_with_one_block(directory: Path) -> OwnedArena:
    arena = OwnedArena.create(directory / "some.arena", ARENA, SMALL, 3)
    arena.reserve(1, 5, BlockHash(bytes(range(16))), bytes(range(16, 32)), 16)
    for head in range(2):
        arena.cells(1, head, 1)[:] = bytes([head + 1]) * arena.geometry.cell_bytes
        arena.write_checksum(1, head)
    arena.commit(1, 7)
    return arena


def test_file_and_slot_headers_have_these_bytes(directory: Path) -> None:
    arena = arena_with_one_block(directory)
    data = arena.path.read_bytes()
    assert len(data) == 2 * PAGE + 3 * PAGE
    assert data[:PAGE] == FILE_HEADER.ljust(PAGE, b"\0")
    assert data[PAGE : 2 * PAGE] == bytes(128) + COMMITTED_SLOT.ljust(128, b"\0") + bytes(PAGE - 256)


def test_payloads_lie_head_by_head_from_a_page_on(directory: Path) -> None:
    data = arena_with_one_block(directory).path.read_bytes()
    assert data[2 * PAGE :] == bytes(PAGE) + (b"\1" * 512 + b"\2" * 512).ljust(PAGE, b"\0") + bytes(PAGE)


def test_geometries_are_these() -> None:
    assert geometry(LARGE, 1000) == Geometry(
        cells=6,
        cell_bytes=1024,
        key_bytes=512,
        slots=1000,
        header_stride=128,
        payload_stride=8192,
        payloads_at=135_168,
    )
    eight_billion = KvLayout(model="m", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)
    assert geometry(eight_billion, 7) == Geometry(
        cells=256,
        cell_bytes=8192,
        key_bytes=4096,
        slots=7,
        header_stride=2112,
        payload_stride=2_097_152,
        payloads_at=20_480,
    )
    latents = KvLayout(model="m", dtype="bfloat16", layers=27, kv_heads=1, head_dim=512, value_dim=64)
    assert (geometry(latents, 1).cell_bytes, geometry(latents, 1).key_bytes) == (16 * 576 * 2, 16 * 512 * 2)


def test_fingerprints_are_these() -> None:
    assert [fingerprint(SMALL), fingerprint(LARGE)] == ["c54ab80c85cd68a07ed8d0c5", "2a9f720903b9f60126ed738c"]


def test_layouts_of_other_block_sizes_are_other_arenas() -> None:
    sizes = {16: SMALL, **{size: replace(SMALL, block_size=size) for size in (32, 64)}}
    assert len({fingerprint(layout) for layout in sizes.values()}) == 3
    latents = [replace(layout, value_dim=layout.head_dim) for layout in sizes.values()]
    assert len({fingerprint(layout) for layout in (*sizes.values(), *latents)}) == 6, "explicit sizes are others'"
    cells = {size: geometry(layout, 1).cell_bytes for size, layout in sizes.items()}
    assert cells == {16: 512, 32: 1024, 64: 2048}


@pytest.mark.parametrize("header", [FILE_HEADER, FORMER_FILE_HEADER], ids=["today's", "former"])
def test_a_file_of_these_bytes_is_read(directory: Path, header: bytes) -> None:
    path = directory / "other.arena"
    headers = bytes(128) + COMMITTED_SLOT.ljust(128, b"\0")
    payload = (b"\1" * 512 + b"\2" * 512).ljust(PAGE, b"\0")
    path.write_bytes(header.ljust(PAGE, b"\0") + headers.ljust(PAGE, b"\0") + bytes(PAGE) + payload + bytes(PAGE))
    arena = MappedArena.open(path, ARENA)
    assert arena.layout == SMALL
    assert arena.header(1) == (2, 5, bytes(range(16)), bytes(range(16, 32)), 16, 7)
    assert arena.is_sound(1)
