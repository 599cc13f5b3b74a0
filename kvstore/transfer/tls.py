"""TLS between stores. Both sides show a certificate of one authority: who has none neither sends nor gets blocks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc


class TlsUnusable(Exception):
    """A file that TLS needs and that cannot be read; the text names it."""


class TransferTls(NamedTuple):
    certificate: bytes
    """PEM, with what leads to the authority; names the host that other nodes know this one by."""
    key: bytes
    authority: bytes

    @classmethod
    def read(cls, certificate: str, key: str, authority: str) -> TransferTls:
        """Raises TlsUnusable."""
        return cls(_pem(certificate), _pem(key), _pem(authority))

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def _pem(path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise TlsUnusable(f"{path}: no PEM file")
    return text
