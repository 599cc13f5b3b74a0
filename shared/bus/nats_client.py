"""The connection to a NATS server: the library's client, with less delay and work for each message."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from shared.bus.nats_wire import DirectReceivers, publish_command
from shared.telemetry.metrics import BUS_ROUND_TRIP


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Imports inside find no such module installed, unless it has been imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's own way to say that an import shall fail
    try:
        yield
    finally:
        del sys.modules[module]


# Where aiohttp is installed, nats-py imports it for WebSockets, which hardly anybody uses: that was half of the time
# that a light service took to start, and 10 MB of each.
with _hidden("aiohttp"):
    import nats
    import nats.aio.transport
    import nats.errors
    import nats.micro
    from nats.aio.client import Client, Srv
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as NatsNativeSubscription
    from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER, Request
    from nats.protocol.parser import AWAITING_CONTROL_LINE

__all__ = [
    "ERROR_CODE_HEADER",
    "ERROR_HEADER",
    "Client",
    "EncryptedClient",
    "Msg",
    "NatsNativeSubscription",
    "PromptClient",
    "Request",
    "nats",
]

PROMPT_BYTES = 2**15
"""Bytes that the socket has not taken yet, up to which more are handed to it at once; asyncio lets a writer wait at 64
KiB."""


class PromptClient(Client):
    """Hands what is published to the socket before the next task runs: its own writer is a task that has to be woken up
    first, behind all that were, which took a tenth of a millisecond of every hop. And hands out what it receives as it
    comes from the socket, where its own reader is a task, too, and each subscription another."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = DirectReceivers()

    async def _connect_to_server(self, s: Srv) -> None:
        """Ends the attempt before: the library forgets a connection on which a busy server does not answer in time, and
        leaves its socket to the collection of garbage."""
        transport = self._transport
        if isinstance(transport, nats.aio.transport.TcpTransport) and transport._io_writer is not None:
            transport._io_writer.transport.abort()
        await super()._connect_to_server(s)

    async def _read_loop(self) -> None:
        transport = self._transport
        if isinstance(transport, nats.aio.transport.TcpTransport) and transport._io_reader is not None:
            self._read_directly(transport._io_reader)
        await super()._read_loop()

    def _read_directly(self, reader: asyncio.StreamReader) -> None:
        """Whatever nobody takes at once goes to `reader`, and all that comes until the library has read it."""
        feed, parser = reader.feed_data, self._ps

        def receive(data: bytes) -> None:
            if not (reader._buffer or parser.buf or parser.state != AWAITING_CONTROL_LINE):  # type: ignore[attr-defined]
                data = self.direct.take(data)
            if data:
                feed(data)

        reader.feed_data = receive  # type: ignore[method-assign, assignment]

    async def _process_pong(self) -> None:
        """One that comes after its flush was given up answers nobody. The library would set the result of what was
        cancelled, which ends its reader: the process heard nothing more until its pings found that out."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Measures each round trip, or how long it was waited for: the client pings by itself, and at each flush."""
        answered, sent = future or asyncio.get_running_loop().create_future(), time.monotonic()
        answered.add_done_callback(lambda _: BUS_ROUND_TRIP.set(time.monotonic() - sent))
        await super()._send_ping(answered)

    def publish_at_once(self, subject: str, payload: bytes, reply: str) -> bool:
        """Publishes what is valid and not too large; False: nothing was done, as there is no socket that takes it."""
        transport = self._transport
        if transport is None or self._pending or self.is_draining_pubs or not self._takes_more(transport):
            return False
        try:
            transport.write(publish_command(subject, reply, payload))
        except (OSError, RuntimeError):  # the connection has just ended: the library keeps it for the next one
            return False
        return True

    async def _flush_pending(self, force_flush: bool = False) -> None:
        transport = self._transport
        if force_flush or transport is None or not self._takes_more(transport):
            await super()._flush_pending(force_flush)
            return
        try:
            transport.writelines(self._pending)
        except (OSError, RuntimeError):  # the connection has just ended: its writer knows what to do then
            await super()._flush_pending()
        else:
            self._pending, self._pending_data_size = [], 0

    def _takes_more(self, transport: nats.aio.transport.Transport) -> bool:
        """Whether the server keeps up: otherwise the writer waits for it, and the bound of what is pending holds."""
        if not self.is_connected or not isinstance(transport, nats.aio.transport.TcpTransport):
            return False
        writer = transport._io_writer
        return writer is not None and writer.transport.get_write_buffer_size() < PROMPT_BYTES


class EncryptedClient(PromptClient):
    """Sends no password over a connection that is not encrypted, whatever the server says that it needs: between us and
    it there may be somebody who leaves its demand out."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise nats.errors.Error("it offers no TLS")
        return super()._connect_command()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:  # what waits for the server would be written to a transport that TLS has closed
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)
