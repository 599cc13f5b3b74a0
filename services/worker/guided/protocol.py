"""Between a rank and its grammars' processes: messages, and the channel that carries them. No xgrammar, no torch."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from threading import Lock

import msgspec
from msgspec import Struct

from services.worker.guided.limits import GrammarBackendName, GrammarLimits
from shared.messages.generation import Grammar

# ---- the rank to the process of one grammar; the first message is `Compile`


class Compile(Struct, frozen=True, array_like=True, tag=True):
    """Compile this; answered by `Compiled`, and, where that has no error, by `MatcherReady`."""

    grammar: Grammar


class StartMatching(Struct, frozen=True, array_like=True, tag=True):
    """A new sequence follows the grammar. Not answered."""

    number: int
    """Never used before."""
    stops: tuple[int, ...]
    """Tokens that end it; the model's own where there are none."""
    after: str
    """See `Grammar.after`."""
    output: bytes
    """Packed uint32: tokens that it has put out already."""


class StopMatching(Struct, frozen=True, array_like=True, tag=True):
    """The sequence has ended. Not answered."""

    number: int


class Accept(Struct, frozen=True, array_like=True, tag=True):
    """What was drawn for each sequence. Not answered."""

    drawn: tuple[tuple[int, tuple[int, ...]], ...]


class Fill(Struct, frozen=True, array_like=True, tag=True):
    """What may be drawn next for each sequence, and behind each of its drafts; answered by `Filled`."""

    wanted: tuple[tuple[int, tuple[int, ...]], ...]


class JumpForward(Struct, frozen=True, array_like=True, tag=True):
    """Which tokens are forced for each sequence, so many at most; answered by `Jumped`."""

    wanted: tuple[tuple[int, int], ...]


ToProcess = Compile | StartMatching | StopMatching | Accept | Fill | JumpForward

# ---- back


class Compiled(Struct, frozen=True, array_like=True, tag=True):
    """It is compiled; or why it is not."""

    error: str | None


class MatcherReady(Struct, frozen=True, array_like=True, tag=True):
    """A matcher has made its first step within the limits: sequences may follow it; or why it cannot."""

    error: str | None = None


Failure = tuple[int, str]
"""A sequence that is followed no longer, and why."""


class Filled(Struct, frozen=True, array_like=True, tag=True):
    """The masks are the body, [rows, words] of int32, of all sequences one behind the other."""

    bound: tuple[tuple[int, int], ...]
    """Sequences, and how many rows each has. Those missing may draw anything."""
    failed: tuple[Failure, ...] = ()
    dead_ends: int = 0
    """Sequences for which nothing is left but to end."""
    broken: int = 0
    """Tokens that were taken though the grammar does not allow them."""
    seconds: float = 0.0
    """Of processor time that the masks took."""


class Jumped(Struct, frozen=True, array_like=True, tag=True):
    """In the order of `JumpForward.wanted`."""

    tokens: tuple[tuple[int, ...], ...]


FromProcess = Compiled | MatcherReady | Filled | Jumped

# ---- the rank to the server that forks those processes; the new process's end of the channel goes with `Fork`


class ServerSettings(Struct, frozen=True):
    """What a rank starts its server with."""

    folder: str
    """Of the model."""
    vocab_size: int
    stops: tuple[int, ...]
    limits: GrammarLimits
    backend: GrammarBackendName = "auto"


class Fork(Struct, frozen=True, array_like=True, tag=True):
    """Start a process for one grammar."""

    number: int


class Signal(Struct, frozen=True, array_like=True, tag=True):
    """Send it a signal; one that has ended is no error."""

    number: int
    signal: int


ToServer = Fork | Signal


class ServerLoaded(Struct, frozen=True, array_like=True, tag=True):
    """The server can fork; or why no grammar can be compiled for this model."""

    error: str | None


class Exited(Struct, frozen=True, array_like=True, tag=True):
    """A process has ended."""

    number: int
    signal: int
    """0: by itself."""
    status: int
    """`OUT_OF_MEMORY`, or a bug where it is not 0."""


OUT_OF_MEMORY = 3
"""Exit status of a process that was given no more memory."""


FromServer = ServerLoaded | Exited

MAX_CONTROL_BYTES = 4096
"""Of a message to or from the server."""


class ChannelClosed(Exception):
    """The process at the other end has ended, or has not answered in time."""


_HEADER = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode


class _LastingSocket(socket.socket):
    """Its descriptor is given back with the object, and no sooner: no thread reads from another's by mistake."""

    def __del__(self) -> None:
        self.close()


class Channel:
    """Owns one end of a stream socket. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        """Takes `end` over."""
        self._socket = _LastingSocket(fileno=end.detach())
        self._sending = Lock()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, message: ToProcess | FromProcess, body: bytes = b"") -> None:
        """Raises ChannelClosed."""
        head = _encode(message)
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(head), len(body)) + head + body)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(
        self, decoder: msgspec.msgpack.Decoder[ToProcess] | msgspec.msgpack.Decoder[FromProcess]
    ) -> tuple[object, bytearray]:
        """The next message and its body. Raises ChannelClosed, also where nothing comes for as long as
        `set_timeout` says."""
        head, body = _HEADER.unpack(self._read(_HEADER.size))
        return decoder.decode(self._read(head)), self._read(body)

    def set_timeout(self, seconds: float | None) -> None:
        """How long the other end may be silent, or not read, when something is expected of it."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Whoever receives, here or at the other end, finds the stream ended. Any thread may."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        try:
            while len(view):
                got = self._socket.recv_into(view)
                if not got:
                    raise ChannelClosed("the process has ended")
                view = view[got:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        return data
