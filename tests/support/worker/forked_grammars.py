"""Servers of grammars are forked from a process that has imported what they need: that is most of the two seconds of
processor time that one takes to start."""

from __future__ import annotations

import socket
from multiprocessing import process

from services.worker.guided.fork_server import ForkServer
from services.worker.guided.protocol import ServerSettings
from tests.support.worker.rank_processes import FORKING


class ForkedServer:
    """What a rank does with the process of its server."""

    def __init__(self, control: socket.socket, settings: ServerSettings) -> None:
        self._process = FORKING.Process(target=_serve, args=(control, settings), daemon=True)
        self._process.start()
        process._children.discard(self._process)  # type: ignore[attr-defined] # it ends with its rank's end of `control`

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _serve(control: socket.socket, settings: ServerSettings) -> None:
    ForkServer(control, settings).run()
