"""Runs pods of the manifests as processes of this machine, in the order and with the probes that a kubelet would use.

What differs from a cluster: all pods have one address, so ports and the names of Services are replaced by free ports;
paths of volumes by folders; images by this checkout and the nats-server of the tests. Limits and users do not exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.cluster.nats_server import BINARY as NATS_SERVER
from tests.support.cluster.ports import free_port
from tests.support.kubernetes.manifests import Manifest, named
from tests.support.kubernetes.pods import Container, Workload, images, workloads
from tests.support.paths import REPOSITORY

START_DEADLINE = 120.0
PROBE_EVERY = 0.5
PROBE_DEADLINE = 60.0
ALL_ADDRESSES = "0.0.0.0"
HERE = "127.0.0.1"
"""The address of every pod."""
RENDEZVOUS_PORT = 29500


class ClusterFolder:
    """What is outside of pods: Secrets, the model, ports of Services."""

    def __init__(self, folder: Path, manifests: tuple[Manifest, ...], secrets: Path, model: Path) -> None:
        """`secrets`: a folder for each Secret, without `baton-`."""
        self.folder, self.secrets, self.model = folder, secrets, model
        self.manifests = manifests
        self.nats_port = free_port()
        self.rendezvous_port = free_port()
        """Where the ranks of a LeaderWorkerSet's pods meet."""

    def pod(self, workload: str, name: str | None = None) -> Pod:
        """A pod of a workload; `name`: other than the one that it is usually given."""
        (found,) = (each for each in workloads(self.manifests) if each.name == workload)
        return Pod(self, found, name or found.pod_name)


