"""`baton tune` on real stacks: one is started for each trial, measured by `bench serve`, and stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.cluster.stack import START_DEADLINE
from tests.support.paths import REPOSITORY

UP = "--device sim --kvstore-memory 64MiB --gateways 1 --set worker.sim_step_ms=1"
BENCH = "--dataset random --random-input-len 8 --random-output-len 8 --num-prompts 12 --max-concurrency 4"


def test_a_trial_is_a_stack_of_its_own(tmp_path: Path) -> None:
    search = ("--search", "max_num_seqs=4", "--search", "pd_ratio=1:1", "--gpus=2", "--goodput", "ttft:60000")
    command = [sys.executable, "-m", "deploy.cli", "tune", f"--out={tmp_path}", *search, "--up", UP, "--bench", BENCH]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * START_DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads((tmp_path / "result.json").read_text())["trials"]
    assert trial["failure"] is None
    assert trial["figures"]["completed"] == 12
    assert trial["figures"]["request_goodput"] > 0
    assert f"--prefill 1 --decode 1 --config {tmp_path}/best.toml" in done.stdout
    assert "max_num_seqs = 4" in (tmp_path / "best.toml").read_text()
