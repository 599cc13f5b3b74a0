"""What runs on a node of a Ray cluster: an actor that has some processes of the stack as its children.

They end with it, however it ends: the kernel kills them (`tether`). It outlives the supervisor, whose successor finds
it, and ends by itself where none comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from deploy.launchers.ray import tether
from deploy.supervisor.network import interface_of
from deploy.supervisor.state_file import shared_memory
from shared.addresses import loopback_interface, rank_interfaces
from shared.config import inherited_environment, process_environment
from shared.private_files import PRIVATE_FOLDER, private_opener
from shared.protocol import OWN, SpokenProtocols, incompatibility

MAX_OUTPUT = 2**20
"""Bytes of a process's output that wait to be fetched; above it the oldest are lost."""
WATCH_SECONDS = 30.0
"""After which `watch` answers although nothing has happened."""
READ_SIZE = 65_536
RAYLET_LOOK = 0.5
ORPHAN_LOOK = 1.0
PREFIX = "baton-ray-"
LOCK = "lock"


class NodeFacts(NamedTuple):
    """What the supervisor needs to know of a place."""

    address: str
    folder: str
    """A private folder in shared memory, for arenas and for where ranks meet."""


class NotServable(Exception):
    """Nothing of the stack can run here; the text says why."""


class _GroupProcess:
    """Owns a process's output until it is fetched."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.output = bytearray()
        self.status: int | None = None
        self.changed = asyncio.Event()

    def record(self, data: bytes) -> None:
        self.output += data
        del self.output[:-MAX_OUTPUT]
        self.changed.set()


class ProcessGroup:
    """A Ray actor. Owns the processes of one bundle and their folder."""

    def __init__(self, orphan_seconds: float) -> None:
        """`orphan_seconds`: for how long it goes on when no supervisor calls any more."""
        self._heard_at = time.monotonic()
        self._group = ray.util.get_current_placement_group()
        threading.Thread(target=self._end_as_orphan, args=(orphan_seconds + WATCH_SECONDS,), daemon=True).start()
        threading.Thread(target=_end_with_raylet, args=(os.getppid(),), daemon=True).start()
        remove_leftovers()
        self._address = str(ray.util.get_node_ip_address())
        self._children: dict[str, _GroupProcess] = {}
        self._folder, self._lock = _own_folder()

    async def facts(self, model: str, theirs: tuple[int, int]) -> NodeFacts:
        """Where this is. Raises NotServable where the model's folder is not here, or this node's release speaks
        none of the protocols of `theirs`."""
        self._heard_at = time.monotonic()
        problem = incompatibility(SpokenProtocols(*theirs), OWN)
        if problem is not None:
            raise NotServable(f"{self._address}: the supervisor's Baton does not fit this node's: {problem}")
        if not _is_folder(model):
            raise NotServable(f"{self._address}: the model is not in {model} on this node")
        return NodeFacts(self._address, str(self._folder))

    async def running(self) -> dict[str, int]:
        """The pids of its processes that live, by name; for a supervisor that finds it here."""
        self._heard_at = time.monotonic()
        return {name: child.process.pid for name, child in self._children.items() if child.status is None}

    async def group(self) -> Any:
        """The placement group that it is in; None where it is in none."""
        return self._group

    async def keep_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files that only this user reads into its folder. Raises OSError."""
        for name, content in files.items():
            with open(self._folder / name, "wb", opener=private_opener) as file:  # noqa: ASYNC230
                file.write(content)

    async def free_port(self) -> int:
        """A port of this node that nobody listens on."""
        with socket.create_server((self._address, 0)) as probe:
            return int(probe.getsockname()[1])

    async def start(
        self, name: str, service: str, arguments: Sequence[str], environment: Mapping[str, str], *, alone: bool
    ) -> int:
        """Starts a program of this machine's Python; its pid. `alone`: its ranks are all on this node, and speak where
        no other machine reaches them. Raises OSError."""
        self._heard_at = time.monotonic()
        before = self._children.get(name)
        if before is not None and before.status is None:
            raise OSError(f"{name} runs already")
        interface = loopback_interface() if alone else interface_of(self._address)
        # On the event loop's thread, which lasts as long as this process does: the kernel counts threads as parents.
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-IS", tether.__file__, str(os.getpid()), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited_environment(service), **rank_interfaces(interface, process_environment()), **environment},
            start_new_session=True,
        )
        child = self._children[name] = _GroupProcess(process)
        self._follow(child, asyncio.get_running_loop())
        return process.pid

    async def watch(self, name: str) -> tuple[bytes, int | None]:
        """What a process has said since the last call, and its status once it has ended; waits for either for
        WATCH_SECONDS."""
        self._heard_at = time.monotonic()
        child = self._children[name]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS):
                while not child.output and child.status is None:
                    await child.changed.wait()
                    child.changed.clear()
        output = bytes(child.output)
        child.output.clear()
        return output, child.status

    async def signal(self, name: str, number: int) -> None:
        """To the process alone if it may clean up, to its whole group if it is killed; nothing where it has ended."""
        child = self._children.get(name)
        if child is None or child.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(child.process.pid, number)
            else:
                os.kill(child.process.pid, number)

    async def close(self) -> None:
        """Kills what is left and removes the folder; nothing is to be called after it."""
        for name in self._children:
            await self.signal(name, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _end_as_orphan(self, seconds: float) -> None:
        """Ends this process, and by that its children, when no supervisor has called for `seconds`; its placement group
        is nobody's then, either. On a thread of its own."""
        while time.monotonic() - self._heard_at < seconds:
            time.sleep(ORPHAN_LOOK)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._group is not None:
            with contextlib.suppress(RayError):
                ray.util.remove_placement_group(self._group)
        os._exit(1)

    def _follow(self, child: _GroupProcess, loop: asyncio.AbstractEventLoop) -> None:
        assert child.process.stdout is not None
        fd = child.process.stdout.fileno()
        os.set_blocking(fd, False)

        def read() -> None:
            try:
                data = os.read(fd, READ_SIZE)
            except BlockingIOError:
                return
            if data:
                child.record(data)
            else:
                loop.remove_reader(fd)

        def ended(status: int) -> None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            loop.remove_reader(fd)
            with contextlib.suppress(OSError):
                while data := os.read(fd, READ_SIZE):
                    child.record(data)
            assert child.process.stdout is not None
            child.process.stdout.close()
            child.status = status
            child.changed.set()

        def wait() -> None:
            status = child.process.wait()
            loop.call_soon_threadsafe(ended, status)

        loop.add_reader(fd, read)
        threading.Thread(target=wait, daemon=True).start()


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _end_with_raylet(raylet: int) -> None:
    """Ends this process, and by that its children, once the raylet that started it is gone. Ray's workers see that only
    where init inherits them: not below a subreaper, such as systemd's of a user."""
    while os.getppid() == raylet:
        time.sleep(RAYLET_LOOK)
    os._exit(1)


def _own_folder() -> tuple[Path, int]:
    """A new folder, and a lock in it that is held as long as this process lives. It has its name once the lock is held,
    so that nobody takes it for a leftover."""
    name = uuid.uuid4().hex
    new = shared_memory() / f".{PREFIX}{name}"
    new.mkdir(mode=PRIVATE_FOLDER)
    lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.rename(shared_memory() / f"{PREFIX}{name}")
    for each in ("arenas", "ranks"):
        (folder / each).mkdir(mode=PRIVATE_FOLDER)
    return folder, lock


def remove_leftovers() -> None:
    """Removes the folders of this user's process groups that have been killed."""
    for folder in shared_memory().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
