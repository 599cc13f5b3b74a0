"""`baton up --detach`: the same supervisor in the background; returns when it is ready."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from deploy.cli.errors import CommandError
from deploy.supervisor.state_file import is_held

LOOK_EVERY = 0.1


def start_in_background(run_dir: Path, argv: list[str]) -> None:
    """Shows what the supervisor says until it is ready. Raises CommandError where it ends before.

    It has deadlines of its own (`--start-timeout`), so there is none here.
    """
    if is_held(run_dir):
        raise CommandError(f"a stack runs in {run_dir} already (baton ps, baton down)")
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    ready_read, ready_write = os.pipe()
    with (run_dir / "up.log").open("wb") as output, (run_dir / "up.log").open("rb") as said:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *argv, f"--ready-fd={ready_write}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(ready_write,),
            start_new_session=True,
        )
        os.close(ready_write)
        try:
            _wait(supervisor, ready_read, said)
        except KeyboardInterrupt:
            supervisor.terminate()
            raise
        finally:
            os.close(ready_read)


def _wait(supervisor: subprocess.Popen[bytes], ready: int, said: BinaryIO) -> None:
    """The supervisor writes to `ready` once everything is up; the pipe's end without that is its own end."""
    while not select.select([ready], [], [], LOOK_EVERY)[0]:
        _pass_on(said)
    is_up = os.read(ready, 1) != b""
    if not is_up:
        supervisor.wait()
    _pass_on(said)
    if not is_up:
        raise CommandError("the stack did not start", status=supervisor.returncode or 1)


def _pass_on(said: BinaryIO) -> None:
    sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.flush()
