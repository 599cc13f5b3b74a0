"""The file by which `baton ps`, `down`, `logs`, `chat` and `drain` find a running stack."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import msgspec
from msgspec import Struct

from deploy.supervisor.core.members import SupervisedProcess

STATE = "state.json"
LOCK = "lock"
LOCK_TRIES = 5
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

StackPhase = Literal["starting", "ready", "stopping"]


class MemberRecord(Struct, frozen=True, kw_only=True):
    """A process of the stack, as the state file has it."""

    service: str
    instance: str
    pid: int | None
    state: str
    restarts: int


def recorded(member: SupervisedProcess) -> MemberRecord:
    """The entry of a process in the state file."""
    process = member.process
    return MemberRecord(
        service=process.service, instance=process.instance, pid=member.pid, state=member.state, restarts=member.restarts
    )


class StackState(Struct, frozen=True, kw_only=True):
    """The contents of the state file. It holds the operator's password and an API key, so only its owner may read
    it."""

    name: str
    pid: int
    """Process id of the supervisor."""
    phase: StackPhase
    url: str
    model: str
    """The model's name for clients."""
    model_dir: str
    api_key: str | None
    """One of the keys that clients must send, for `baton chat`; None if none is needed."""
    namespace: str
    nats_url: tuple[str, ...]
    nats_user: str | None
    """The operator's user; None with an external NATS server."""
    nats_password: str | None
    nats_pid: int | None
    redis_pid: int | None = None
    """Process id of the embedded redis-server; None without one."""
    arenas: str | None = None
    """The KV store's directory; None without a store."""
    started: float
    """When the stack was started, in Unix seconds."""
    members: tuple[MemberRecord, ...] = ()


class StackRunning(Exception):
    """Another supervisor already holds this run directory."""


def default_run_dir(name: str, home: Path) -> Path:
    """The default directory for the logs and state of a stack of this name. Raises ValueError if the name is
    invalid."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: 1 to 64 of A-Z a-z 0-9 _ . - are allowed")
    return home / ".local" / "state" / "baton" / name


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Holds the run directory for this process until it ends, however it ends. Raises StackRunning."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (run_dir / LOCK).open("w") as lock:
        if not _locked(lock):
            raise StackRunning(str(run_dir))
        (run_dir / STATE).unlink(missing_ok=True)  # of one that was killed: it must not be taken for this one's
        try:
            yield
        finally:
            (run_dir / STATE).unlink(missing_ok=True)


def _locked(lock: TextIO) -> bool:
    """Several tries: a reader that calls `is_held` holds the lock for a moment."""
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def is_held(run_dir: Path) -> bool:
    """Whether a supervisor lives here; a killed one's lock goes with it, though its state file stays."""
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def write_state(run_dir: Path, state: StackState) -> None:
    """Replaces the file at once; readers see the old or the new one."""
    write_private(run_dir / f"{STATE}.new", msgspec.json.format(msgspec.json.encode(state)))
    (run_dir / f"{STATE}.new").replace(run_dir / STATE)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def read_state(run_dir: Path) -> StackState | None:
    """The running stack's state; None where no supervisor lives."""
    if not is_held(run_dir):
        return None
    try:
        return msgspec.json.decode((run_dir / STATE).read_bytes(), type=StackState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
