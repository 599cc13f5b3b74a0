"""TLS between stores. Both sides show a certificate of one authority; a node without one gets no blocks."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple


class TlsUnusable(Exception):
    """A file that TLS needs and that cannot be used; the text names it."""


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

    def server_context(self) -> ssl.SSLContext:
        """For a listener that requires a certificate of the same authority from whoever connects. Raises
        TlsUnusable."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # A ticket would come with nobody reading, and look like a frame. Connections are kept instead.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a connection that shows its certificate and checks the server's, with its host. Raises TlsUnusable."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # The ssl module reads keys from files only; this one is in memory.
        file = os.memfd_create("transfer-tls", os.MFD_CLOEXEC)
        try:
            os.write(file, self.certificate + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=self.authority.decode())
        except (ssl.SSLError, ValueError) as error:
            raise TlsUnusable(f"certificate, key or authority: {error}") from None
        finally:
            os.close(file)
        return context


def _pem(path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise TlsUnusable(f"{path}: no PEM file")
    return text
