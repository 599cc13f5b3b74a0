"""`baton up --detach`: the same supervisor in the background; returns when it is ready."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from deploy.cli.errors import CommandError
from deploy.supervisor.state_file import is_held, read_state

LOOK_EVERY = 0.1


def start_in_background(run_dir: Path, argv: list[str]) -> None:
    """Shows what the supervisor says until it is ready. Raises CommandError where it ends before.

    It has deadlines of its own (`--start-timeout`), so there is none here.
    """
    if is_held(run_dir):
        raise CommandError(f"a stack runs in {run_dir} already (baton ps, baton down)")
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (run_dir / "up.log").open("wb") as output, (run_dir / "up.log").open("rb") as said:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(run_dir, supervisor, said)
        except KeyboardInterrupt:
            supervisor.terminate()
            raise


def _wait(run_dir: Path, supervisor: subprocess.Popen[bytes], said: BinaryIO) -> None:
    while not _is_up(run_dir, supervisor.pid, said):
        if supervisor.poll() is not None:
            _pass_on(said)
            raise CommandError("the stack did not start", status=supervisor.returncode or 1)
        time.sleep(LOOK_EVERY)
    _pass_on(said)


def _is_up(run_dir: Path, pid: int, said: BinaryIO) -> bool:
    _pass_on(said)
    state = read_state(run_dir)
    return state is not None and state.pid == pid and state.phase == "ready"


def _pass_on(said: BinaryIO) -> None:
    sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.flush()
