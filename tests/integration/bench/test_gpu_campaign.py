"""`baton bench gpu` as one types it, on this machine's processor and with small shapes: every stage, real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.paths import REPOSITORY


def campaign(out: Path, *flags: str, seconds: float) -> tuple[str, dict[str, Any]]:
    """What it says, and its stages' reports."""
    command = [sys.executable, "-m", "deploy.cli", "bench", "gpu", "--size", "tiny", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, (out / "log.txt").read_text()[-4000:] + done.stdout + done.stderr
    report = msgspec.json.decode((out / "report.json").read_bytes())
    assert [stage["wrong"] for stage in report["stages"]] == [[]] * len(report["stages"])
    return done.stdout, {stage["name"]: stage["results"] for stage in report["stages"]}


def test_one_stage_alone(tmp_path: Path) -> None:
    said, found = campaign(tmp_path, "--stage", "idle", seconds=110)
    assert [(each["run_ahead"], each["sequences"]) for each in found["idle"]["idle-sim"]["idle"]] == [
        (2, 1),
        (2, 2),
        (0, 1),
        (0, 2),
    ]
    assert "| demo on sim: 2 sequences, run-ahead 2 |" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "report.json", "report.md"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage(tmp_path: Path) -> None:
    said, found = campaign(tmp_path, "--stage", "tests,roofline,kernels,serve,peers,idle,graphs", seconds=880)
    assert set(found) == {"tests", "roofline", "kernels", "serve", "peers", "idle", "graphs"}
    assert all(found.values())
    greedy = found["peers"]["peers"]["greedy"]
    assert greedy["equal"] == greedy["prompts"] > 0, "in float32 both have the same tokens"
    assert found["serve"]["serve"]["transformers"] is None
    for line in ("demo: decode 2 × 64", "demo: norms", "transformers", "graphs: decode 1 × 64", "run eagerly"):
        assert line in said
    assert len(list(tmp_path.iterdir())) <= 8
    assert (tmp_path / "roofline-demo.png").stat().st_size > 1000
