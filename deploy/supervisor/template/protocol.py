"""What the supervisor and its templates say to each other, over a socket that keeps messages apart."""

from __future__ import annotations

import msgspec
from msgspec import Struct

MAX_MESSAGE_BYTES = 128 * 1024
"""A request with a larger environment is not sent: that process is started without the template."""


class ForkProcess(Struct, frozen=True, array_like=True):
    """Fork a process that runs `module` as `python -m` does. Its output goes to the file descriptor sent with this."""

    module: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    """All of it; the last variable names the process (`processes.NAME_MARK`)."""


class TemplateWarmed(Struct, frozen=True, array_like=True, tag=True):
    """The template has imported everything and can fork."""

    seconds: float


class ProcessForked(Struct, frozen=True, array_like=True, tag=True):
    """The process of the present request runs, in a session of its own and under its own name."""

    pid: int


class ForkRefused(Struct, frozen=True, array_like=True, tag=True):
    """No process was forked, nor will one be: it would not be safe here."""

    reason: str


class ForkedExited(Struct, frozen=True, array_like=True, tag=True):
    """A forked process has ended."""

    pid: int
    status: int
    """As subprocess gives it: negative for a signal."""


FromTemplate = TemplateWarmed | ProcessForked | ForkRefused | ForkedExited

encode = msgspec.msgpack.encode
decode_request = msgspec.msgpack.Decoder(ForkProcess).decode
decode_answer = msgspec.msgpack.Decoder(FromTemplate).decode
