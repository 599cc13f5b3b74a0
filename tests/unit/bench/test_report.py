"""Every benchmark's result has the same head, as JSON and in a file, and its tables are Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.bench.__main__ import BENCHMARKS, main
from services.bench.engine.idle import idle_options
from services.bench.options import output_options
from services.bench.report import OutputOptions, Report, Table, command_line, commit


def options(path: Path | None = None, *, json: bool = False) -> OutputOptions:
    return OutputOptions(path, json, False, False, "mine", "bench x --flag 1")


def test_a_result_says_what_was_measured_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(options(tmp_path / "made" / "result.json", json=True))
    report.show("not beside JSON")
    report.end({"figure": 1.5}, "a table")
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "made" / "result.json").read_text())
    assert list(printed) == ["command", "date", "label", "machine", "commit", "figure"]
    assert (printed["command"], printed["label"], printed["figure"]) == ("bench x --flag 1", "mine", 1.5)
    assert printed["machine"]["cores"] >= 1
    assert printed["commit"] == commit()


def test_text_is_printed_as_it_comes_and_what_is_known_so_far_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(options(tmp_path / "result.json"))
    report.show("first")
    report.keep({"rows": [1]})
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [1]
    report.end({"rows": [1, 2]}, "last")
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [1, 2]
    assert capsys.readouterr().out == "first\nlast\n"


def test_a_table_is_markdown_with_numbers_to_the_right() -> None:
    assert Table(("name", "s"), [("a", "1.5"), ("longer", "12.5")]).lines() == [
        "| name   |    s |",
        "| ------ | ---: |",
        "| a      |  1.5 |",
        "| longer | 12.5 |",
    ]


def test_a_command_is_kept_without_secrets() -> None:
    typed = ["--api-key=hunter2", "--redis-url", "redis://user:word@host/0"]
    assert command_line("bench kv", typed, "hunter2") == "bench kv --api-key=*** --redis-url redis://***@host/0"


def test_every_benchmark_has_a_help_that_names_the_same_output_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        for flag in ("--json", "--output-json", "--label"):
            assert flag in said, name


def test_what_only_the_command_knows_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_options(idle_options(["--label", "x"])).label == "x"
    assert main(["idle", "--devices=sim"]) == 1
    assert main(["speculation"]) == 1
    assert "baton bench" in capsys.readouterr().err
