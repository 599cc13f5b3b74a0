"""Ports for tests' servers: each is given once, and can be bound."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.cluster import ports
from tests.support.paths import REPOSITORY

ONLY = """
from tests.support.cluster import ports
ports.PORTS, ports.TRIES = range({port}, {port} + 1), 3
print(ports.free_port())
"""


def other_process(port: int) -> subprocess.CompletedProcess[str]:
    """Wants that port and no other."""
    command = [sys.executable, "-c", ONLY.format(port=port)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_a_port_is_given_once() -> None:
    port = ports.free_port()
    assert "none of 3 ports is free" in other_process(port).stderr
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
        monkeypatch.setattr(ports, "TRIES", 3)
        with pytest.raises(RuntimeError, match="none of 3 ports is free"):
            ports.free_port()
