"""A stack in the background: started by `baton up --detach` or for one benchmark, ended by `baton down`."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from deploy.errors import CommandError
from deploy.supervisor.log_files import LogFolder, log_files
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.state_file import StackState, is_held, read_state
from shared.config import process_environment
from shared.private_files import private_opener

SHOW_EVERY = 0.1
STOP_POLL = 0.05
STOP_TIMEOUT = 120.0
"""Seconds; the supervisor has tighter deadlines of its own."""


def check_free(run_dir: Path) -> None:
    """Raises CommandError where a stack runs in the folder."""
    if is_held(run_dir):
        raise CommandError(
            f"a stack runs already in {run_dir} (baton ps, baton down); a second one needs --name and --port"
        )


def start_in_background(
    run_dir: Path, stack: StackSpec | Sequence[str], *, show: bool = True, environment: Mapping[str, str] | None = None
) -> None:
    """Shows what the supervisor says until it is ready, unless `show` is off. Raises CommandError where it ends before,
    with that text where it was not shown. `stack`: the words of a command line have the supervisor read them, for which
    it takes memory that it keeps (ADR 196). `environment` is added to what the stack inherits.

    It has deadlines of its own (`--start-timeout`), so there is none here.
    """
    check_free(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    ready_read, ready_write = os.pipe()
    with open(run_dir / "up.log", "wb", opener=private_opener) as output, (run_dir / "up.log").open("rb") as said:
        if isinstance(stack, StackSpec):
            program, described = ["deploy.cli.up", str(run_dir), str(ready_write)], pickle.dumps(stack)
        else:
            program, described = ["deploy.cli", *stack, f"--ready-fd={ready_write}"], None
        supervisor = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdin=subprocess.DEVNULL if described is None else subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**process_environment(), **(environment or {})},
            pass_fds=(ready_write,),
            start_new_session=True,
        )
        try:
            os.close(ready_write)
            if described is not None and supervisor.stdin is not None:
                with contextlib.suppress(BrokenPipeError), supervisor.stdin as pipe:  # it says itself why it ended
                    pipe.write(described)
            _wait(supervisor, ready_read, said, show)
        except KeyboardInterrupt:
            supervisor.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(STOP_TIMEOUT)
            raise
        finally:
            os.close(ready_read)


def _wait(supervisor: subprocess.Popen[bytes], ready: int, said: BinaryIO, show: bool) -> None:
    """The supervisor writes to `ready` once everything is up; the pipe's end without that is its own end."""
    while not select.select([ready], [], [], SHOW_EVERY)[0]:
        if show:
            _pass_on(said)
    is_up = os.read(ready, 1) != b""
    if not is_up:
        supervisor.wait()
    if show:
        _pass_on(said)
    if not is_up:
        words = said.read().decode(errors="replace").strip()  # nothing where it was shown
        raise CommandError("the stack did not start" + (f":\n{words}" if words else ""), supervisor.returncode or 1)


def _pass_on(said: BinaryIO) -> None:
    sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.flush()


def stop_stack(state: StackState, run_dir: Path, *, now: bool) -> None:
    """Returns when the supervisor, and with it everything, is gone. Raises CommandError."""
    for _ in range(2 if now else 1):
        _ask(state.pid)
        time.sleep(STOP_POLL)
    deadline = time.monotonic() + STOP_TIMEOUT
    while is_held(run_dir):
        if time.monotonic() > deadline:
            raise CommandError(f"stack {state.name} has not ended within {STOP_TIMEOUT:g} s; try: baton down --now")
        time.sleep(STOP_POLL)


def _ask(pid: int) -> None:
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise CommandError(f"process {pid} belongs to somebody else") from None


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Within the context what ends this process at once raises KeyboardInterrupt, as Ctrl-C does: what is left open
    is closed. Outside of the main thread, where Python takes no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stack_for_the_run(argv: list[str], keep_logs: Path | None = None) -> Iterator[StackState]:
    """Ended with the context, also where a signal ends this process in order. What its processes said is written to
    `keep_logs`. Raises CommandError where it does not start."""
    with _interrupted_by_signals(), tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        run_dir = Path(folder)
        try:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # what is measured alone goes to stdout, for scripts
                    start_in_background(run_dir, ["up", "--port=0", *argv, "--run-dir", folder])
                state = read_state(run_dir)
                if state is None:
                    raise CommandError("the stack ended as soon as it was ready")
                yield state
            finally:
                if is_held(run_dir) and (running := read_state(run_dir)) is not None:
                    stop_stack(running, run_dir, now=True)
        finally:
            if keep_logs is not None:
                said = (path.read_bytes() for path in log_files(LogFolder(run_dir).folder))
                with open(keep_logs, "wb", opener=private_opener) as kept:
                    kept.writelines(said)
