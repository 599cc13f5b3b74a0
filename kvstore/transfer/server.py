"""Sends this store's blocks over gRPC to the stores of other nodes, which fetch them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.transfer.interface import CannotListen
from kvstore.transfer.lending import BlockLending, FetchRefused
from kvstore.transfer.rpc import CHUNK_BYTES, SERVER_OPTIONS, TRANSPORT, Sending, handler, server_credentials
from kvstore.transfer.tls import TransferTls
from kvstore.transfer.transfer_pb2 import Block, Chunk, FetchRequest
from shared.addresses import host_and_port
from shared.blocks import HASH_BYTES, split_hashes

STOP_SECONDS = 1.0


class TransferServer:
    """Owns the gRPC server."""

    def __init__(self, lending: BlockLending, tls: TransferTls | None = None) -> None:
        self._lending = lending
        self._tls = tls
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((handler(self._fetch),))

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; 0 lets the system choose one. Raises CannotListen."""
        where = host_and_port(host, port)
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(where)
            else:
                bound = self._server.add_secure_port(where, server_credentials(self._tls))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {where}: {error}") from None
        await self._server.start()
        return int(bound)

    async def stop(self) -> None:
        """Stops listening; fetches under way are ended after STOP_SECONDS."""
        await self._server.stop(STOP_SECONDS)

    async def _fetch(self, request: FetchRequest, context: Sending) -> None:
        if not request.hashes or len(request.hashes) % HASH_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(request.hashes)} bytes of hashes")

        async def send(blocks: Sequence[InFlightBlock], waited: bool) -> None:
            for block in blocks:
                # Writing waits while the receiver's window is full, so a slow reader is sent to slowly.
                for chunk in chunks(block, waited=waited):
                    await context.write(chunk)

        names = list(split_hashes(request.hashes))
        try:
            await self._lending.serve(request.layout, names, request.patience, send, transport=TRANSPORT)
        except FetchRefused as refused:
            await context.abort(grpc.StatusCode[refused.reason.upper()], str(refused))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the blocks are not held for you any longer")


def chunks(block: InFlightBlock, *, waited: bool = False) -> Iterator[Chunk]:
    """The block as it is sent: what names it, then its payload in pieces of CHUNK_BYTES at the most."""
    view = memoryview(block.payload)
    begins = Block(hash=block.hash, parent=block.parent, tokens=block.tokens, checksums=block.checksums)
    begins.waited = waited
    yield Chunk(begins=begins, payload=bytes(view[:CHUNK_BYTES]))
    for start in range(CHUNK_BYTES, len(view), CHUNK_BYTES):
        yield Chunk(payload=bytes(view[start : start + CHUNK_BYTES]))
