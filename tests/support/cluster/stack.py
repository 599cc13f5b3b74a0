"""A whole real stack for a test: `baton up` as a user types it, on free ports, in a run directory of its own.

    with running_stack(tmp_path, engines=2, tokenizers=2) as stack:     # or prefill=1, decode=1, tp_decode=2
        stack.url, stack.model                      # OpenAI-compatible server
        stack.kill("tokenizer-1")                   # SIGKILL, and wait until its successor is ready
        await stack.ps()                            # what every process says of itself

It is gone for certain when the context ends, whatever the test did to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deploy.cli.ps import latest_lifecycles
from deploy.supervisor.log_files import last_lines, log_files
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.processes import marked_processes
from deploy.supervisor.servers.arenas import remove_leftovers
from deploy.supervisor.state_file import MemberRecord, StackState, read_state
from shared.bus import Bus
from shared.messages.lifecycle import Lifecycle
from tests.support.paths import REPOSITORY
from tests.support.warm.forked_baton import ForkedBaton, can_fork, fork_baton, run_baton
from tests.support.warm.processes import UP, baton_up

START_DEADLINE = 200.0
CHANGE_DEADLINE = 60.0
STOP_DEADLINE = 20.0
LOOK_EVERY = 0.02
ORPHAN_TIMEOUT = "--orphan-timeout=120"
"""Long enough for a test's next supervisor, short enough that a killed test leaves nothing for long."""
PR_SET_PDEATHSIG = 1
_PRCTL: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class RunningStack:
    """Owns one `baton up` process."""

    def __init__(
        self,
        run_dir: Path,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within`: a program that runs it elsewhere, such as nsenter."""
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._said = run_dir / "up.out"
        self._pids: set[int] = set()
        timeout = [] if any(each.startswith("--orphan-timeout") for each in argv) else [ORPHAN_TIMEOUT]
        self._environment = {**os.environ, **(environment or {})}
        baton = [sys.executable, "-m", "deploy.cli"] if within else baton_up(self._environment)
        self._argv = [*within, *baton, "up", "--run-dir", str(run_dir), *argv, *timeout]
        self.own_connections: set[int | None] = set()
        """Ids of connections to its bus by which a test says what is to be refused."""
        self.supervisor = self._started()

    def _started(self) -> subprocess.Popen[bytes] | ForkedBaton:
        """It dies with the tests; what it has started ends soon after."""
        environment, said = self._environment, self._said
        if UP in self._argv and can_fork(environment):
            return fork_baton(self._argv, environment, said, said, prepare=die_with_parent, ends_with_tests=True)
        with self._said.open("ab") as output:
            return subprocess.Popen(
                self._argv,
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    # ---- what it is

    @property
    def state(self) -> StackState:
        """As of now. Raises AssertionError, with its last words, once it has ended."""
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            state = read_state(self.run_dir)
            if state is not None:
                self._pids.update(identity.pid for identity in state.processes.values())
                return state
            assert self.supervisor.poll() is None, self.last_words()
            time.sleep(LOOK_EVERY)
        raise AssertionError(f"no stack within {START_DEADLINE} s\n{self.last_words()}")

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without `/v1`."""
        return self.state.url

    @property
    def model(self) -> str:
        return self.state.model

    def member(self, instance: str) -> MemberRecord:
        return next(member for member in self.state.members if member.instance == instance)

    def pid(self, instance: str) -> int:
        """Raises AssertionError where it has none just now."""
        pid = self.member(instance).pid
        assert pid is not None, f"{instance} has no process"
        return pid

    def instances(self, service: str) -> list[str]:
        return sorted(member.instance for member in self.state.members if member.service == service)

    async def ps(self) -> Mapping[str, Lifecycle]:
        """What each instance last said of itself, by instance; without those that said nothing for a while."""
        return await latest_lifecycles(self.state)

    async def heard(self) -> Mapping[str, Lifecycle]:
        """What they say of themselves, all of them, however little a busy machine lets one speak."""
        return await self.until_heard(lambda said: True)

    async def until_heard(self, condition: Callable[[Mapping[str, Lifecycle]], bool]) -> Mapping[str, Lifecycle]:
        """What they say of themselves, all of them, once it is so. Raises AssertionError when that does not come."""
        end = time.monotonic() + CHANGE_DEADLINE
        while True:
            said = await self.ps()
            missing = {member.instance for member in self.state.members} - said.keys()
            if not missing and condition(said):
                return said
            assert time.monotonic() < end, f"not within {CHANGE_DEADLINE} s: {missing or said}\n{self.last_words()}"

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """The operator's connection: lifecycles and `admin.*`."""
        async with operator_bus(self.state) as bus:
            yield bus

    def user_credentials(self, user: str) -> tuple[str, str]:
        """Name and password of a service on the stack's own nats-server, to play that service."""
        text = (self.run_dir / "nats.conf").read_text()
        return user, text.split(f"user: {user}, password: ")[1].split('"')[1]

    def log(self, instance: str) -> str:
        return (self.run_dir / "logs" / f"{instance}.log").read_text(errors="replace")

    def refusals(self) -> list[str]:
        """What its bus has refused to processes of the stack, by its log; a bus of others has no log here. A server
        that was started again does not know who was asked before, and refuses the answers: these are left out."""
        log = self.run_dir / "logs" / "nats-server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        own = [f"- cid:{connection} -" for connection in self.own_connections]
        starts = 0
        refused = []
        for line in lines:
            starts += "Starting nats-server" in line
            late = starts > 1 and 'Publish Violation - Subject "_INBOX.' in line
            if "violation" in line.lower() and not late and not any(each in line for each in own):
                refused.append(line)
        return refused

    def last_words(self) -> str:
        """What it said, and the end of every log: for a failing test's message."""
        parts = [self._said.read_text(errors="replace")]
        for path in log_files(self.run_dir / "logs"):
            parts += [f"--- {path.name}", *last_lines(path, 15)]
        return "\n".join(parts)

    # ---- what is done to it

    def until(self, condition: Callable[[StackState], bool], deadline: float = CHANGE_DEADLINE) -> StackState:
        """Waits for a state. Raises AssertionError when it does not come, or the stack ends."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if condition(state := self.state):
                return state
            time.sleep(LOOK_EVERY)
        raise AssertionError(f"not within {deadline} s: {self.state}\n{self.last_words()}")

    def kill(self, instance: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signals one process and returns its pid at once; what the supervisor does then is seen by `replaced`."""
        pid = self.pid(instance)
        os.kill(pid, number)
        return pid

    def replaced(self, instance: str, pid: int) -> int:
        """Waits until another process than `pid` is there for `instance`; it may still be starting."""
        self.until(lambda state: any(m.instance == instance and m.pid not in (None, pid) for m in state.members))
        return self.pid(instance)

    def kill_supervisor(self) -> None:
        """Kills it and waits for its end; everything else goes on."""
        assert self.state.pid == self.supervisor.pid
        self.supervisor.kill()
        self.supervisor.wait()

    def start_supervisor(self) -> None:
        """The same `baton up` once more; it may still be starting."""
        self.supervisor = self._started()

    def kill_nats(self) -> None:
        """Kills the bus; the supervisor starts it again on the same port."""
        pid = self.state.nats_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def kill_redis(self) -> None:
        """Kills the embedded Redis; the supervisor starts it again, empty, on the same port."""
        pid = self.state.redis_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def baton(self, *argv: str, timeout: float = CHANGE_DEADLINE) -> subprocess.CompletedProcess[str]:
        """Any other command on this stack."""
        return run_baton(*argv, "--run-dir", str(self.run_dir), timeout=timeout)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.supervisor.send_signal(signal.SIGINT)

    def leftovers(self) -> list[int]:
        """Processes of this stack that are still there."""
        return [pid for pid in self._pids if _lives(pid)]

    def stop(self) -> None:
        """Two Ctrl-C, because open requests no longer matter; then force. Nothing is left afterwards."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._pids.update(child.pid for child in psutil.Process(self.supervisor.pid).children(recursive=True))
        for _ in range(2):
            if self.supervisor.poll() is None:
                self.interrupt()
                time.sleep(0.05)
        try:
            self.supervisor.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _, identity in marked_processes(self.run_dir):
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was found
                os.kill(identity.pid, signal.SIGKILL)
        remove_leftovers(self.run_dir)

    def wait_until_it_serves(self) -> None:
        """Until GET /ready says 200."""
        deadline = time.monotonic() + CHANGE_DEADLINE
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                if response.status == 200:
                    return
            time.sleep(LOOK_EVERY)
        raise AssertionError(f"{self.url}/ready did not say 200\n{self.last_words()}")


def die_with_parent() -> None:
    """Runs in a child before it becomes its program: where the kernel can, it is killed when the tests' process ends,
    however that ends. Only the thread that starts it counts as its parent, so it must be the main one."""
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def running_stack(
    folder: Path,
    *,
    model: Path | str | None = None,
    engines: int | None = None,
    tp: int = 1,
    pp: int = 1,
    prefill: int = 0,
    decode: int = 0,
    tp_prefill: int | None = None,
    tp_decode: int | None = None,
    kvstore: str | None = None,
    redis: bool = False,
    gateways: int = 1,
    tokenizers: int = 1,
    detokenizers: int = 1,
    coordinators: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = 1,
    settings: Sequence[str] = (),
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wait_for_engines: float | None = 60.0,
) -> Iterator[RunningStack]:
    """Starts a stack, yields it when it is ready and `/ready` says so, and ends it.

    Without `model` it serves the demo model. Without `engines` there is one, but none beside pools. `kvstore` is the
    KV store's memory ("64MiB"), "0" for none; `redis` starts one below it. `settings` are `--set`s, `more` any other
    arguments of `baton up`. `dtype`: float32, as stacks are compared with references and with each other, and other
    numbers of ranks round bfloat16 otherwise. `threads`: of each rank on a CPU; None: the default, all cores, whose
    threads wait for one another where several stacks share them: six streams of 150 tokens took over 90 s.
    New requests wait for `wait_for_engines` seconds while what serves them starts anew, as a machine under test may be
    slow; None: for as long as by default.
    """
    chosen = {
        "engines": engines,
        "tp": tp,
        "pp": pp,
        "prefill": prefill,
        "decode": decode,
        "tp-prefill": tp_prefill,
        "tp-decode": tp_decode,
        "kvstore-memory": kvstore,
        "dtype": dtype if device == "cpu" else None,
        "gateways": gateways,
        "tokenizers": tokenizers,
        "detokenizers": detokenizers,
        "coordinators": coordinators,
        "wait-for-engines-s": wait_for_engines,
    }
    argv = [f"--{option}={value}" for option, value in chosen.items() if value is not None]
    if device == "cpu" and threads is not None:
        argv.append(f"--set=worker.threads={threads}")
    argv += ["--port=0", f"--device={device}", *(["--redis"] if redis else []), *(f"--set={each}" for each in settings)]
    argv += more
    if model is not None:
        argv.append(f"--model={model}")
    stack = RunningStack(folder / "stack", argv, environment)
    try:
        stack.until(lambda state: state.phase == "ready", START_DEADLINE)
        stack.wait_until_it_serves()
        yield stack
        refused = stack.refusals()
        assert not refused, f"somebody said or heard what the bus does not permit: {refused[:5]}"
    finally:
        stack.stop()
