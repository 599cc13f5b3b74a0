"""What a supervisor that was killed left running, and how its successor goes on with it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.supervisor import Supervisor
from deploy.supervisor.processes import ProcessIdentity, marked_processes
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.state_file import StackState, last_state
from deploy.supervisor.template.link import SERVICE_TEMPLATE, TEMPLATE
from shared.ids import InstanceId

END_DEADLINE = 5.0
"""Seconds that a process gets of which nothing is known but that it is of this stack."""
END_POLL = 0.02
OWN_SETTINGS = frozenset({"gpus", "start_timeout", "log_level", "start_method", "ksm", "max_instances"})
"""What concerns the supervisor alone; all else the processes of the former one were started with."""


class StackDiffers(Exception):
    """Processes of a killed supervisor live on, and were started with other settings; the text names these."""


class LeftStack(NamedTuple):
    """A stack without its supervisor."""

    state: StackState
    """As its supervisor wrote it last."""
    living: Mapping[str, ProcessIdentity]
    """By name; also those that were started after that."""
    surplus: tuple[ProcessIdentity, ...]
    """Second processes of a name, and the templates."""

    def check_same(self, spec: StackSpec) -> None:
        """Raises StackDiffers where `spec` is another stack than the one that was left."""
        old, new = msgspec.structs.asdict(self.state.spec), msgspec.structs.asdict(spec)
        different = sorted(name for name in new if new[name] != old[name] and name not in OWN_SETTINGS)
        if different:
            raise StackDiffers(
                f"{len(self.living)} processes of stack {self.state.name!r} go on without their supervisor, with other "
                f"settings ({', '.join(different)}): start with the same ones to take them over, or end them first "
                "(baton down)"
            )

    def adopted_by(
        self,
        supervisor: Supervisor,
        kill_after: float,
        elsewhere: Mapping[InstanceId, int] = MappingProxyType({}),
        *,
        ends: bool = False,
    ) -> list[str]:
        """Puts the processes into a supervisor's core; the names of those that it is to hear have ended. A stack that
        was stopping is one that is to run again; `kill_after` is when who was asked to end is killed, `elsewhere` the
        pids of processes that live on other machines. `ends`: it is there to end all of
        them, and those that have ended are no news."""
        planned = {member.process.instance: member for member in supervisor.members()}
        former = {record.instance: record.member() for record in self.state.members}
        members = {**former, **planned} if self.state.phase == "stopping" else former
        gone: list[str] = []
        for name, member in members.items():
            before = former.get(name)
            alive = self.living.get(name)
            pid = elsewhere.get(name, alive and alive.pid)
            _resume(member, None if ends and pid is None else before, pid, kill_after)
            if member.state != "waiting" and name not in self.living and name not in elsewhere:
                gone.append(name)
        supervisor.adopt(members.values(), settled=self.state.phase != "starting", requested=self.state.rendezvous)
        return gone


def _resume(member: SupervisedProcess, before: SupervisedProcess | None, pid: int | None, kill_after: float) -> None:
    member.state = before.state if before is not None else "waiting"
    if pid is not None and member.state == "waiting":  # started, and not written down any more
        member.state = "running"
    if member.state == "waiting":
        return
    if before is None or pid is None or pid != before.pid:
        member.ready_since = None
    member.pid = pid
    member.deadline = kill_after if member.state == "ending" else None


def left_stack(run_dir: Path) -> LeftStack | None:
    """What goes on here without a supervisor; None where nothing does, or nothing is known of it."""
    state = last_state(run_dir)
    if state is None:
        return None
    living, surplus = state.living(), list[ProcessIdentity]()
    for name, identity in _others(run_dir):
        if name in (TEMPLATE, SERVICE_TEMPLATE) or living.setdefault(name, identity) != identity:
            surplus.append(identity)
    living = {name: identity for name, identity in living.items() if identity.pid != os.getpid()}
    return LeftStack(state, living, tuple(surplus)) if living else None


def end_strays(run_dir: Path) -> None:
    """Ends all processes that were started for a run directory, in no order; for those that no state file explains."""
    strays = [identity for _, identity in _others(run_dir)]
    end_processes(strays)


def end_processes(processes: list[ProcessIdentity]) -> None:
    """SIGTERM, and SIGKILL to who is still there after END_DEADLINE; and to what each leaves of its group, as a shell
    its command."""
    living = [each for each in processes if each.lives]
    for each in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGTERM)
    _wait_for_end(living)
    for each in living:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(each.pid, signal.SIGKILL)
    _wait_for_end(living)


def _wait_for_end(processes: list[ProcessIdentity]) -> None:
    deadline = time.monotonic() + END_DEADLINE
    while any(each.lives for each in processes) and time.monotonic() < deadline:
        time.sleep(END_POLL)


def _others(run_dir: Path) -> Iterator[tuple[str, ProcessIdentity]]:
    """Not this process, which a keeper may have become."""
    return (each for each in marked_processes(run_dir) if each[1].pid != os.getpid())
