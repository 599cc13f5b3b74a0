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

from deploy.supervisor.servers.arenas import remove_leftovers
from deploy.supervisor.state_file import StackState, read_state
from tests.support.paths import REPOSITORY

DEADLINE = 90.0


class TinyStack:
    """Owns a supervisor process over tiny services; everything is gone after `destroy`."""

    def __init__(self, run_dir: Path, **spec: object) -> None:
        self.run_dir = run_dir
        self._spec = run_dir.with_suffix(".json")
        described = {"name": "tiny", "run_dir": str(run_dir), "model": "/", "served_model_name": "m", "port": 0}
        described |= {"host": "127.0.0.1", "namespace": "baton", "log_level": "info"}
        described |= {"drain_timeout": 5.0, "start_timeout": 600.0}
        self._spec.write_bytes(msgspec.json.encode(described | spec))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tiny_stack", str(self._spec)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._seen: set[int] = set()

    @property
    def state(self) -> StackState | None:
        state = read_state(self.run_dir)
        if state is not None:
            pids = [member.pid for member in state.members] + [state.nats_pid, state.redis_pid]
            self._seen.update(pid for pid in pids if pid is not None)
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

    def living(self) -> list[psutil.Process]:
        """Whatever this stack ever started and is still there."""
        found = []
        for pid in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def nobody_left(self) -> bool:
        deadline = time.monotonic() + DEADLINE
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.living()

    def destroy(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for process in self.living():
            process.kill()
        remove_leftovers(self.run_dir)
