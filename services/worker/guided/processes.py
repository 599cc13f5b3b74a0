"""The processes that compile and follow grammars, as the rank sees them; one server starts them all."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import time
from threading import Lock

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.worker.guided.protocol import (
    MAX_CONTROL_BYTES,
    OUT_OF_MEMORY,
    Channel,
    ChannelClosed,
    Exited,
    Filled,
    Fork,
    FromProcess,
    FromServer,
    Jumped,
    JumpForward,
    ServerLoaded,
    ServerSettings,
    Signal,
    ToProcess,
    ToServer,
)
from shared.messages.scheduler import GrammarFault

ANSWER_TIMEOUT = 10.0
"""Seconds. A process that takes too long ends itself, by its processor time; one that does not even run is ended."""
EXIT_TIMEOUT = 2.0
"""Seconds from the end of a process's channel to the server's word on how it ended."""

_LOOK_EVERY = 0.01
_from_process = msgspec.msgpack.Decoder(FromProcess)
_from_server = msgspec.msgpack.Decoder(FromServer)


class GrammarGone(Exception):
    """The process of a grammar has ended, or was ended as it did not answer."""

    def __init__(self, error: str, fault: GrammarFault) -> None:
        super().__init__(error)
        self.error, self.fault = error, fault


class ServerLink:
    """Owns the server's process and what it says. Any thread may use it."""

    def __init__(self, settings: ServerSettings) -> None:
        """Starts it; it has loaded when `loaded` is no longer None."""
        self.limits = settings.limits
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = started(theirs, settings)
        theirs.close()
        self.loaded: ServerLoaded | None = None
        self.alive = True
        self._numbers = 0
        self._reading = Lock()
        self._exits: dict[int, Exited] = {}
        """Of processes whose end nobody has asked about yet."""

    def read(self) -> None:
        """Takes one message in, if there is one."""
        with self._reading:
            try:
                data = self.socket.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.alive = False
                return
            match _from_server.decode(data):
                case ServerLoaded() as loaded:
                    self.loaded = loaded
                case Exited() as exited:
                    self._exits[exited.number] = exited

    def fork(self) -> GrammarProcess:
        """A process that waits for its grammar."""
        ours, theirs = socket.socketpair()
        self._numbers += 1
        try:
            socket.send_fds(self.socket, [msgspec.msgpack.encode(Fork(self._numbers))], [theirs.fileno()])
        except OSError:
            self.alive = False  # and the process that we return has ended
        theirs.close()
        return GrammarProcess(self, self._numbers, ours)

    def send_signal(self, number: int, sent: signal.Signals) -> None:
        """To a process; nothing happens where it has ended."""
        message: ToServer = Signal(number, sent)
        try:
            self.socket.send(msgspec.msgpack.encode(message))
        except OSError:
            self.alive = False

    def exit_of(self, number: int) -> Exited | None:
        """How a process ended whose channel has: waits for the server's word; None where that does not come."""
        deadline = time.monotonic() + EXIT_TIMEOUT
        while number not in self._exits and self.alive and time.monotonic() < deadline:
            select.select([self.socket], [], [], _LOOK_EVERY)
            self.read()
        return self._exits.pop(number, None)

    def close(self) -> None:
        """The server ends, and all its processes with it."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        self.socket.close()


def started(control: socket.socket, settings: ServerSettings) -> subprocess.Popen[bytes]:
    """A server that hears `control`. Python is started anew, as the rank has threads."""
    start = f"import sys; sys.path[:] = sys.argv[3:]; from {__package__}.fork_server import main; main()"
    arguments = (str(control.fileno()), msgspec.json.encode(settings).decode(), *sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", start, *arguments], pass_fds=(control.fileno(),), stdin=subprocess.DEVNULL
    )


class GrammarProcess:
    """Owns the channel to the process of one grammar. It compiles first; then sequences follow it."""

    def __init__(self, server: ServerLink, number: int, end: socket.socket) -> None:
        self._server = server
        self._number = number
        self.channel = Channel(end)
        self.channel.set_timeout(ANSWER_TIMEOUT)
        self.compiled = False
        self._gone: GrammarGone | None = None

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended; nothing can follow the grammar here any more."""
        return self._gone is not None

    def send(self, message: ToProcess) -> None:
        """Raises GrammarGone."""
        self._check()
        try:
            self.channel.send(message)
        except ChannelClosed:
            raise self._find_reason() from None

    def receive(self) -> tuple[object, bytearray]:
        """The next answer. Raises GrammarGone."""
        self._check()
        try:
            return self.channel.receive(_from_process)
        except ChannelClosed:
            raise self._find_reason() from None

    def filled(self) -> tuple[Filled, NDArray[np.int32]]:
        """The answer to a `Fill`, and [rows, words] the masks. Raises GrammarGone."""
        filled, body = self.receive()
        assert isinstance(filled, Filled), f"no masks: {filled!r}"
        rows = sum(count for _, count in filled.bound)
        return filled, np.frombuffer(body, dtype=np.int32).reshape(rows, -1 if rows else 0)

    def jump_forward(self, wanted: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        """The tokens that each (sequence, most) is forced to. Raises GrammarGone."""
        self.send(JumpForward(tuple(wanted)))
        jumped, _ = self.receive()
        assert isinstance(jumped, Jumped), f"no forced tokens: {jumped!r}"
        return jumped.tokens

    def pause(self, *, paused: bool) -> None:
        """Lets it stand still, or go on."""
        self._server.send_signal(self._number, signal.SIGSTOP if paused else signal.SIGCONT)

    def end(self) -> None:
        """It is of no use any more."""
        if self._gone is None:
            self._gone = GrammarGone("it was forgotten", "lost")
        self._server.send_signal(self._number, signal.SIGKILL)
        self.channel.close()

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _find_reason(self) -> GrammarGone:
        """Why the channel is closed, or silent."""
        if self._gone is None:
            self._server.send_signal(self._number, signal.SIGKILL)
            self._gone = self._reason(self._server.exit_of(self._number))
        return self._gone

    def _reason(self, exited: Exited | None) -> GrammarGone:
        limits = self._server.limits
        if exited is None and not self._server.alive:
            return GrammarGone("the server of grammars' processes has ended", "lost")
        if exited is None or exited.signal == signal.SIGKILL:
            error = f"the process of the grammar was killed, or did not answer for {ANSWER_TIMEOUT:g} s"
            return GrammarGone(error, "died")
        if exited.signal == signal.SIGPROF:
            error = limits.too_slow_to_follow() if self.compiled else limits.too_long_to_compile()
            return GrammarGone(error, "refused")
        if exited.status == OUT_OF_MEMORY:
            return GrammarGone(limits.too_large(), "refused")
        if exited.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            name = signal.Signals(exited.signal).name
            return GrammarGone(f"the grammar's matcher cannot take it, and ended with {name}", "refused")
        return GrammarGone(f"the process of the grammar ended with status {exited.status}", "died")
