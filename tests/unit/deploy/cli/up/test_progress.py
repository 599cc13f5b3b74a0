"""What is shown while a stack starts: of each process what its own log says that it is at."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from deploy.cli.up.progress import LiveDisplay, PlainDisplay, PlainOutput, ProcessRow, StartStages, described
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import ProcessSpec
from shared.ids import InstanceId
from shared.telemetry.startup import STAGE_BEGUN


def begun(stage: str) -> str:
    return json.dumps({"time": "2026-11-26T12:00:00.000Z", "event": STAGE_BEGUN, "stage": stage}) + "\n"


def test_a_stage_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "engine-1-rank0.log"
    stages = StartStages(lambda name: tmp_path / f"{name}.log", 1_234_567_890)
    assert stages.of("engine-1-rank0") is None
    log.write_text(f"no JSON {STAGE_BEGUN}\n" + begun("libraries") + begun("weights")[:40])
    assert stages.of("engine-1-rank0") == "importing PyTorch"
    with log.open("a") as file:
        file.write(begun("weights")[40:])
    assert stages.of("engine-1-rank0") == "reading weights (1,235 MB)"
    with log.open("a") as file:
        file.write(begun("set_up"))
    assert stages.of("engine-1-rank0") is None
    assert stages.of("engine-1") is None


def test_a_process_that_runs_or_waits_is_at_no_stage() -> None:
    member = SupervisedProcess(ProcessSpec("worker", InstanceId("engine-1-rank0"), 1, None))
    assert described(member, "warming up") == "waiting"
    member.move("running")
    assert described(member, "warming up") == "warming up"
    assert described(member, None) == "loading"


def test_lines_are_printed_when_something_changes_and_a_table_has_the_time_of_what_each_is_at() -> None:
    shown = [
        (0.0, [ProcessRow("a", "loading"), ProcessRow("b", "warming up")]),
        (1.5, [ProcessRow("a", "ready"), ProcessRow("b", "warming up")]),
        (2.0, [ProcessRow("a", "ready"), ProcessRow("b", "warming up")]),
    ]
    lines, drawn = io.StringIO(), io.StringIO()
    plain = PlainDisplay(PlainOutput(lines))
    table = LiveDisplay(Console(file=drawn, width=80, force_terminal=True, color_system=None))
    for seconds, rows in shown:
        plain.show(rows, seconds)
        table.show(rows, seconds)
    table.close()
    assert [line.split() for line in lines.getvalue().splitlines()] == [
        ["0.0", "s", "a", "loading"],
        ["0.0", "s", "b", "warming", "up"],
        ["1.5", "s", "a", "ready"],
    ]
    last = drawn.getvalue().rpartition("●")[2].split()
    assert last[:3] == ["a", "ready", "1.5"]
    assert last[last.index("up") + 1] == "2.0"


def test_what_is_no_terminal_gets_words_without_their_tags_and_commands_as_they_are() -> None:
    lines = io.StringIO()
    output = PlainOutput(lines)
    output.print("\n[green]Ready[/green]: [bold]http://[::1]:8000[/bold]", style="dim")
    output.print("curl -d '[bold]'", markup=False)
    assert lines.getvalue() == "\nReady: http://[::1]:8000\ncurl -d '[bold]'\n"
