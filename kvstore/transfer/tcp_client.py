"""Pulls blocks over TCP from the stores of other nodes, straight into slots of the arena."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, is_sound
from kvstore.core.layout import CHECKSUM
from kvstore.transfer.frames import BadFrame, BlocksFollow, FetchBlocks, FetchEnd, encode_frame
from kvstore.transfer.interface import BlockDestination, BlockName, BlockRequest, CorruptData, PeerUnreachable
from kvstore.transfer.lending import TIER
from kvstore.transfer.link_rates import LinkRates
from kvstore.transfer.tcp_connection import STALL_SECONDS, Disconnected, TcpConnection
from kvstore.transfer.tcp_server import TRANSPORT
from kvstore.transfer.tls import TransferTls
from shared.blocks import BlockHash
from shared.reliability.retry import Backoff

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Stores that are remembered; the one that was used longest ago is forgotten first."""
KEPT_CONNECTIONS = 4
"""To one store, while nothing is fetched over them."""
KEPT_SECONDS = 30.0
"""Less than the other side keeps them, so that it is not the first to close one."""
MAX_FETCHES = 128
"""At a time: as many threads may receive."""
CONNECT_SECONDS = 5.0
CONNECT_WAIT = 0.25
"""What a fetch waits for a connection; one that takes longer is made beside it, for the next fetch."""
RETRY = Backoff(first=1.0, longest=60.0)
"""Seconds until a store that could not be reached is tried again."""


class _KnownStore:
    """What is known of one other store."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, TcpConnection]] = []
        """Connections that are not in use, with the time since when."""
        self.failures = 0
        self.retry_at = 0.0


class TcpClient:
    """Owns the connections to the stores of other nodes."""

    def __init__(self, tls: TransferTls | None) -> None:
        """Raises TlsUnusable."""
        self.rates = LinkRates()
        """What each link was measured to do; only this class writes it."""
        self._context = None if tls is None else tls.client_context()
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "transfer-receive")
        self._peers: OrderedDict[str, _KnownStore] = OrderedDict()
        self._connecting: set[asyncio.Task[TcpConnection | None]] = set()
        self.fetching = 0

    async def run(self) -> None:
        """Until cancelled; closes connections that nobody uses, and all of them then."""
        try:
            while True:
                await asyncio.sleep(KEPT_SECONDS / 4)
                self._close_kept(before=time.monotonic() - KEPT_SECONDS)
        finally:
            for task in self._connecting:
                task.cancel()
            self._close_kept(before=float("inf"))
            self._threads.shutdown(wait=False)

    async def fetch(
        self, address: str, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """See `BlockTransport.fetch`. The payload of what is yielded lies in `room`."""
        if self.fetching >= MAX_FETCHES:
            raise PeerUnreachable(f"{self.fetching} fetches are under way")
        self.fetching += 1
        connection, came = None, False
        try:
            connection = await self._connection(address)
            async with contextlib.aclosing(self._fetch(connection, address, request, shape, room)) as blocks:
                async for block in blocks:
                    came = True
                    yield block
            self._keep(address, connection)
            connection = None
        except _NoRoom:
            pass
        except (Disconnected, OSError, BadFrame) as error:
            if not came:
                self._record_failure(address, error)
                raise PeerUnreachable(f"{address}: {error}") from None
            metrics.TIER_FAILED.labels(TIER, "unavailable").inc()
        except CorruptData as error:
            metrics.TIER_SPOILED.labels(TIER).inc()
            log.warning("blocks from another node refused", extra={"store": address, "error": str(error)})
        except _Refused as refused:
            metrics.TIER_FAILED.labels(TIER, str(refused)).inc()
            if connection is not None:
                self._keep(address, connection)
                connection = None
        except asyncio.CancelledError:
            metrics.TIER_FAILED.labels(TIER, "late").inc()
            raise
        finally:
            self.fetching -= 1
            if connection is not None:
                connection.close()

    async def _fetch(
        self, connection: TcpConnection, address: str, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Ends when the sender has said that it is through. Raises BadFrame, CorruptData, _Refused, _NoRoom,
        Disconnected and OSError."""
        asked = FetchBlocks(layout=request.layout, hashes=b"".join(request.hashes), patience=request.patience)
        since, first, left = time.monotonic(), True, request.hashes
        await connection.write(encode_frame(asked))
        while True:
            frame = await connection.read_frame(request.patience + STALL_SECONDS)
            if isinstance(frame, FetchEnd) and frame.refused:
                raise _Refused(frame.refused)
            if isinstance(frame, FetchEnd):
                return
            if frame is None:
                raise Disconnected("while blocks were awaited")
            if not isinstance(frame, BlocksFollow):
                raise BadFrame(f"{type(frame).__name__} where BlocksFollow belongs")
            _check(frame, left, shape)
            blocks, sound = await _received(connection, frame, shape, room)
            # What the caller did with the blocks before counts, too: that is the pace of the link.
            before, since = since, time.monotonic()
            size = len(blocks) * shape.payload_bytes
            if not frame.waited and blocks:
                self.rates.record(address, size, since - before, since, first=first)
            first = False
            metrics.TIER_HITS.labels(TIER).inc(sound)
            metrics.TIER_BYTES_IN.labels(TIER).inc(size)
            metrics.TRANSFER_BYTES.labels(TRANSPORT, "in").inc(size)
            self._peer(address).failures = 0
            for block in blocks[:sound]:
                yield block
            if sound < len(blocks):
                raise CorruptData(f"checksums of {blocks[sound].hash.hex()}")
            if len(blocks) < len(frame.blocks):
                raise _NoRoom
            left = left[len(blocks) :]

    # ---- connections

    async def _connection(self, address: str) -> TcpConnection:
        """One that is kept, or a new one. Raises PeerUnreachable."""
        peer = self._peer(address)
        while peer.kept:
            _, kept = peer.kept.pop()
            if kept.is_idle():
                return kept
            kept.close()
        if time.monotonic() < peer.retry_at:
            raise PeerUnreachable(f"{address} could not be reached a moment ago")
        if len(self._connecting) >= MAX_FETCHES:
            raise PeerUnreachable(f"{len(self._connecting)} connections are being made")
        task = asyncio.create_task(self._connect(address))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        try:
            await asyncio.wait([task], timeout=CONNECT_WAIT)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._keep_late, address))
            raise
        if not task.done():
            task.add_done_callback(partial(self._keep_late, address))
            raise PeerUnreachable(f"{address} does not answer at once")
        made = task.result()
        if made is None:
            raise PeerUnreachable(address)
        return made

    async def _connect(self, address: str) -> TcpConnection | None:
        """A new connection; None where there is none to be had, which is logged."""
        made = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                made = await _opened(address, self._threads)
                if self._context is not None:
                    await made.secure(self._context, address.rpartition(":")[0].strip("[]"))
        except (OSError, Disconnected, ValueError, OverflowError) as error:  # the last two: no address
            if made is not None:
                made.close()
            self._record_failure(address, error)
            return None
        except asyncio.CancelledError:
            if made is not None:
                made.close()
            raise
        return made

    def _record_failure(self, address: str, error: Exception) -> None:
        """The store is not tried again for a while; its blocks come by another transport, or not at all."""
        peer = self._peer(address)
        peer.failures += 1
        peer.retry_at = time.monotonic() + RETRY.pause(peer.failures - 1)
        level = logging.WARNING if peer.failures == 1 else logging.DEBUG
        log.log(level, "no blocks from another store by TCP", extra={"store": address, "error": str(error)})

    def _keep_late(self, address: str, done: asyncio.Task[TcpConnection | None]) -> None:
        if not done.cancelled() and (made := done.result()) is not None:
            self._keep(address, made)

    def _keep(self, address: str, connection: TcpConnection) -> None:
        peer = self._peer(address)
        if len(peer.kept) >= KEPT_CONNECTIONS:
            connection.close()
        else:
            peer.kept.append((time.monotonic(), connection))

    def _peer(self, address: str) -> _KnownStore:
        peer = self._peers.pop(address, None) or _KnownStore()
        self._peers[address] = peer
        if len(self._peers) > MAX_PEERS:
            for _, connection in self._peers.popitem(last=False)[1].kept:
                connection.close()
        return peer

    def _close_kept(self, before: float) -> None:
        for peer in self._peers.values():
            for _, connection in (old for old in peer.kept if old[0] < before):
                connection.close()
            peer.kept = [each for each in peer.kept if each[0] >= before]


