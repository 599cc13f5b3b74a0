"""`baton bench profile` on a whole stack with a simulated device, and `baton plan --profile` with what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from shared.models.profile_file import read_profile
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY

STEP_MS = 10
DEADLINE = 60.0
GRID = ("--prompt-lengths", "16,1024,1500", "--batch-sizes", "1,4", "--context-lengths", "64,256", "--output-len", "24")


def test_an_engine_is_profiled_and_the_planner_computes_with_that(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    more = (f"--sim-step-ms={STEP_MS}", "--max-batch-tokens=1024")
    with running_stack(tmp_path / "stack", device="sim", more=more, kvstore="0") as stack:
        done = stack.baton("bench", "profile", *GRID, "--repetitions", "2", "--output-json", str(file))
        assert done.returncode == 0, done.stderr
        assert "| ITL ms; batch size |" in done.stdout
        decision = first_decision(stack, file)
        busy = stack.baton("bench", "profile", "--batch-sizes", "1,9999")
    assert busy.returncode == 1
    assert "--batch-sizes 1,9999: from 1 to " in busy.stderr
    profile = read_profile(file)
    assert profile.engine.max_batch_tokens == 1024
    short, chunk, longer = (point.seconds * 1000 for point in profile.prefill)
    assert min(short, chunk) >= STEP_MS, "a step takes no less"
    assert longer >= 2 * STEP_MS, "two steps"
    assert {(point.batch_size, point.context_tokens) for point in profile.decode} == {
        (1, 64),
        (1, 256),
        (4, 64),
        (4, 256),
    }
    assert all(point.itl_seconds * 1000 > 0.9 * STEP_MS for point in profile.decode)
    assert decision["profile"] == "measured", decision
    assert decision["profile_note"] == ""


def first_decision(stack: RunningStack, file: Path) -> dict[str, object]:
    """Of a planner with that profile."""
    flags = ("--profile", str(file), "--itl-ms", "30", "--interval-s", "0.5", "--json")
    command = [sys.executable, "-m", "deploy.cli", "plan", "--run-dir", str(stack.run_dir), *flags]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as planner:
        assert planner.stdout is not None
        late = threading.Timer(DEADLINE, planner.kill)
        late.start()
        try:
            said = planner.stdout.readline()
        finally:
            late.cancel()
            planner.terminate()
    found: dict[str, object] = json.loads(said)
    return found
