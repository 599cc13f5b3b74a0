"""What is asked of a warm process."""

from __future__ import annotations

import msgspec

MAX_MESSAGE_BYTES = 2**17


class ForkTemplate(msgspec.Struct, frozen=True):
    """Comes with two descriptors: the template's control socket, and where its output goes. The answer is the pid."""

    argv: list[str]
    """Behind the control socket's number."""
    environment: dict[str, str]
    folder: str


def encode(request: ForkTemplate) -> bytes:
    return msgspec.json.encode(request)


def decode(data: bytes) -> ForkTemplate:
    return msgspec.json.decode(data, type=ForkTemplate)
