"""Rows in shared memory: whole or not there, kept by whoever holds them, and nothing left of the dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.ids import RowsName
from shared.media.rows_folder import FolderTaken, NoRoom, RowsFolder, clear_dead, map_rows

A, B = RowsName(bytes(16)), RowsName(bytes([1] * 16))


def test_rows_outlive_their_owners_name_of_them(tmp_path: Path) -> None:
    encoder, engine = RowsFolder(tmp_path / "encoder-1"), RowsFolder(tmp_path / "engine-1")
    encoder.put(A, b"rows")
    assert engine.link(A, encoder.file_of(A), 4)
    assert not engine.link(B, encoder.file_of(B), 4)
    assert not engine.link(A, encoder.file_of(A), 5), "another size"
    encoder.remove(A)
    assert not encoder.has(A, 4)
    mapped = map_rows(str(engine.file_of(A)), 4)
    engine.remove(A)
    assert mapped is not None
    assert mapped[:] == b"rows"
    assert map_rows(str(engine.file_of(A)), 4) is None


def test_rows_are_read_in_pieces(tmp_path: Path) -> None:
    folder = RowsFolder(tmp_path / "encoder-1")
    folder.put(A, b"abcdef")
    assert [folder.piece(A, start, 4) for start in (0, 4, 6)] == [b"abcd", b"ef", b""]
    assert folder.piece(B, 0, 4) == b""


def test_a_folder_is_one_processs_and_half_a_file_is_none(tmp_path: Path) -> None:
    folder = RowsFolder(tmp_path / "encoder-1")
    with pytest.raises(FolderTaken):
        RowsFolder(tmp_path / "encoder-1")
    folder.put(A, b"rows")
    folder.file_of(B).with_suffix(".making").write_bytes(b"ro")
    folder.close()
    again = RowsFolder(tmp_path / "encoder-1")
    assert again.found() == {A: 4}
    assert len(list(again.path.iterdir())) == 2


def test_what_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    folder = RowsFolder(tmp_path / "encoder-1")
    folder.path.joinpath(A.hex()).mkdir()
    with pytest.raises(NoRoom):
        folder.put(A, b"rows")
    assert sorted(each.name for each in folder.path.iterdir()) == [A.hex(), "lock"]


def test_a_folder_of_its_own_goes_with_it() -> None:
    folder = RowsFolder(None)
    folder.put(A, b"rows")
    folder.close()
    assert not folder.path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from shared.media.rows_folder import RowsFolder
folder = RowsFolder(Path(sys.argv[1]))
folder.put(bytes(16), b"rows")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_killed_leave_goes_when_nobody_needs_it(tmp_path: Path) -> None:
    living = RowsFolder(tmp_path / "encoder-1")
    living.put(A, b"rows")
    os.utime(living.file_of(A), (0, 0))
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "encoder-2")], check=False, timeout=60)
    left = tmp_path / "encoder-2" / A.hex()
    assert left.read_bytes() == b"rows"
    assert clear_dead(tmp_path, 60.0) == 0
    os.utime(left, (0, 0))
    assert clear_dead(tmp_path, 60.0) == 1
    assert not left.parent.exists()
    assert living.has(A, 4)
