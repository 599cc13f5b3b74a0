"""The one call that stores make to each other: its name, its messages, its limits. See
`kvstore/transfer/transfer.proto`.

The generated stubs are not used: they have no types, and refuse every grpcio older than the one that made them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc

from kvstore.transfer.transfer_pb2 import Chunk, FetchRequest

SERVICE = "baton.kvstore.KvTransfer"
FETCH = f"/{SERVICE}/Fetch"

CHUNK_BYTES = 2**20
MESSAGE_BYTES = CHUNK_BYTES + 64 * 2**10
"""The most bytes of one message: a chunk, and the header of a block of many heads. Larger ones are refused."""
MAX_FETCH_SECONDS = 30.0
"""Limits one Fetch, whatever the caller's deadline, because the blocks being sent are pinned."""

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


def host_and_port(host: str, port: int) -> str:
    """An address in gRPC's notation, with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# TLS between stores. Both sides show a certificate of one authority; a node without one gets no blocks.


class TlsUnusable(Exception):
    """A file that TLS needs and that cannot be read; the text names it."""


class TransferTls(NamedTuple):
    """Certificate, key and authority of one node, as PEM."""

    certificate: bytes
    """PEM, with what leads to the authority; names the host that other nodes know this one by."""
    key: bytes
    authority: bytes

    @classmethod
    def read(cls, certificate: str, key: str, authority: str) -> TransferTls:
        """Reads the three files. Raises TlsUnusable."""
        return cls(_pem(certificate), _pem(key), _pem(authority))

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that requires a certificate of the same authority from its clients."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client that shows its certificate and checks the server's."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def _pem(path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise TlsUnusable(f"{path}: no PEM file")
    return text
