"""The file by which `baton ps`, `down`, `logs`, `chat` and `drain` find a running stack, and a new supervisor the old
one's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from deploy.supervisor.core.members import State, SupervisedProcess
from deploy.supervisor.core.plan import Pool, ProcessSpec, Scalable
from deploy.supervisor.processes import ProcessIdentity, start_time
from deploy.supervisor.spec import StackSpec
from shared.ids import EngineId, InstanceId, ModelName
from shared.machine.home import expanded
from shared.messages.lifecycle import Service
from shared.packing import NOT_DECODED
from shared.private_files import private_opener, replace_private
from shared.supervision import supervisor_lives

STATE = "state.json"
LOCK = "lock"
LOCK_TRIES = 20
"""Several: whoever looks whether a supervisor lives holds the lock for a moment, and all services do so."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

StackPhase = Literal["starting", "ready", "stopping"]


class MemberRecord(Struct, frozen=True, kw_only=True):
    """A process of the stack, as the state file has it: all that a new supervisor needs to go on with it."""

    service: Service
    instance: InstanceId
    number: int
    kind: Scalable | None
    engine: EngineId | None
    pool: Pool | None
    rank: int | None
    device: int | None
    pid: int | None
    state: State
    wanted: bool
    restarts: int
    failures: int
    """Deaths in a row."""
    status: int | None
    """Exit status of the last death."""
    failed: bool = False
    """It keeps dying: pauses between restarts are long by now, and somebody should look."""
    standby: bool = False
    """Whether its engine stands by."""
    last_lines: tuple[str, ...] = ()
    """Of the log of one that failed, as they were at its last death."""
    model: ModelName | None = None
    """Which of several models it works for."""
    colocated: bool = False
    """See `ProcessSpec.colocated`."""
    group: EngineId | None = None
    """None, too, where the supervisor before this one knew of no groups."""
    group_size: int | None = None
    """None where the supervisor before this one wrote down groups without their sizes; read files have one."""
    group_index: int = 0
    superseded: bool = False
    """Its engine ends once others are ready in its place."""
    was_ready: bool = False
    """Whether its present program was ready once; not known of one that a supervisor before 0.4.0 wrote down."""

    def member(self) -> SupervisedProcess:
        """As the supervisor's core has it, but for what only its next lifecycle message says."""
        process = ProcessSpec(
            *(self.service, self.instance, self.number, self.kind, self.engine, self.pool, self.rank, self.model),
            colocated=self.colocated,
            group=self.group or self.engine,
            group_size=self.group_size or 1,
            group_index=self.group_index,
        )
        return SupervisedProcess(
            process,
            device=self.device,
            state=self.state,
            wanted=self.wanted,
            pid=self.pid,
            restarts=self.restarts,
            failures=self.failures,
            status=self.status,
            standby=self.standby,
            superseded=self.superseded,
            ready_since=0.0 if self.was_ready else None,
        )


