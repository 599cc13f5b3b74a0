"""The one call that stores make to each other: its name, its messages, its limits. See `kvstore/transfer.proto`.

The generated stubs are not used: they have no types, and refuse every grpcio older than the one that made them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

import grpc

from kvstore.transfer_pb2 import Block, Chunk, FetchRequest

SERVICE = "baton.kvstore.KvTransfer"
FETCH = f"/{SERVICE}/Fetch"

CHUNK_BYTES = 2**20
MESSAGE_BYTES = CHUNK_BYTES + 64 * 2**10
"""Of one message: a chunk, and what stands in front of a block of many heads. Larger ones are refused."""
LONGEST_SECONDS = 30.0
"""For one Fetch, however patient who asks: what is being sent is pinned."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A process may hold the two ends of one pair; and what is closed here is not kept open by another channel.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.so_reuseport", 0))


class Sending(Protocol):
    """What a server needs of grpc.aio.ServicerContext."""

    async def write(self, message: Chunk) -> None: ...
    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


def handler(fetch: Callable[[FetchRequest, Sending], Awaitable[None]]) -> Any:
    """What a gRPC server is given to serve `fetch`."""
    method = grpc.unary_stream_rpc_method_handler(
        fetch, request_deserializer=FetchRequest.FromString, response_serializer=Chunk.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Fetch": method})


def fetch_call(channel: grpc.aio.Channel, request: FetchRequest) -> Any:
    """Begins a Fetch: a grpc.aio.UnaryStreamCall of Chunks. Fails at once where the other store is not there."""
    fetch = channel.unary_stream(
        FETCH, request_serializer=FetchRequest.SerializeToString, response_deserializer=Chunk.FromString
    )
    return fetch(request, timeout=LONGEST_SECONDS, wait_for_ready=False)


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


__all__ = [
    "CHANNEL_OPTIONS",
    "CHUNK_BYTES",
    "LONGEST_SECONDS",
    "SERVER_OPTIONS",
    "Block",
    "Chunk",
    "FetchRequest",
    "Sending",
    "fetch_call",
    "handler",
    "host_and_port",
]
