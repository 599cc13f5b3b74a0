"""What a helper process does at its own end: bounds itself, and reads and writes messages. No event loop."""

from __future__ import annotations

import resource
from typing import BinaryIO

LENGTH_BYTES = 8
"""Size of the number before each message on a pipe."""


def confine(max_memory: int, max_cpu_s: int | None = None) -> None:
    """Bounds this process by the kernel: bytes of address space, seconds of processor time; it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    if max_cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def write_message(to: BinaryIO, message: bytes) -> None:
    """Writes one, for who waits for it."""
    to.write(len(message).to_bytes(LENGTH_BYTES, "little"))
    to.write(message)
    to.flush()


def read_message(given: BinaryIO) -> bytes | None:
    """The next one; None behind the last."""
    head = given.read(LENGTH_BYTES)
    return given.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None
