"""A real nats-server on a free loopback port, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.cluster.ports import free_port

BINARY = Path(sys.executable).with_name("nats-server")
START_DEADLINE = 60.0


class NatsServer:
    """Owns one nats-server process; it can be killed and started again on the same port."""

    def __init__(self, folder: Path, *, max_payload: int = 8 * 2**20, more: str = "") -> None:
        """`more`: lines of its configuration."""
        self.port = free_port()
        self._config = folder / f"nats-{self.port}.conf"
        self._listener = f'host: "127.0.0.1"\nport: {self.port}\nmax_payload: {max_payload}\n'
        self._config.write_text(f"{self._listener}{more}\n")
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, folder: Path, text: str, port: int) -> NatsServer:
        """With this configuration, which names the port."""
        server = cls(folder)
        server.port = port
        server._config.write_text(text)
        return server

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [str(BINARY), "-c", str(self._config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                if probe.recv(4) == b"INFO":  # before that it listens, but may still close what has connected
                    return
            time.sleep(0.02)
        raise RuntimeError(f"nats-server did not listen on {self.port} within {START_DEADLINE} s")

    def reconfigure(self, more: str) -> None:
        """Reads its configuration again, with other lines of `more`."""
        assert self._process is not None
        self._config.write_text(f"{self._listener}{more}\n")
        self._process.send_signal(signal.SIGHUP)

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def nats_server(folder: Path, *, max_payload: int = 8 * 2**20, more: str = "") -> Iterator[NatsServer]:
    server = NatsServer(folder, max_payload=max_payload, more=more)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def run_config(folder: Path, text: str, port: int) -> Iterator[NatsServer]:
    """A server with a configuration of the product's own, whose clients reach it at `port`."""
    server = NatsServer.of(folder, text, port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
