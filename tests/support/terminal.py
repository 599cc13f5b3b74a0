"""A program in a terminal of its own, as a person sits before it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from tests.support.paths import REPOSITORY

DEADLINE = 60.0


class Pty:
    """Owns the program and the other end of its terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._fd, inner = pty.openpty()
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self._unread = ""

    def __enter__(self) -> Pty:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """As if these keys were pressed."""
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """What the program shows up to `text`, which has to come. Raises AssertionError."""
        end = time.monotonic() + DEADLINE
        while text not in self._unread:
            assert time.monotonic() < end, f"{text!r} does not come: {self._unread!r}"
            self._unread += self._read(end)
        shown, self._unread = self._unread[: (at := self._unread.index(text) + len(text))], self._unread[at:]
        return shown

    def ended(self) -> int:
        """The program's exit status, once it has one."""
        end = time.monotonic() + DEADLINE
        while self._process.poll() is None:
            self._read(min(end, time.monotonic() + 0.1))
            assert time.monotonic() < end, f"it goes on: {self._unread!r}"
        return self._process.returncode

    def _read(self, end: float) -> str:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
        try:
            return os.read(self._fd, 65_536).decode(errors="replace") if ready else ""
        except OSError:  # nobody is at the other end any more
            return ""
