"""The two lines of NATS's protocol that nearly all traffic consists of, written and read without a detour.

The client library reads a message by regular expressions, and hands it to a task of its subscription, which hands it
on: most of what a message costs a process. Here a message goes straight to whoever can take it at once. What cannot be
taken so is left to the library, with everything behind it. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable

Receiver = Callable[[bytes], bool]
"""Takes a payload, or refuses it: then it goes the library's way."""

_NEWLINE = b"\r\n"


def publish_command(subject: str, reply: str, payload: bytes) -> bytes:
    """What publishes a message without headers. `subject` and `reply` (or "") are valid as they are."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)


class DirectReceivers:
    """Owns who takes a subscription's messages at once, by the number that the client gave the subscription."""

    def __init__(self) -> None:
        self._receivers: dict[int, Receiver] = {}

    def add(self, number: int, receiver: Receiver) -> None:
        """From the next message on."""
        self._receivers[number] = receiver

    def remove(self, number: int) -> None:
        """An unknown number is no error."""
        self._receivers.pop(number, None)

    def take(self, data: bytes) -> bytes:
        """Hands out the whole messages that `data` begins with, up to the first that nobody takes at once. Returns the
        rest: that message and what follows it, and anything else that a server says."""
        at = 0
        while data.startswith(b"MSG ", at):
            line = data.find(_NEWLINE, at)
            if line < 0:
                break
            words = data[at + 4 : line].split()  # subject, number, perhaps a reply subject, size
            if not 3 <= len(words) <= 4 or not (words[1].isdigit() and words[-1].isdigit()):
                break
            begin = line + 2
            end = begin + int(words[-1])
            receiver = self._receivers.get(int(words[1]))
            if receiver is None or not data.startswith(_NEWLINE, end) or not receiver(data[begin:end]):
                break
            at = end + 2
        return data[at:] if at else data
