"""A supervisor process over tiny services, for tests: started, watched, and gone for certain at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from deploy.supervisor.log_files import last_lines
from deploy.supervisor.processes import ProcessIdentity, marked_processes
from deploy.supervisor.servers.arenas import remove_leftovers
from deploy.supervisor.state_file import StackState, read_state
from tests.support.cluster.stack import die_with_parent
from tests.support.paths import REPOSITORY

DEADLINE = 90.0


def described(pid: int) -> str:
    """Its command line, its state, and where in the kernel each of its threads waits."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        waiting = [path.read_text() for path in sorted(Path(f"/proc/{pid}/task").glob("*/wchan"))]
        return f"{pid} {process.status()}, waits in {waiting}: {' '.join(process.cmdline())}"
    return f"{pid} has just ended"


class TinyStack:
    """Owns a supervisor process over tiny services; everything is gone after `destroy`."""

    def __init__(self, run_dir: Path, **spec: object) -> None:
        self.run_dir = run_dir
        self._spec = run_dir.with_suffix(".json")
        described = {"name": "tiny", "run_dir": str(run_dir), "model": "/", "served_model_name": "m", "port": 0}
        described |= {"host": "127.0.0.1", "namespace": "baton", "log_level": "info"}
        described |= {"drain_timeout": 5.0, "start_timeout": 600.0, "orphan_timeout": 120.0}
        self._spec.write_bytes(msgspec.json.encode(described | spec))
        self._seen: set[ProcessIdentity] = set()
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.tiny_stack", str(self._spec)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def kill_supervisor(self) -> None:
        """Kills it and waits for its end; everything else goes on."""
        assert self.state is not None
        self.process.kill()
        self.process.wait()

    def start_supervisor(self) -> None:
        """Once more; it may still be starting."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = self._started()

    @property
    def state(self) -> StackState | None:
        state = read_state(self.run_dir)
        if state is not None:
            self._seen.update(state.processes.values())
        return state

    def pid(self, instance: str) -> int | None:
        state = self.state
        return next((m.pid for m in state.members if m.instance == instance), None) if state else None

    def instances(self) -> set[str]:
        state = self.state
        return {member.instance for member in state.members} if state else set()

    def until(self, condition: Callable[[StackState], bool]) -> StackState:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            state = self.state
            if state is not None and condition(state):
                return state
            assert self.process.poll() is None, self.said()
            time.sleep(0.02)
        raise AssertionError(f"not within {DEADLINE} s: {self.state}")

    def ready(self) -> StackState:
        return self.until(lambda state: state.phase == "ready")

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def ended(self) -> int:
        return self.process.wait(DEADLINE)

    def living(self) -> list[ProcessIdentity]:
        """Whatever this stack ever started and is still there."""
        self._seen.update(identity for _, identity in marked_processes(self.run_dir))
        return [identity for identity in self._seen if identity.lives]

    def kill_everything(self) -> None:
        """The supervisor first."""
        self.kill_supervisor()
        self._kill_living()

    def _kill_living(self) -> None:
        for identity in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, signal.SIGKILL)

    def until_nobody_is_left(self) -> None:
        """Raises AssertionError, with what those are doing that are left."""
        deadline = time.monotonic() + DEADLINE
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [described(identity.pid) for identity in self.living()]
        logs = self.run_dir / "logs"
        words = [line for name in ("supervisor", "keeper") for line in last_lines(logs / f"{name}.log", 20)]
        assert not left, "\n".join([f"left after {DEADLINE} s:", *left, *words])

    def destroy(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._kill_living()
        remove_leftovers(self.run_dir)
