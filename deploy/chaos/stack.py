"""The stack that is taken apart: one of chaos's own, in a run directory of its own. No other stack is touched."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal, get_args

from deploy.chaos.clock import FakeClock, faketime_library
from deploy.chaos.model_copy import ModelCopy
from deploy.chaos.namespaces import mount_small_disk, set_link, unmount
from deploy.chaos.proxy import HOST, BusProxy
from deploy.errors import CommandError
from deploy.supervisor.background import start_in_background
from deploy.supervisor.log_files import log_files
from deploy.supervisor.orphans import end_stack
from deploy.supervisor.processes import ProcessIdentity, start_time
from deploy.supervisor.state_file import MemberRecord, StackState, read_state
from shared.machine.home import expanded
from shared.messages.lifecycle import Service

SUPERVISOR = "supervisor"
ORPHAN_TIMEOUT = "--orphan-timeout=60"
"""Longer than a supervisor is away, and short where chaos itself was killed."""
DISK_SIZE = "128m"
"""Of which logs take a third of a MiB a minute."""
BUG = b"Traceback (most recent call last)"


Need = Literal["proxy", "model copy", "namespaces", "disk", "clock"]
"""proxy: its bus is behind one. model copy: its model's files can be broken. namespaces: it has a network and mounts of
its own. disk: its run directory is on a small disk, which takes namespaces. clock: theirs can be put off."""


class ChaosStack:
    """Owns one `baton up` in the background, and starts its supervisor again where that was killed."""

    proxy: BusProxy
    """Before its bus; there only where that was asked for."""

    def __init__(
        self,
        run_dir: Path,
        argv: Sequence[str],
        needs: frozenset[Need] = frozenset(),
        model_copy: ModelCopy | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        """`argv`: options of `baton up`, without the model where that is a copy."""
        self.run_dir = run_dir
        self.has_namespaces = "namespaces" in needs
        self.model_copy = model_copy
        """What it serves, if that can be broken."""
        self.clock = clock
        """Of its processes, if that can be changed."""
        self._behind_proxy = "proxy" in needs
        self.complaints: list[str] = []
        """What a fault itself found wrong, until the round is over."""
        self.notes: list[str] = []
        """What else it has to say of the round."""
        self._argv = ["up", "--port=0", ORPHAN_TIMEOUT, *argv, "--run-dir", str(run_dir)]
        if model_copy is not None:
            self._argv.append(f"--model={model_copy.folder}")

    def start(self) -> None:
        """Returns when it is ready; also takes over what a killed supervisor left. Raises CommandError."""
        environment = self.clock.environment() if self.clock is not None else None
        start_in_background(self.run_dir, self._argv, show=False, environment=environment)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started, and its bus behind the proxy if that is wanted, until the context ends; `end` is the caller's.
        Raises CommandError."""
        if self._behind_proxy:
            self.proxy = BusProxy(lambda: self.state.nats_port)
            url = f"nats://{HOST}:{await self.proxy.start()}"
            # Of each service: for all of them together it would be a bus that somebody else has started.
            self._argv += [f"--set={service}.nats_url={url}" for service in get_args(Service)]
        try:
            await asyncio.to_thread(self.start)
            yield
        finally:
            if self._behind_proxy:
                await self.proxy.close()

    def end(self) -> None:
        """Nothing of it is left afterwards but its logs. Raises CommandError."""
        end_stack(self.run_dir, now=True)

    @property
    def state(self) -> StackState:
        """As of now. Raises CommandError where all of it has ended."""
        state = read_state(self.run_dir)
        if state is None:
            raise CommandError(f"the stack has ended; its logs: {self.run_dir / 'logs'}")
        return state

    def member(self, name: str) -> MemberRecord | None:
        """The process of a service; None for a server, or the supervisor."""
        return next((member for member in self.state.members if member.instance == name), None)

    def identity(self, name: str) -> ProcessIdentity | None:
        """The living process of that name; None where none is there just now."""
        state = self.state
        found = state.processes.get(name)
        if name == SUPERVISOR:
            found = ProcessIdentity(state.pid, start_time(state.pid) or 0.0)
        return found if found is not None and found.lives else None

    def signal(self, name: str, number: signal.Signals) -> ProcessIdentity | None:
        """Sends it to the process of that name; which one that was, None where none is there."""
        identity = self.identity(name)
        if identity is not None:
            send(identity, number)
        return identity

    def peers(self, name: str) -> int:
        """How many processes do the same as this one, itself included; ranks count as one with their engine."""
        member = self.member(name)
        if member is None:
            return 1
        same = [each for each in self.state.members if each.service == member.service and each.wanted]
        return len({each.engine or each.instance for each in same if each.pool == member.pool})

    def engines(self) -> set[str]:
        """Of every kind, by name."""
        return {each.engine for each in self.state.members if each.engine is not None and each.wanted}

    def bugs(self) -> int:
        """Exceptions that no code expected, in all logs so far: they end their process, and its work is repeated."""
        return sum(path.read_bytes().count(BUG) for path in log_files(self.run_dir / "logs"))


def send(identity: ProcessIdentity, number: signal.Signals) -> None:
    """Signals this very process, and none that has its pid by now."""
    if identity.lives:
        with suppress(ProcessLookupError):
            os.kill(identity.pid, number)


@contextmanager
def chaos_stack(
    argv: Sequence[str], run_dir: Path | None, needs: frozenset[Need], model: Path | None
) -> Iterator[ChaosStack]:
    """A stack with these options of `baton up`, yet to be started, and ended with the context. Without `run_dir` its
    logs are gone then, too. `model` is the one that it serves, if a copy is needed. Raises CommandError where it does
    not end."""
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        where = Path(folder, "stack") if run_dir is None else expanded(run_dir).absolute()
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = ModelCopy(model, Path(folder, "models", model.name)) if "model copy" in needs and model else None
        library = faketime_library() if "clock" in needs else None
        clock = FakeClock(library, Path(folder, "clock")) if library is not None else None
        stack = ChaosStack(where, argv, needs, copy, clock)
        if "namespaces" in needs:
            set_link(True)
        with small_disk(where) if "disk" in needs else nullcontext():
            try:
                yield stack
            finally:
                stack.end()


@contextmanager
def small_disk(where: Path) -> Iterator[None]:
    """A folder is a disk of DISK_SIZE while the context lasts; what is on it then remains."""
    mount_small_disk(where, DISK_SIZE)
    try:
        yield
    finally:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, "kept")
            shutil.copytree(where, kept)
            unmount(where)
            shutil.copytree(kept, where, dirs_exist_ok=True)
