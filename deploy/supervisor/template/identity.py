"""What the kernel shows of a process, `/proc/PID/environ` and `/proc/PID/cmdline`, written anew in a forked one.

Both are ranges of the process's own memory, laid out when the template was executed, so what is written must fit there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NAME_MARK = "BATON_PROCESS_NAME"
"""The variable that names a process of a stack; of a template the last one, with room for other names."""
_PADDING = "/"
_MARK_ROOM = 256
"""Bytes: above any instance's name."""
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 45, 46, 47, 48
"""Fields of /proc/self/stat behind the program's name (proc_pid_stat(5))."""


def padded(name: str) -> str:
    """A name with room for that of a forked process."""
    return name.ljust(_MARK_ROOM, _PADDING)


def shown_name(value: str) -> str:
    """The name in NAME_MARK, of a template, too."""
    return value.rstrip(_PADDING)


class ShownMemory(NamedTuple):
    """Where the kernel reads this process's command line and environment: addresses, of the first byte and of the one
    behind the last."""

    argv: tuple[int, int]
    environment: tuple[int, int]

    @classmethod
    def own(cls) -> ShownMemory:
        """Raises OSError where the kernel does not tell."""
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        found = [int(fields[number]) for number in (_ARG_START, _ARG_END, _ENV_START, _ENV_END)]
        if not all(found):
            raise OSError("the kernel does not tell where this process's environment lies")
        return cls((found[0], found[1]), (found[2], found[3]))

    def rename(self, name: str) -> None:
        """Gives the process another name, for those who look from outside. Raises OSError where that does not fit, or
        NAME_MARK is not the last variable."""
        start, end = self.environment
        before, _, value = ctypes.string_at(start, end - start).rpartition(f"\0{NAME_MARK}=".encode())
        if not before or value.count(b"\0") != 1 or len(name.encode()) >= len(value):
            raise OSError(f"{NAME_MARK} cannot become {name}")
        _write(end - len(value), name.encode(), len(value))

    def replace(self, environment: Mapping[str, str]) -> None:
        """Shows another environment, NAME_MARK last with all the room that is left. Raises OSError where it does not
        fit."""
        start, end = self.environment
        lines = [f"{name}={value}" for name, value in environment.items() if name != NAME_MARK]
        content = "\0".join([*lines, f"{NAME_MARK}={environment[NAME_MARK]}"]).encode()
        if len(content) >= end - start:
            raise OSError(f"an environment of {len(content)} bytes does not fit into {end - start}")
        _write(start, content.ljust(end - start - 1, _PADDING.encode()), end - start)

    def show(self, argv: Sequence[str]) -> None:
        """Shows another command line, as much of it as there is room for."""
        start, end = self.argv
        _write(start, b"\0".join(word.encode() for word in argv)[: end - start - 1], end - start)


def _write(at: int, content: bytes, room: int) -> None:
    ctypes.memmove(at, content.ljust(room, b"\0"), room)
