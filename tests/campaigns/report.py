"""The report of a campaign: a few files, written anew after every stage, so that nothing is lost when time is over."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from services.bench.report import write_json
from tests.campaigns.aims import Row, rows
from tests.campaigns.running import Ended
from tests.campaigns.stages import StageName

_MOST_LOG = 2 * 2**20
"""Bytes of a run's output that are kept, its end."""
_CAPTURES = re.compile(rb"decodes captured|captured decodes|blocks of KV memory|backend ready")
_COUNTED = ("tests", "failures", "errors", "skipped")


class StageReport(Struct, frozen=True, kw_only=True):
    name: StageName
    seconds: float
    wrong: list[str]
    """What went wrong, run by run."""
    results: dict[str, Any]
    """What each run wrote."""
    told: dict[str, list[str]]
    """The workers' log lines on captured decodes and memory."""


class Report(Struct, frozen=True, kw_only=True):
    stages: list[StageReport]


class ReportFolder:
    """Owns the files: report.json, report.md, log.txt and pictures. Stages that were run before stay in them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._stages: dict[str, StageReport] = {}
        former = folder / "report.json"
        if former.is_file():
            known = msgspec.json.decode(former.read_bytes(), type=Report)
            self._stages = {stage.name: stage for stage in known.stages}

    def add(self, stage: StageReport, files: Path) -> None:
        """`files`: what its runs wrote."""
        self._stages[stage.name] = stage
        for picture in files.glob("*.png"):
            shutil.copyfile(picture, self._folder / picture.name)
        with (self._folder / "log.txt").open("ab") as log:
            for said in sorted(files.glob("*.txt")):
                log.write(f"\n===== {stage.name}: {said.stem}\n".encode() + said.read_bytes()[-_MOST_LOG:])
        report = Report(stages=list(self._stages.values()))
        write_json(self._folder / "report.json", msgspec.to_builtins(report))
        (self._folder / "report.md").write_text(self.text())

    def text(self) -> str:
        """Measurements beside their targets; then the failures."""
        results = {name: found for stage in self._stages.values() for name, found in stage.results.items()}
        lines = ["| measured | | aim | |", "|---|---|---|---|", *(_line(row) for row in rows(results)), ""]
        for stage in self._stages.values():
            lines.append(f"{stage.name}: {stage.seconds:.0f} s{''.join(f'; {wrong}' for wrong in stage.wrong)}")
            lines += [f"    {line}" for said in stage.told.values() for line in said]
        return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    met = "" if row.met is None else "met" if row.met else "**missed**"
    return f"| {row.what} | {row.measured} | {row.aim} | {met} |"


def stage_report(name: StageName, ended: Sequence[tuple[str, Ended]], wrong: Sequence[str], files: Path) -> StageReport:
    """From what its runs wrote to `files`."""
    said = [f"{run} {end.said}" for run, end in ended if end.said is not None]
    results = {path.stem: msgspec.json.decode(path.read_bytes()) for path in sorted(files.glob("*.json"))}
    if (files / "tests.xml").is_file():
        results["tests"] = _counts(files / "tests.xml")
    return StageReport(
        name=name,
        seconds=sum(end.seconds for _, end in ended),
        wrong=[*said, *wrong],
        results=results,
        told={path.stem: told_of_captures(path.read_bytes()) for path in sorted(files.glob("*.log"))},
    )


def told_of_captures(log: bytes) -> list[str]:
    """The last log line of each kind on the cost of capturing and of keys and values."""
    last = {found.group(): line for line in log.splitlines() if (found := _CAPTURES.search(line)) is not None}
    return [line.decode(errors="replace") for line in last.values()]


def _counts(path: Path) -> dict[str, int]:
    suites = [suite.attrib for suite in ElementTree.parse(path).getroot().iter("testsuite")]
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in _COUNTED}
