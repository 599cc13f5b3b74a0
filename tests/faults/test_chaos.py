"""Half a minute of `baton chaos`: whatever it strikes, no stream is lost or altered, and nothing stays held; and some
of its hostile clients, of whom `make hostile` has all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.supervisor.state_file import read_state
from tests.support.cluster.stack import die_with_parent
from tests.support.paths import REPOSITORY

DEADLINE = 420.0
FAULTS = "--faults=kill,stop,pause,cut,silent,redis-session,scale-drain,bad-requests,clock-jump,weights-truncated"
STACK = ("--engines=2", "--kvstore-memory=64MiB", "--redis", "--device=cpu", "--wait-for-engines-s=60")
LOAD = ("--duration=30", "--streams=6", "--tokens=50", "--seed=1")


HOSTILE = ("json", "half-closed", "no-http", "cut-uploads", "many-outputs", "images")


def run_chaos(run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Ends the stack, too, if the command itself hangs."""
    baton = [sys.executable, "-m", "deploy.cli"]
    command = [*baton, "chaos", *options, f"--run-dir={run_dir}", "--json"]
    try:
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE, preexec_fn=die_with_parent
        )
    finally:
        if read_state(run_dir) is not None:
            subprocess.run([*baton, "down", "--now", f"--run-dir={run_dir}"], cwd=REPOSITORY, check=False)


@pytest.mark.timeout(DEADLINE + 60)
@pytest.mark.features("re-dispatch")
def test_no_stream_is_lost_or_altered_and_nothing_stays_held(tmp_path: Path) -> None:
    done = run_chaos(tmp_path / "stack", FAULTS, *LOAD, *STACK)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == 0, (found["problems"], done.stderr)
    assert found["rounds"] > 0
    assert (found["lost"], found["altered"], found["leaks"], found["bugs"], found["unready"]) == (0, 0, 0, 0, [])
    assert found["streams"] == sum(row["equal"] + row["errors"] for row in found["matrix"])
    assert all(row["errors"] == 0 for row in found["matrix"] if row["target"] != "gateway")
    assert read_state(tmp_path / "stack") is None, "its stack is still there"


@pytest.mark.timeout(DEADLINE + 60)
def test_hostile_clients_harm_nobody_and_everything_is_given_back(tmp_path: Path) -> None:
    faults = f"--faults={','.join(f'hostile:{name}' for name in HOSTILE)}"
    stack = ("--engines=1", "--kvstore-memory=64MiB", "--device=cpu")
    done = run_chaos(tmp_path / "stack", faults, "--passes=1", "--streams=2", "--tokens=40", *stack)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == 0, (found["problems"], done.stderr)
    assert {row["target"] for row in found["matrix"]} == {*HOSTILE}
    assert found["streams"] == sum(row["equal"] for row in found["matrix"])
    answers = {note.split(": ")[0]: note.split(": ")[1] for note in found["notes"]}
    assert all(" x 4" in answers[f"hostile {name}"] for name in ("json", "no-http", "many-outputs", "images")), answers
    assert "12 x 200" in answers["hostile many-outputs"], "what was within its limits is answered"