class _NoRoom(Exception):
    """The arena is full: what the sender has begun to send is not read any more."""


class _Refused(Exception):
    """The other store does not serve this fetch; the text is the reason."""


async def _opened(address: str, threads: ThreadPoolExecutor) -> TcpConnection:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return TcpConnection(sock, threads)


def _check(frame: BlocksFollow, left: Sequence[BlockHash], shape: BlockShape) -> None:
    """Raises CorruptData where these are not the next blocks of the run."""
    if frame.payload_bytes != shape.payload_bytes:
        raise CorruptData(f"blocks of {frame.payload_bytes} bytes, {shape.payload_bytes} expected")
    if len(frame.blocks) > len(left):
        raise CorruptData(f"{len(frame.blocks)} blocks, {len(left)} are left")
    for head, name in zip(frame.blocks, left, strict=False):
        if head.hash != name:
            raise CorruptData(f"{head.hash.hex()} came for {name.hex()}")
        if len(head.checksums) != shape.cells * CHECKSUM.size:
            raise CorruptData(f"{len(head.checksums)} bytes of checksums for {shape.cells} cells")


async def _received(
    connection: TcpConnection, frame: BlocksFollow, shape: BlockShape, room: BlockDestination
) -> tuple[list[InFlightBlock], int]:
    """The leading blocks of the frame for which there is room, in it; and how many of them, from the first on, have the
    right checksums."""
    until = time.monotonic() + room.seconds
    names = [BlockName(BlockHash(head.hash), BlockHash(head.parent), head.tokens) for head in frame.blocks]
    # What is here already has to be read all the same, to where nobody looks.
    views = [view if view is not None else memoryview(bytearray(shape.payload_bytes)) for view in room.reserve(names)]
    blocks = [
        InFlightBlock(name.hash, name.parent, name.tokens, head.checksums, view)
        for head, name, view in zip(frame.blocks, names, views, strict=False)
    ]

    def receive() -> int:
        connection.receive_payloads(views, until)
        return next((at for at, block in enumerate(blocks) if not is_sound(block, shape)), len(blocks))

    return blocks, await connection.in_thread(receive) if blocks else 0
