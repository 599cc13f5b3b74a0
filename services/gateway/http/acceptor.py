"""Takes in connections as they come, many at a time.

uvloop takes one for each turn of its loop. A gateway that streams is given a step's tokens in nearly every turn, and a
turn lasts until they are written: of 200 clients that connect at once beside 60
streams, the last would wait for seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16
"""Connections in one turn of the loop; between two turns the open streams get their tokens."""
RETRY_SECONDS = 1.0
"""Until another try where there are no more file descriptors, or no memory."""
SCARCITY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Owns a listening socket, which is not closed before `close`."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """`protocol` makes what speaks with one client. Listens at once; called on the event loop."""
        listener.setblocking(False)
        self._listener, self._protocol = listener, protocol
        self._loop = asyncio.get_running_loop()
        self._handing_over: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Takes no more. What the kernel has taken meanwhile, nobody answers."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except OSError as error:  # none waits, or this one's network failed: accept(2)
                if error.errno in SCARCITY:
                    self._pause(error)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._hand_over(client))
            self._handing_over.add(task)
            task.add_done_callback(self._handing_over.discard)

    def _pause(self, error: OSError) -> None:
        """The listener stays ready all the while: looking at it at once would take a whole processor."""
        log.error("cannot take connections", extra={"error": str(error)})
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_SECONDS, self._listen)

    async def _hand_over(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError as error:  # it went away meanwhile
            log.debug("a client left at once", extra={"error": str(error)})
            client.close()
