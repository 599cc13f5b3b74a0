"""Recorded traffic: what was heard is read again, and a ring keeps the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.journals import check_patterns, list_journal, record, replay_journal, scheduler_subjects, seconds
from deploy.errors import CommandError
from shared.journals.journal import Journal
from shared.journals.traffic import RecordedMessage, TrafficJournal, TrafficStart, recorded_messages

START = TrafficStart("baton", ("engine.>",))


def heard(number: int) -> RecordedMessage:
    return RecordedMessage(float(number), f"engine.engine-{number}.steps", bytes(100))


def read(path: Path) -> list[RecordedMessage]:
    with Journal(path) as journal:
        assert journal.about("traffic", TrafficStart) == START
        return list(recorded_messages(journal))


def test_messages_are_read_as_they_were_heard(tmp_path: Path) -> None:
    journal = TrafficJournal(tmp_path / "j", START, written_by="t", limit=None, ring=False)
    for number in range(5):
        journal.add(heard(number))
    journal.close()
    assert read(tmp_path / "j") == [heard(number) for number in range(5)]
    assert journal.messages == 5


def test_at_its_limit_a_journal_is_full(tmp_path: Path) -> None:
    journal = TrafficJournal(tmp_path / "j", START, written_by="t", limit=2000, ring=False)
    for number in range(100):
        journal.add(heard(number))
    journal.close()
    assert journal.full
    assert read(tmp_path / "j") == [heard(number) for number in range(journal.messages)]
    assert (tmp_path / "j").stat().st_size <= 2000


def test_a_ring_keeps_the_newest_in_two_files(tmp_path: Path) -> None:
    journal = TrafficJournal(tmp_path / "j", START, written_by="t", limit=4000, ring=True)
    for number in range(100):
        journal.add(heard(number))
    journal.close()
    kept = read(tmp_path / "j.older") + read(tmp_path / "j")
    assert kept == [heard(number) for number in range(100 - len(kept), 100)]
    assert len(kept) >= 10
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    assert journal.messages == 100
    assert not journal.full


def test_traffic_is_listed_but_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = TrafficJournal(tmp_path / "j", START, written_by="t", limit=None, ring=False)
    journal.add(RecordedMessage(3661.25, "engine.e.control", b"\x92\x01\xa1x"))
    journal.close()
    with pytest.raises(CommandError, match="holds traffic"):
        replay_journal(tmp_path / "j", as_json=False)
    list_journal(tmp_path / "j", as_json=False)
    assert capsys.readouterr().out.split() == ["0", "01:01:01.250", "engine.e.control", "4", "B", "[1,", '"x"]']


@pytest.mark.parametrize(("there", "ring"), [("j", None), ("j", "1MiB"), ("j.older", "1MiB")])
def test_what_is_there_is_not_written_over(tmp_path: Path, there: str, ring: str | None) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(CommandError, match=f"/{there} is there already"):
        record(tmp_path / "j", [">"], ring=ring, run_dir=tmp_path)
    assert (tmp_path / there).read_text() == "mine"
    (tmp_path / there).write_text("")
    with pytest.raises(CommandError, match="no stack"):
        record(tmp_path / "j", [">"], ring=ring, run_dir=tmp_path)


def test_durations_and_subjects_are_checked() -> None:
    assert [seconds(text) for text in ("10s", "1.5m", "250ms", "2h", "7")] == [10, 90, 0.25, 7200, 7]
    for wrong in ("", "s", "-1s", "1d", "1 0s"):
        with pytest.raises(CommandError, match="--for"):
            seconds(wrong)
    check_patterns(["engine.*.steps", ">", "lifecycle.>", *scheduler_subjects("engine-1")])
    for subject in ("", "a..b", "a.>.b", "a b", ".a"):
        with pytest.raises(CommandError, match="no subject"):
            check_patterns([subject])
