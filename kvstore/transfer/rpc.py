"""The one call that stores make to each other: its name, its messages, its limits. See
`kvstore/transfer/transfer.proto`.

The generated stubs are not used: they have no types, and refuse every grpcio older than the one that made them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

import grpc

from kvstore.transfer.lending import MAX_FETCH_SECONDS
from kvstore.transfer.tls import TransferTls
from kvstore.transfer.transfer_pb2 import Chunk, FetchRequest

TRANSPORT = "grpc"

SERVICE = "baton.kvstore.KvTransfer"
FETCH = f"/{SERVICE}/Fetch"

CHUNK_BYTES = 2**20
MESSAGE_BYTES = CHUNK_BYTES + 64 * 2**10
"""The most bytes of one message: a chunk, and the header of a block of many heads. Larger ones are refused."""

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

    async def write(self, message: Chunk) -> None:
        """Sends one chunk; waits while the receiver's window is full."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the call with this status; raises."""


def handler(fetch: Callable[[FetchRequest, Sending], Awaitable[None]]) -> Any:
    """The handler that makes a gRPC server call `fetch`."""
    method = grpc.unary_stream_rpc_method_handler(
        fetch, request_deserializer=FetchRequest.FromString, response_serializer=Chunk.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Fetch": method})


def fetch_call(channel: grpc.aio.Channel, request: FetchRequest) -> Any:
    """Begins a Fetch: a grpc.aio.UnaryStreamCall of Chunks. Fails at once where the other store is not there."""
    fetch = channel.unary_stream(
        FETCH, request_serializer=FetchRequest.SerializeToString, response_deserializer=Chunk.FromString
    )
    return fetch(request, timeout=MAX_FETCH_SECONDS, wait_for_ready=False)


def server_credentials(tls: TransferTls) -> grpc.ServerCredentials:
    """For a server that requires a certificate of the same authority from its clients."""
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], root_certificates=tls.authority, require_client_auth=True
    )


def channel_credentials(tls: TransferTls) -> grpc.ChannelCredentials:
    """For a client that shows its certificate and checks the server's."""
    return grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
