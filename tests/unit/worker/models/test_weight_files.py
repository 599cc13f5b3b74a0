"""Which files hold the weights, and what the kernel is asked to read before they are needed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from services.worker.models.weight_files import INDEX, SINGLE, read_ahead, weight_files

MIB = 1 << 20


def sharded(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_bytes(msgspec.json.encode({"weight_map": names}))


def test_the_index_names_the_files_each_once(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


def test_without_an_index_there_is_one_file_or_none(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")
def test_all_files_are_asked_for_in_pieces_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    sizes = {"1.safetensors": 5 * MIB + 1, "2.safetensors": 100}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    asked: list[tuple[str, int, int]] = []
    done = threading.Event()

    def record(file: int, at: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, at, length))
        if asked[-1][0] == "2.safetensors":
            done.set()

    monkeypatch.setattr(os, "posix_fadvise", record)
    with read_ahead(tmp_path):
        assert done.wait(60)
    one = [(at, length) for name, at, length in asked if name == "1.safetensors"]
    assert one == [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB + 1)]
    assert asked[-1] == ("2.safetensors", 0, 100)


@pytest.mark.parametrize("index", [b"", b"{}", b'{"weight_map": {"a": "missing.safetensors"}}'])
def test_what_cannot_be_read_ahead_is_left_to_who_needs_it(tmp_path: Path, index: bytes) -> None:
    (tmp_path / INDEX).write_bytes(index)
    before = set(threading.enumerate())
    with read_ahead(tmp_path):
        pass
    assert set(threading.enumerate()) <= before
