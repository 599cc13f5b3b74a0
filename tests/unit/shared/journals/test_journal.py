"""A journal can be read to its last whole record, wherever it ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.journals.journal import Journal, JournalError, JournalWriter, framed
from tests.support.small_disk import fill, small_disk


def written(path: Path, records: list[bytes], limit: int | None = None) -> JournalWriter:
    writer = JournalWriter(path, "traffic", {"engine": "engine-1"}, written_by="test", limit=limit)
    for record in records:
        writer.add(record)
    writer.close()
    return writer


RECORDS = [b"", b"one", b"\xc6\0\0\0\1x", bytes(30), b"last"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, RECORDS)
    with Journal(path) as journal:
        assert journal.header.kind == "traffic"
        assert journal.about("traffic", dict[str, str]) == {"engine": "engine-1"}
        assert list(journal) == RECORDS
        assert not journal.torn


def test_a_journal_cut_anywhere_gives_every_whole_record(tmp_path: Path) -> None:
    path, cut = tmp_path / "j", tmp_path / "cut"
    written(path, RECORDS)
    whole = path.read_bytes()
    ends = [len(whole) - sum(len(framed(record)) for record in RECORDS[i:]) for i in range(len(RECORDS) + 1)]
    for length in range(ends[0], len(whole) + 1):
        cut.write_bytes(whole[:length])
        with Journal(cut) as journal:
            assert list(journal) == RECORDS[: sum(end <= length for end in ends[1:])]
            assert journal.torn == (length not in ends)


def test_the_file_is_a_stream_of_messagepack(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, [b"one"])
    assert path.read_bytes().endswith(b"\xc6" + (3).to_bytes(4, "big") + b"one")
    assert msgspec.msgpack.decode(framed(b"one")) == b"one"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xc6\0\0\0\1x", b"\xc6\xff\xff\xff\xff", b"some text that is long"])
def test_what_is_no_journal_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=str(path)):
        Journal(path)


def test_a_journal_of_another_kind_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "j", [])
    with Journal(tmp_path / "j") as journal, pytest.raises(JournalError, match="holds traffic, not decisions"):
        journal.about("decisions", dict[str, str])


def test_above_its_limit_a_journal_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "j"
    size = written(path, []).size
    writer = written(path, [b"x" * 100] * 10, limit=size + 3 * 105)
    assert writer.full
    assert path.stat().st_size == writer.size == size + 3 * 105
    with Journal(path) as journal:
        assert list(journal) == [b"x" * 100] * 3


def test_a_journal_on_a_full_disk_ends_with_its_last_whole_record_for_good(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        path = disk / "j"
        writer = JournalWriter(path, "traffic", None, written_by="test")
        filling = fill(disk)
        with pytest.raises(OSError, match="No space"):
            writer.add(bytes(100_000))
        filling.unlink()
        assert writer.full
        writer.add(b"too late")
        writer.close()
        with Journal(path) as journal:
            assert all(record == bytes(100_000) for record in journal)
            assert not journal.torn
        assert path.stat().st_size == writer.size
