"""Files with prompts or passwords in them are their owner's alone, also where an older file was not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.supervisor.log_files import MAX_LOG_BYTES, LogFolder
from shared.journals.journal import JournalWriter
from shared.private_files import private_opener


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_private_and_an_older_one_becomes_so(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    assert mode(old) == 0o666
    with open(new, "w", opener=private_opener), open(old, "a", opener=private_opener):
        assert (mode(new), mode(old)) == (0o600, 0o600)
    assert old.read_text() == "kept"


def test_what_is_no_file_stays_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o666)
    with open(pipe, "r+b", buffering=0, opener=private_opener):
        assert mode(pipe) == 0o666


def test_a_journal_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch()
    JournalWriter(path, "traffic", {}, written_by="test").close()
    assert mode(path) == 0o600


def test_logs_and_their_rotated_copies_are_private(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    logs.begin_run()
    with logs.stream("gateway-1") as log:
        log.write("a prompt\n")
        log.flush()
        os.truncate(logs.of("gateway-1"), MAX_LOG_BYTES + 1)
    assert logs.bound() is None
    found = {path.name: mode(path) for path in logs.folder.iterdir()}
    assert found == {"gateway-1.log": 0o600, "gateway-1.log.1": 0o600}
    assert mode(logs.folder) == 0o700
