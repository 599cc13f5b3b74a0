"""Pulls blocks from the stores of other nodes. Blocks that do not come, or do not match their checksums, are misses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, is_sound
from kvstore.transfer.interface import BlockRequest, CorruptData
from kvstore.transfer.lending import TIER
from kvstore.transfer.link_rates import LinkRates
from kvstore.transfer.rpc import CHANNEL_OPTIONS, TRANSPORT, channel_credentials, fetch_call
from kvstore.transfer.tls import TransferTls
from kvstore.transfer.transfer_pb2 import Block, Chunk, FetchRequest
from shared.blocks import BlockHash

log = logging.getLogger(__name__)

MAX_CHANNELS = 64
"""Connections to other nodes; above it the one that was used longest ago is closed."""


class TransferClient:
    """Owns the connections to the stores of other nodes."""

    def __init__(self, tls: TransferTls | None = None) -> None:
        self.rates = LinkRates()
        """What each link was measured to do; only this class writes it."""
        self._tls = tls
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def run(self) -> None:
        """Until cancelled; closes the connections then."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            while self._channels:
                await self._channels.popitem()[1].close()

    async def fetch(
        self, address: str, request: BlockRequest, shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """The leading run of the requested blocks that the store at `address` sends, checked; see
        `BlockTransport.fetch`."""
        asked = FetchRequest(layout=request.layout, hashes=b"".join(request.hashes), patience=request.patience)
        since, first = time.monotonic(), True
        call = fetch_call(await self._channel(address), asked)
        try:
            async for block, waited in _blocks(call, request.hashes, shape):
                # What the caller did with the block before counts, too: that is the pace of the link.
                before, since = since, time.monotonic()
                if not waited:
                    self.rates.record(address, len(block.payload), since - before, since, first=first)
                first = False
                metrics.TIER_HITS.labels(TIER).inc()
                metrics.TIER_BYTES_IN.labels(TIER).inc(len(block.payload))
                metrics.TRANSFER_BYTES.labels(TRANSPORT, "in").inc(len(block.payload))
                yield block
        except CorruptData as error:
            metrics.TIER_SPOILED.labels(TIER).inc()
            log.warning("blocks from another node with wrong checksums", extra={"store": address, "error": str(error)})
        except grpc.aio.AioRpcError as error:
            metrics.TIER_FAILED.labels(TIER, error.code().name.lower()).inc()
        except asyncio.CancelledError:
            metrics.TIER_FAILED.labels(TIER, "late").inc()
            # gRPC raises it, too, where a connection is closed on this side; that is no reason to end the task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            call.cancel()

    async def _channel(self, address: str) -> grpc.aio.Channel:
        """Opened at first use; gRPC reconnects by itself, and meanwhile fails calls at once."""
        if address in self._channels:
            self._channels.move_to_end(address)
            return self._channels[address]
        if len(self._channels) >= MAX_CHANNELS:
            await self._channels.popitem(last=False)[1].close()
        if self._tls is None:
            channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, channel_credentials(self._tls), CHANNEL_OPTIONS)
        self._channels[address] = channel
        return channel


async def _blocks(
    call: Any, hashes: Sequence[BlockHash], shape: BlockShape
) -> AsyncGenerator[tuple[InFlightBlock, bool], None]:
    """Puts chunks together to blocks, each with whether its sender waited for it. Raises CorruptData, and what gRPC
    raises."""
    for name in hashes:
        first = await call.read()
        if first is grpc.aio.EOF:
            return
        payload = await _payload(call, first, shape)
        block = _block(first.begins, payload)
        if block.hash != name:
            raise CorruptData(f"{block.hash.hex()} came for {name.hex()}")
        if not is_sound(block, shape):
            raise CorruptData(f"checksums of {name.hex()}")
        yield block, first.begins.waited


async def _payload(call: Any, first: Chunk, shape: BlockShape) -> bytearray:
    if not first.HasField("begins"):
        raise CorruptData("a payload without a block")
    payload = bytearray(first.payload)
    while len(payload) < shape.payload_bytes:
        chunk = await call.read()
        if chunk is grpc.aio.EOF or chunk.HasField("begins") or not chunk.payload:
            raise CorruptData(f"a block of {len(payload)} bytes, {shape.payload_bytes} expected")
        payload += chunk.payload
    return payload


def _block(begins: Block, payload: bytearray) -> InFlightBlock:
    return InFlightBlock(BlockHash(begins.hash), begins.parent, begins.tokens, begins.checksums, payload)
