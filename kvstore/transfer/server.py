"""Sends this store's blocks to the stores of other nodes, which fetch them. Knows the arena only as a `BlockLender`.

A fetch with patience follows a prompt while it is computed: it is sent each block as soon as that is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import grpc

from kvstore import metrics
from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.transfer.interface import BlockLender, CannotListen
from kvstore.transfer.rpc import (
    CHUNK_BYTES,
    MAX_FETCH_SECONDS,
    SERVER_OPTIONS,
    Sending,
    TransferTls,
    handler,
    host_and_port,
)
from kvstore.transfer.transfer_pb2 import Block, Chunk, FetchRequest
from shared.blocks import HASH_BYTES, BlockHash, split_hashes

TIER = "peer"
MAX_SENDING = 16
"""Fetches served at a time; the next one is refused, which is a miss to its sender."""
MAX_FOLLOWING = 64
"""Fetches with patience at a time, which mostly wait."""
MAX_PATIENCE = 10.0
"""Seconds that a fetch may wait for one block, whatever it asks for."""
LENT_BLOCKS = 32
"""Pinned at a time for one Fetch, however many it asks for."""
STOP_SECONDS = 1.0


class TransferServer:
    """Owns the gRPC server. What is being sent is pinned, and no longer than it is being sent."""

    def __init__(self, lender: BlockLender, tls: TransferTls | None = None, max_sending: int = MAX_SENDING) -> None:
        self._lender = lender
        self._tls = tls
        self._max_sending = max_sending
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((handler(self._fetch),))
        self.sending = 0
        self.following = 0

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; 0 lets the system choose one. Raises CannotListen."""
        where = host_and_port(host, port)
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(where)
            else:
                bound = self._server.add_secure_port(where, self._tls.server_credentials())
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {where}: {error}") from None
        await self._server.start()
        return int(bound)

    async def stop(self) -> None:
        """Stops listening; fetches under way are ended after STOP_SECONDS."""
        await self._server.stop(STOP_SECONDS)

    async def _fetch(self, request: FetchRequest, context: Sending) -> None:
        patience = min(max(0.0, request.patience), MAX_PATIENCE)
        count, limit = (self.following, MAX_FOLLOWING) if patience else (self.sending, self._max_sending)
        if count >= limit:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{count} are being served")
        if not request.hashes or len(request.hashes) % HASH_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(request.hashes)} bytes of hashes")
        try:
            with self._counted(follows=patience > 0):
                async with asyncio.timeout(MAX_FETCH_SECONDS):
                    await self._send_run(request.layout, list(split_hashes(request.hashes)), patience, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the blocks are not held for you any longer")

    async def _send_run(self, layout: str, hashes: Sequence[BlockHash], patience: float, context: Sending) -> None:
        sent, waited = 0, False
        while wanted := hashes[sent : sent + LENT_BLOCKS]:
            lent = self._lender.lend(layout, wanted)
            if lent is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"no blocks of layout {layout}")
            with lent as blocks:
                await self._send(blocks, context, waited=waited)
            sent, waited = sent + len(blocks), not blocks
            # Nothing is awaited between the look at the arena and the wait, so that no commit is missed.
            if not blocks and not (patience and await self._lender.committed(layout, wanted[0], patience)):
                return
            if len(blocks) < len(wanted) and not patience:
                return

    async def _send(self, blocks: Sequence[InFlightBlock], context: Sending, *, waited: bool) -> None:
        """Writing waits while the receiver's window is full, so a slow reader is sent to slowly. `waited`: for the
        first of them to be committed."""
        for block in blocks:
            await self._lender.copying(len(block.payload))
            for chunk in chunks(block, waited=waited):
                await context.write(chunk)
            waited = False
            metrics.TIER_STORED.labels(TIER).inc()
            metrics.TIER_BYTES_OUT.labels(TIER).inc(len(block.payload))

    @contextlib.contextmanager
    def _counted(self, *, follows: bool) -> Iterator[None]:
        self.following += follows
        self.sending += not follows
        try:
            yield
        finally:
            self.following -= follows
            self.sending -= not follows


def chunks(block: InFlightBlock, *, waited: bool = False) -> Iterator[Chunk]:
    """The block as it is sent: what names it, then its payload in pieces of CHUNK_BYTES at the most."""
    view = memoryview(block.payload)
    begins = Block(hash=block.hash, parent=block.parent, tokens=block.tokens, checksums=block.checksums)
    begins.waited = waited
    yield Chunk(begins=begins, payload=bytes(view[:CHUNK_BYTES]))
    for start in range(CHUNK_BYTES, len(view), CHUNK_BYTES):
        yield Chunk(payload=bytes(view[start : start + CHUNK_BYTES]))
