"""What a log says of the end of its process."""

from __future__ import annotations

from pathlib import Path

from deploy.supervisor.log_files import failure_reason
from deploy.supervisor.stack import StartFailed
from shared.ids import InstanceId

SAID = """{"event":"startup stage","stage":"device"}
{"event":"cannot serve","model":"a","reason":"the model has 2048 positions"}
"""
LEAKED = "nanobind: leaked functions\n" * 20


def test_the_reason_is_found_before_what_libraries_write_as_they_end(tmp_path: Path) -> None:
    log = tmp_path / "engine-1-rank0.log"
    log.write_text(SAID + LEAKED)
    assert failure_reason(log) == "the model has 2048 positions"
    failed = StartFailed(InstanceId("engine-1-rank0"), "ended with status 2", log)
    assert str(failed) == f"engine-1-rank0 cannot serve: the model has 2048 positions\n  Its log is {log}."


def test_without_a_reason_the_last_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "tokenizer-1.log"
    assert failure_reason(log) is None
    log.write_text("first\n" * 20 + "tokenizer: no tokenizer.json there\n")
    failed = StartFailed(InstanceId("tokenizer-1"), "ended with status 2", log)
    assert failed.heading == f"tokenizer-1 ended with status 2. Its last words ({log}):"
    assert failed.last_lines[-1] == "tokenizer: no tokenizer.json there"
    assert "cannot serve" not in str(failed)
