"""What an engine of several ranks says to each of them, which is a process of its own: messages of the bus as bytes,
one way plans, the other way everything else."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
from msgspec import Struct

MAX_PAYLOAD = 2**28
"""Bytes of one message: there is no server that would have to take it."""
FAILED = ""
"""The subject under which a rank says why it cannot serve."""
_LENGTH_BYTES = 4


class Passed(Struct, frozen=True, array_like=True):
    """A message of the bus."""

    subject: str
    payload: bytes


class RankLink:
    """Owns one end of a connection between two processes of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, connected: socket.socket) -> RankLink:
        return cls(*await asyncio.open_connection(sock=connected))

    async def send(self, subject: str, payload: bytes) -> None:
        """Returns when the other end is not far behind. To one that is gone nothing is sent: `next` says so."""
        encoded = msgspec.msgpack.encode(Passed(subject, payload))
        self._writer.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def next(self) -> Passed | None:
        """None: the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Passed)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