class Pod:
    """Owns the processes of one pod."""

    def __init__(self, cluster: ClusterFolder, workload: Workload, name: str) -> None:
        self.name = name
        self._cluster, self._workload = cluster, workload
        self._folder = cluster.folder / name
        self._folder.mkdir()
        ports = [port for each in workload.containers for port in each.ports.values()]
        self._ports = {port: free_port() for port in ports}
        if workload.name == "nats":
            self._ports[4222] = cluster.nats_port
        if RENDEZVOUS_PORT in self._ports or workload.part == "worker":
            self._ports[RENDEZVOUS_PORT] = cluster.rendezvous_port
        self._volumes = {key: self._volume(key, each) for key, each in workload.volumes.items()}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, port: int) -> str:
        """Where a port of one of its containers is."""
        return f"http://127.0.0.1:{self._ports[port]}"

    def volume(self, name: str) -> Path:
        """The folder that stands for one of its volumes."""
        return self._volumes[name]

    def start(self) -> None:
        """Each sidecar until its startup probe passes, then the others; returns when those are ready."""
        for container in self._workload.containers:
            self._processes[container.name] = self._run(container)
            self.wait_for(container, "startupProbe")
        for container in self._workload.containers:
            if not container.sidecar:
                self.wait_for(container, "readinessProbe")

    def terminate(self) -> Mapping[str, int]:
        """SIGTERM to the containers, each after its `preStop`, then to the sidecars from the last to the first, each
        after those before it have ended; SIGKILL after the grace period. Returns each container's exit status."""
        end = time.monotonic() + self._workload.pod["terminationGracePeriodSeconds"]
        statuses: dict[str, int] = {}
        for container in reversed(self._workload.containers):
            process = self._processes[container.name]
            match container.spec.get("lifecycle", {}).get("preStop"):
                case {"exec": {"command": command}}:
                    self._execute(command, container, end - time.monotonic())
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            statuses[container.name] = process.wait()
        return statuses

    def end(self) -> None:
        """Kills what is left."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_for(self, container: Container, kind: str) -> None:
        """Until a probe of the container passes. Fails where its process ends, or the deadline passes."""
        end = time.monotonic() + START_DEADLINE
        while not self.probe(container, kind):
            status = self._processes[container.name].poll()
            assert status is None, f"{container.name} ended with {status}:\n{self.log(container)}"
            assert time.monotonic() < end, f"{container.name}: {kind} does not pass:\n{self.log(container)}"
            time.sleep(PROBE_EVERY)

    def probe(self, container: Container, kind: str) -> bool:
        """Whether the probe passes now."""
        match container.spec[kind]:
            case {"exec": {"command": command}}:
                return self._execute(command, container) == 0
            case {"httpGet": {"path": path, "port": port}}:
                return _answers(self.url(container.ports[port]) + path)
            case {"tcpSocket": {"port": port}}:
                return _listens(self._ports[container.ports[port]])
            case other:
                raise AssertionError(other)

    def container(self, name: str) -> Container:
        (found,) = (each for each in self._workload.containers if each.name == name)
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to a container's process; it is started again, as a kubelet would."""
        container, process = self.container(name), self._processes[name]
        process.kill()
        process.wait()
        self._processes[name] = self._run(container)
        self.wait_for(container, "startupProbe")

    def log(self, container: Container) -> str:
        """The last lines that it wrote."""
        return self.whole_log(container.name)[-4000:]

    def whole_log(self, name: str) -> str:
        """All that a container of this name wrote."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _run(self, container: Container) -> subprocess.Popen[bytes]:
        environment = self._environment_here(container)
        with (self._folder / f"{container.name}.log").open("ab") as log:
            return subprocess.Popen(
                self._argv(container),
                env=environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _environment_here(self, container: Container) -> dict[str, str]:
        found = container.environment(self.name, self._cluster.manifests)
        found.pop("XDG_CACHE_HOME", None)  # of the image's kernels
        own = {name: self._here(container, value) for name, value in found.items()}
        # Ranks of different pods reach each other by the address of their host's name, which is here this one's.
        of_host = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
        return of_host | own

    def _argv(self, container: Container) -> list[str]:
        if container.target is not None:
            return [sys.executable, *images()[container.target].entrypoint[1:]]
        assert container.name == "nats"
        return [str(NATS_SERVER), *(self._here(container, each) for each in container.spec["args"])]

    def _here(self, container: Container, value: str) -> str:
        """A value with what is another path, port or address on this machine replaced."""
        for volume, path in container.mounts.items():
            if value == path or value.startswith(f"{path}/"):
                return str(self._volumes[volume]) + value.removeprefix(path)
        if value == ALL_ADDRESSES or re.fullmatch(rf"{self.name}\.[a-z.-]+\.svc", value):
            return HERE
        if value.isdecimal() and int(value) in self._ports:
            return str(self._ports[int(value)])
        leader = self._workload.injected.get("LWS_LEADER_ADDRESS")
        if leader is not None:
            value = value.replace(f"{leader}:{RENDEZVOUS_PORT}", f"127.0.0.1:{self._cluster.rendezvous_port}")
            value = value.replace(leader, "127.0.0.1")
        return value.replace("nats://nats:4222", f"nats://127.0.0.1:{self._cluster.nats_port}")

    def _execute(self, command: list[str], container: Container, deadline: float = PROBE_DEADLINE) -> int:
        """As `exec` of a probe: with the container's variables, in the image's folder, where healthcheck.py lies."""
        match command:
            case ["sh", "-c", script]:
                argv = ["sh", "-c", " ".join(map(self._word_here, script.split()))]
            case _:
                argv = [self._word_here(each) for each in command]
        assert argv[0] in (sys.executable, "sh")
        own = self._environment_here(container)
        try:
            done = subprocess.run(
                argv, cwd=REPOSITORY / "deploy", env=own, capture_output=True, timeout=deadline, check=False
            )
        except subprocess.TimeoutExpired:
            return 1
        return done.returncode

    def _word_here(self, word: str) -> str:
        """A word of a command: Python is this one, ports are those of this machine."""
        if word == "python":
            return sys.executable
        return str(self._ports[int(word)]) if word.isdecimal() else word

    def _volume(self, name: str, volume: Mapping[str, Any]) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._cluster.model
        if "secret" in volume:
            return self._secret(volume["secret"]["secretName"])
        path = self._folder / name
        path.mkdir()
        for source in volume.get("projected", {}).get("sources", ()):
            self._project(source, path)
        return path

    def _secret(self, name: str) -> Path:
        return self._cluster.secrets / name.removeprefix("baton-")

    def _project(self, source: Manifest, path: Path) -> None:
        """Copies what a projected volume has of one ConfigMap or Secret."""
        if "configMap" in source:
            for key, text in named(self._cluster.manifests, "ConfigMap", source["configMap"]["name"])["data"].items():
                (path / key).write_text(self._listening_here(text))
            return
        folder = self._secret(source["secret"]["name"])
        whole = [{"key": each.name, "path": each.name} for each in folder.iterdir()]
        for item in source["secret"].get("items", whole):
            (path / item["path"]).parent.mkdir(exist_ok=True)
            shutil.copy(folder / item["key"], path / item["path"])

    def _listening_here(self, text: str) -> str:
        """nats-server's configuration at this machine's port."""
        return re.sub(r"(?m)^port: 4222$", f"port: {self._ports[4222]}", text.replace(ALL_ADDRESSES, "127.0.0.1"))


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=PROBE_DEADLINE) as response:
        return bool(response.status < 400)
    return False


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PROBE_DEADLINE):
        return True
    return False
