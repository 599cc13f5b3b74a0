"""What the kernel shows of a process, `/proc/PID/environ` and `/proc/PID/cmdline`, written anew in a forked one.

Both are ranges of the process's own memory, laid out when the template was executed, or by `show_elsewhere` where it
was forked, so what is written must fit there. And where a forked process writes to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NAME_MARK = "BATON_PROCESS_NAME"
"""The variable that names a process of a stack; of a template the last one, with room for other names."""
_PADDING = "/"
MAX_NAME_BYTES = 256
"""Above any instance's name; a process with a longer one is not forked."""
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 45, 46, 47, 48
"""Fields of /proc/self/stat behind the program's name (proc_pid_stat(5))."""
_START_CODE, _END_CODE, _START_STACK, _START_DATA, _END_DATA, _START_BRK = 23, 24, 25, 42, 43, 44
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 2**32 - 1


def padded(name: str) -> str:
    """A name with room for that of a forked process."""
    return name.ljust(MAX_NAME_BYTES, _PADDING)


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


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` (PR_SET_MM(2const)): all that the kernel remembers of where a process's memory is."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown_elsewhere: ctypes.Array[ctypes.c_char] | None = None
"""What the kernel shows of this process, if that is not what it was executed with."""


def show_elsewhere(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Shows another command line and environment, of any length, from memory of their own: that of this process may
    have no room for them. Needs no privilege. Raises OSError where the kernel does not know how (it is built without
    CONFIG_CHECKPOINT_RESTORE, or is none of Linux')."""
    global _shown_elsewhere
    shown = b"".join(word.encode() + b"\0" for word in argv)
    variables = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environment.items())
    content = ctypes.create_string_buffer(shown + variables)
    start = ctypes.addressof(content)
    middle, end = start + len(shown), start + len(shown) + len(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    kept = (int(fields[number]) for number in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK))
    place = _MemoryMap(*kept, libc.sbrk(0), int(fields[_START_STACK]), start, middle, middle, end, 0, 0, _NO_FILE)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(place), ctypes.sizeof(place), 0):
        raise OSError(ctypes.get_errno(), "another command line cannot be shown")
    _shown_elsewhere = content


def write_to(output: int) -> None:
    """Makes the descriptor `output` this process's standard output and error; there is nothing to read."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nowhere)
    os.close(output)


def _write(at: int, content: bytes, room: int) -> None:
    ctypes.memmove(at, content.ljust(room, b"\0"), room)