def recorded(
    member: SupervisedProcess, failed: Collection[InstanceId] = (), last_lines: Mapping[str, tuple[str, ...]] = {}
) -> MemberRecord:
    """A process as the state file has it. `failed`: who keeps dying; `last_lines`: of the logs of the dead."""
    instance = member.process.instance
    return MemberRecord(
        **member.process._asdict(),
        device=member.device,
        pid=member.pid,
        state=member.state,
        wanted=member.wanted,
        restarts=member.restarts,
        failures=member.failures,
        status=member.status,
        failed=instance in failed,
        standby=member.standby,
        superseded=member.superseded,
        was_ready=member.ready_since is not None,
        last_lines=last_lines.get(instance, ()) if instance in failed else (),
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
    nats_ca: str | None = None
    """Path of what the server's certificate is checked with; None without TLS."""
    redis_pid: int | None = None
    """Process id of the embedded redis-server; None without one."""
    arenas: str | None = None
    """The KV store's directory; None without a store."""
    started: float
    """When the stack was started, in Unix seconds."""
    written: float = 0.0
    """When this was written, in Unix seconds."""
    problems: tuple[str, ...] = ()
    """What the supervisor cannot do at present, for people to read."""
    members: tuple[MemberRecord, ...] = ()
    processes: Mapping[str, ProcessIdentity] = {}
    """Every process of the stack by name, servers included."""
    spec: StackSpec
    """What the supervisor was to run."""
    port: int
    """Of the gateways."""
    nats_passwords: Mapping[str, str] = {}
    """Of the embedded server's users; empty where there is none."""
    nats_port: int | None = None
    redis_password: str | None = None
    redis_port: int | None = None
    federation_port: int | None = None
    """Where the gateways reach the federation's server; None in no federation."""
    rendezvous: Mapping[EngineId, str] = {}
    """Where the ranks of each engine met."""

    @property
    def names(self) -> tuple[ModelName, ...]:
        """Of all models that it serves, for clients; `model` is the first of them."""
        return self.spec.names

    def living(self) -> dict[str, ProcessIdentity]:
        """Those of `processes` that are still there."""
        return {name: identity for name, identity in self.processes.items() if identity.lives}


SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> Path:
    """Where files lie in memory; a directory for temporary ones on systems that have no such place."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def directory_of(run_dir: Path) -> Path:
    """One for each run directory, by its name and a digest of its path."""
    where = expanded(run_dir).absolute()
    digest = blake2b(os.fsencode(where), digest_size=6).hexdigest()
    return shared_memory() / f"baton-{where.name[:64]}-{os.getuid()}-{digest}"


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
    with open(run_dir / LOCK, "w", opener=private_opener) as lock:
        if not _locked(lock):
            raise StackRunning(str(run_dir))
        yield


def _locked(lock: TextIO) -> bool:
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def is_held(run_dir: Path) -> bool:
    """Whether a supervisor lives here; a killed one's lock goes with it, though its state file stays."""
    return supervisor_lives(run_dir / LOCK)


def write_state(run_dir: Path, state: StackState) -> str | None:
    """Replaces the file at once; readers see the old or the new one. Where the disk takes none, it lies in shared
    memory and says so; what it says, or None. Raises OSError where neither can be."""
    try:
        _replace(run_dir / STATE, state)
    except OSError as error:
        problem = f"{run_dir / STATE} cannot be written ({error.strerror}); it lies in shared memory"
        _replace(_fallback(run_dir), replace(state, problems=(*state.problems, problem)))
        return problem
    with contextlib.suppress(OSError):
        _fallback(run_dir).unlink(missing_ok=True)
    return None


def remove_state(run_dir: Path) -> None:
    """Nothing of a stack is left here."""
    for path in (run_dir / STATE, _fallback(run_dir)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _replace(path: Path, state: StackState) -> None:
    replace_private(path, msgspec.json.format(msgspec.json.encode(state, enc_hook=_encoded)))


def _fallback(run_dir: Path) -> Path:
    arenas = directory_of(run_dir)
    return arenas.with_name(f"{arenas.name}-{STATE}")


def read_state(run_dir: Path) -> StackState | None:
    """The running stack's state, also of one that goes on without its supervisor; None where nothing runs."""
    state = last_state(run_dir)
    if state is None:
        return None
    # A lock may already be that of a new supervisor, which has not removed this file yet.
    of_supervisor = is_held(run_dir) and start_time(state.pid) is not None
    return state if of_supervisor or state.living() else None


def last_state(run_dir: Path) -> StackState | None:
    """What a supervisor wrote last, whether anything of it lives or not; None where there is nothing to be read."""
    found = [state for path in (run_dir / STATE, _fallback(run_dir)) if (state := _read(path)) is not None]
    return max(found, key=lambda state: state.written, default=None)


def _read(path: Path) -> StackState | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():  # anybody may write into shared memory
                return None
            state = msgspec.json.decode(file.read(), type=StackState, dec_hook=_decoded)
    except (*NOT_DECODED, OSError):
        return None
    return replace(state, members=tuple(_with_group_size(record, state.members) for record in state.members))


def _with_group_size(record: MemberRecord, members: Iterable[MemberRecord]) -> MemberRecord:
    """The supervisor that wrote no sizes had all engines of a group in its file, those that waited too."""
    if record.group_size is not None:
        return record
    same = record.group, record.pool, record.model
    engines = {each.number for each in members if (each.group, each.pool, each.model) == same}
    if record.group is None:
        return replace(record, group_size=1)
    return replace(record, group_size=len(engines), group_index=sorted(engines).index(record.number))


def _encoded(value: Any) -> str:
    if not isinstance(value, Path):
        raise NotImplementedError(type(value))
    return str(value)


def _decoded(wanted: type, value: Any) -> Any:
    if wanted is not Path:
        raise NotImplementedError(wanted)
    return Path(value)
