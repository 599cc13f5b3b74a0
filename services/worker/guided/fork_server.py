"""A process that starts a process for each grammar of a rank, see `processes.ServerLink`.

It loads the back ends and the vocabulary once, seconds that are then shared by all: a grammar's process is a fork, in
milliseconds, with a few MB of its own. This process runs nothing of a client's. One thread, so that forking is safe.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress

import msgspec

from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.host import GrammarHost, OutOfMemory, confine
from services.worker.guided.protocol import (
    MAX_CONTROL_BYTES,
    OUT_OF_MEMORY,
    Channel,
    Exited,
    Fork,
    ServerLoaded,
    ServerSettings,
    Signal,
    ToServer,
)
from services.worker.guided.schema.keywords import GrammarRefused
from shared.child_watch import ChildWatch, leave_child_watch, reaped


class ForkServer:
    """Owns the grammars' processes of one rank, and ends with it."""

    def __init__(self, control: socket.socket, settings: ServerSettings) -> None:
        """`control`: a socket that keeps messages apart."""
        self._control = control
        self._limits = settings.limits
        self._compiler = GrammarCompiler(settings.folder, settings.vocab_size, settings.stops, settings.backend)
        self._numbers: dict[int, int] = {}
        """By process id."""
        self._decode = msgspec.msgpack.Decoder(ToServer).decode
        self._pid = os.getpid()

    def run(self) -> None:
        """Until the rank closes `control`, or is gone."""
        self._control.send(msgspec.msgpack.encode(ServerLoaded(self._load_error())))
        gc.collect()
        gc.freeze()
        with ChildWatch(self._control) as watch:
            while True:
                readable = watch.wait()
                for pid, code in reaped():
                    self._control.send(
                        msgspec.msgpack.encode(Exited(self._numbers.pop(pid), max(0, -code), max(0, code)))
                    )
                if readable and not self._obey():
                    break
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)

    def _load_error(self) -> str | None:
        try:
            self._compiler.load()
        except GrammarRefused as refused:
            return str(refused)
        return None

    def _obey(self) -> bool:
        """False where the rank is gone."""
        data, ends, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
        if not data:
            return False
        match self._decode(data):
            case Fork(number):
                self._fork(number, socket.socket(fileno=ends[0]))
            case Signal(number, sent):
                for pid, known in self._numbers.items():
                    if known == number:
                        os.kill(pid, sent)
        return True

    def _fork(self, number: int, end: socket.socket) -> None:
        pid = os.fork()
        if pid:
            self._numbers[pid] = number
            end.close()
            return
        status = 1
        channel = Channel(end)  # open until the process ends: who sees it closed asks why, and kills what still runs
        try:
            leave_child_watch()
            self._control.close()
            confine(self._limits, self._pid)
            GrammarHost(channel, self._compiler, self._limits).run()
            status = 0
        except OutOfMemory:
            status = OUT_OF_MEMORY
        except BaseException:  # nothing of the server's may run on in here
            traceback.print_exc()
        finally:
            os._exit(status)


def main() -> None:
    """Serves the rank that has started this process. Arguments: the descriptor of `control`, and `ServerSettings`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank drains, and ends us
    settings = msgspec.json.decode(sys.argv[2], type=ServerSettings)
    with suppress(ConnectionError):
        ForkServer(socket.socket(fileno=int(sys.argv[1])), settings).run()
