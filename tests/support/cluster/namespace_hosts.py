"""Hosts for tests: each has a network, a /dev/shm and a run directory of its own, and a wire that can be cut.

The tests themselves are on the same network, in a namespace that `make test-hosts` makes for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deploy.supervisor.log_files import last_lines, log_files
from deploy.supervisor.state_file import StackState, read_state
from tests.support.cluster.conversations import client_of, stream_chat
from tests.support.cluster.stack import die_with_parent
from tests.support.paths import REPOSITORY

NETWORK = "10.78.0"
BRIDGE = "baton0"
CHANGE_DEADLINE = 60.0
START_DEADLINE = 240.0
LOOK_EVERY = 0.1
PORT = 8000
ONE_THREAD = "--set=worker.threads=1"
NAMESPACED = "BATON_TEST_HOSTS"
"""Set by `make test-hosts`: the tests run in a network namespace of their own."""


def why_no_hosts() -> str | None:
    """None where tests can make hosts here."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.environ.get(NAMESPACED) != "1":
        return "these tests need a network namespace of their own: make test-hosts"
    tried = subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"hosts cannot be wired here: {tried.stderr.strip()}"


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=CHANGE_DEADLINE)


class Hosts:
    """Owns the wire and the hosts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Host] = {}

    def __enter__(self) -> Hosts:
        run("ip", "link", "set", "lo", "up")
        run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._made.values():
            host.end()
            host.unwire()
        run("ip", "link", "delete", BRIDGE)

    def __getitem__(self, name: str) -> Host:
        """The host of this name, made at its first use."""
        if name not in self._made:
            self._made[name] = Host(self.folder, name, len(self._made) + 1)
        return self._made[name]

    def last_words(self) -> str:
        return "\n".join(host.last_words() for host in self._made.values())


class Host:
    """Owns the namespaces of one host, and everything that runs in them."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.name, self.address, self.run_dir = name, f"{NETWORK}.{number}", folder / name
        self.url = f"http://{self.address}:{PORT}"
        self._wire = f"to-{name}"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sleep", "infinity"], preexec_fn=die_with_parent, start_new_session=True
        )
        ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + CHANGE_DEADLINE
        while self._namespace() == ours and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = str(self._holder.pid)
        run("ip", "link", "add", self._wire, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", self._wire, "master", BRIDGE, "up")
        run(*self._inside, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        for command in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            run(*self._inside, "ip", *command.split())

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", f"--wd={REPOSITORY}"]

    def _namespace(self) -> str:
        return os.readlink(f"/proc/{self._holder.pid}/ns/net")

    # ---- what is done on it

    def baton(
        self, *argv: str, environment: Mapping[str, str] | None = None, timeout: float = CHANGE_DEADLINE
    ) -> subprocess.CompletedProcess[str]:
        """A command on this host, about its own run directory unless another is given."""
        where = [] if any(each.startswith("--run-dir") for each in argv) else [f"--run-dir={self.run_dir}"]
        return subprocess.run(
            [*self._inside, sys.executable, "-m", "deploy.cli", *argv, *where],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def start(self, *argv: str, environment: Mapping[str, str] | None = None) -> None:
        """`up` or `join`, in the background; returns when it is ready."""
        done = self.baton(
            *argv, "--detach", ONE_THREAD, "--device=cpu", environment=environment, timeout=START_DEADLINE
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.last_words()}"

    def first(self, *argv: str) -> None:
        """Starts a stack that others can join, which serves at `url`."""
        self.start("up", f"--advertise-address={self.address}", f"--node={self.name}", *self._serving(), *argv)

    def join(self, token: str, *argv: str) -> None:
        self.start("join", f"--node={self.name}", *argv, environment={"BATON_JOIN_TOKEN": token})

    def _serving(self) -> list[str]:
        return [f"--host={self.address}", f"--port={PORT}", "--insecure"]

    def with_everything(self) -> list[str]:
        """Options of `join` for a host that serves without any other."""
        light = ["--gateways=1", "--tokenizers=1", "--coordinators=1", "--detokenizers=1"]
        return [*self._serving(), *light]

    def token(self, *argv: str) -> str:
        done = self.baton("token", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show_nodes(self, sysfs: Path) -> None:
        """The host has the NUMA nodes that are written below `sysfs`."""
        nodes = Path("devices/system/node")
        run(*self._inside, "mount", "--bind", str(sysfs / nodes), str("/sys" / nodes))

    def hide(self, folder: Path) -> None:
        """The host sees nothing in a folder of the machine any more."""
        run(*self._inside, "mount", "-t", "tmpfs", "tmpfs", str(folder))

    def cut(self) -> None:
        """Nothing comes or goes any more, and nobody is told."""
        run("ip", "link", "set", self._wire, "down")

    def heal(self) -> None:
        run("ip", "link", "set", self._wire, "up")

    def kill_nats(self) -> None:
        os.kill(self.state.processes["nats-server"].pid, signal.SIGKILL)

    def lose_power(self) -> None:
        """Its wire goes first, so that the others get no farewell, not even from its kernel; then all that it ran."""
        self.cut()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + CHANGE_DEADLINE
        while self._pids() and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
        run(*self._inside, "sh", "-c", "rm -rf /dev/shm/*")

    def boot(self) -> None:
        """After `lose_power`: its network is back, and nothing runs."""
        self.heal()

    def _pids(self) -> list[int]:
        """Of all that runs in its namespaces, but for what holds these."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/net") == self._namespace() and process.pid != self._holder.pid:
                    found.append(process.pid)
        return found

    def unwire(self) -> None:
        """Takes the wire away now: the kernel does it some time after the last process of the host."""
        subprocess.run(["ip", "link", "delete", self._wire], capture_output=True, check=False)

    def end(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._holder.kill()
        self._holder.wait()

    # ---- what is seen of it

    @property
    def state(self) -> StackState:
        state = read_state(self.run_dir)
        assert state is not None, self.last_words()
        return state

    def ps(self) -> dict[str, dict[str, Any]]:
        """`baton ps` as this host sees it: by instance."""
        done = self.baton("ps", "--json")
        assert done.returncode == 0, done.stderr
        return {row["instance"]: row for row in json.loads(done.stdout)["processes"]}

    def until_ps(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + CHANGE_DEADLINE
        while True:
            if condition(seen := self.ps()):
                return seen
            assert time.monotonic() < deadline, f"{seen}\n{self.last_words()}"

    def until_ready(self, *instances: str) -> dict[str, dict[str, Any]]:
        """Until all of these are seen from here, and ready."""
        return self.until_ps(lambda seen: all(seen.get(each, {}).get("phase") == "ready" for each in instances))

    def metric(self, name: str) -> float:
        """The sum over all its gateways."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=CHANGE_DEADLINE) as response:
            text = response.read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}(\{{.*\}})? ", line))

    def last_words(self) -> str:
        """The ends of all its logs, for a failing test's message."""
        parts = [f"=== {self.name}"]
        for path in log_files(self.run_dir / "logs"):
            parts += [f"--- {path.name}", *last_lines(path, 12)]
        return "\n".join(parts)


class Streams:
    """Chats with one host's gateway, all begun before anything is done to the hosts."""

    deadline = 180.0

    def __init__(self, host: Host, questions: Sequence[str], max_tokens: int, *, prefix_caching: bool = True) -> None:
        self._host, self._questions, self._max_tokens = host, questions, max_tokens
        self._extra = {"ignore_eos": True, "enable_prefix_caching": prefix_caching}

    def texts(self, meanwhile: Sequence[Callable[[], object]] = ()) -> list[str]:
        """The text of each; `meanwhile` is done, one after the other, once all have begun."""
        return asyncio.run(self._texts(meanwhile))

    async def _texts(self, meanwhile: Sequence[Callable[[], object]]) -> list[str]:
        begun = [asyncio.Event() for _ in self._questions]
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "extra_body": self._extra}
        async with client_of(self._host.url) as client, asyncio.timeout(self.deadline):
            client = client.with_options(timeout=self.deadline)
            streams = [
                asyncio.create_task(stream_chat(client, self._host.state.model, question, started, **options))
                for question, started in zip(self._questions, begun, strict=True)
            ]
            for started in begun:
                await started.wait()
            for each in meanwhile:
                assert not any(stream.done() for stream in streams), "the streams were to be longer"
                await asyncio.to_thread(each)
            seen = await asyncio.gather(*streams)
        assert all(each.finishes == ["length"] for each in seen)
        return [each.text for each in seen]
