"""`baton bench gpu`: everything that is to be measured on a GPU, stage by stage, into one folder."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.campaigns.report import ReportFolder, stage_report
from tests.campaigns.running import Ended, adopt_orphans, end_all, run
from tests.campaigns.stages import Size, Stage, StageName, left_to_itself, stages

_LEAST_SECONDS = 10.0
"""For which a run is worth being begun."""
_MOST_OF_ONE = 0.65
"""Of the time that a stage has left, where others of its runs follow."""


def run_gpu(argv: Sequence[str]) -> None:
    """Raises SystemExit: for invalid flags, and with status 1 if something failed."""
    options = _parsed(argv)
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that children hear it though a shell ignores it
    report, end = ReportFolder(options.out), time.monotonic() + 60 * options.minutes
    wrong = False
    try:
        with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
            for stage in _chosen(options.size, options.stage, Path(scratch)):
                files = Path(scratch) / stage.name
                print(f"{stage.name} …", flush=True)
                ended, left_out = _run(stage, files, end)
                found = stage_report(stage.name, ended, left_out, files)
                report.add(found, files)
                wrong |= bool(found.wrong)
                print(f"{stage.name}: {found.seconds:.0f} s, {'; '.join(found.wrong) or 'done'}", flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        end_all()
    print(f"\n{report.text()}\nin {options.out}: report.md, report.json, log.txt, pictures")
    raise SystemExit(int(wrong))


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("baton bench gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Stages found there already are kept.")
    parser.add_argument(
        "--stage", type=_names, metavar="NAME,NAME", help=f"By default all but serve: {', '.join(get_args(StageName))}"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="For everything; what has no time is left out.")
    parser.add_argument(
        "--size", choices=get_args(Size), default="full", help="tiny: small shapes on a CPU, to see that it all works."
    )
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = next((name for name in names if name not in get_args(StageName)), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"{unknown!r} is none of {', '.join(get_args(StageName))}")
    return names


def _chosen(size: Size, names: Sequence[str] | None, scratch: Path) -> list[Stage]:
    """In the order of their names, if there are any. Each has a folder of its own."""
    found = {}
    for name in get_args(StageName):
        folder = scratch / name
        folder.mkdir()
        found[name] = next(stage for stage in stages(size, folder) if stage.name == name)
    return [found[name] for name in names or [each for each in found if not left_to_itself(each)]]


def _run(stage: Stage, files: Path, end: float) -> tuple[list[tuple[str, Ended]], list[str]]:
    """How its runs ended, and which were left out. One that fails or hangs does not prevent the others."""
    ended, left_out = [], []
    stage_end = min(end, time.monotonic() + stage.seconds)
    for each in stage.runs:
        left = (stage_end - time.monotonic()) * (1.0 if each is stage.runs[-1] else _MOST_OF_ONE)
        if left < _LEAST_SECONDS:
            left_out.append(f"{each.name} left out: no time")
            continue
        ended.append((each.name, run(each.argv, left, files / f"{each.name}.txt")))
    return ended, left_out
