"""The file by which a Prometheus server finds the metrics of a stack's processes on this host (`file_sd_configs`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.private_files import replace_private

TARGETS = "prometheus-targets.json"
LOOPBACK = "127.0.0.1"
"""Where processes of this host serve their metrics, unless `metrics_host` says otherwise."""


class PrometheusTargets:
    """Owns the file: where each process of the stack serves its metrics, named as `baton ps` names it.

    A process that has died keeps its place until another takes it, so that Prometheus sees that it is gone; one that
    the stack does not have any more is left out. Best effort: a full disk is no matter of the stack's.
    """

    def __init__(self, run_dir: Path, stack: str) -> None:
        self._path = run_dir / TARGETS
        self._stack = stack
        self._found: dict[InstanceId, tuple[str, str]] = {}
        """Service and address of each instance."""

    def record(self, life: Lifecycle) -> None:
        """Takes what a process says of itself."""
        if life.metrics_port is None:
            return
        host = LOOPBACK if life.host == socket.gethostname() else life.host
        found = (life.service, f"{host}:{life.metrics_port}")
        if self._found.get(life.instance) != found:
            self._found[life.instance] = found
            self._write()

    def keep(self, exists: Callable[[InstanceId], bool]) -> None:
        """Leaves out instances that do not exist."""
        gone = [instance for instance in self._found if not exists(instance)]
        for instance in gone:
            del self._found[instance]
        if gone:
            self._write()

    def remove(self) -> None:
        """Nothing of the stack is left."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        groups = [
            {"targets": [address], "labels": {"instance": instance, "service": service, "stack": self._stack}}
            for instance, (service, address) in sorted(self._found.items())
        ]
        with contextlib.suppress(OSError):
            replace_private(self._path, msgspec.json.format(msgspec.json.encode(groups)))
