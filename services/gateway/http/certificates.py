"""TLS of the HTTP port: the files of a certificate, which are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple

from services.gateway.key_file import POLL_SECONDS, FileVersion

log = logging.getLogger(__name__)


class CertificateError(Exception):
    """The files cannot be used; says which, and why."""


class CertificateFiles(NamedTuple):
    """The PEM files of a server's certificate and its authorities."""

    certificate: Path
    """With what links it to its authority."""
    key: Path
    """May be the same file."""
    authorities: Path | None
    """Those whose certificates clients must show one of; None: clients show none."""

    def context(self) -> ssl.SSLContext:
        """Returns what connections are accepted with: TLS 1.2 and 1.3, with OpenSSL's choice of ciphers. Raises
        CertificateError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            pair = " and ".join(map(str, dict.fromkeys((self.certificate, self.key))))
            raise CertificateError(f"{pair}: {_reason(error)}") from None
        if self.authorities is not None:
            try:
                context.load_verify_locations(self.authorities)
            except (OSError, ValueError) as error:
                raise CertificateError(f"{self.authorities}: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def versions(self) -> tuple[FileVersion | None, ...]:
        """Returns what shows that one of them has changed; None for one that is not there."""
        return tuple(_version(path) for path in self if path is not None)


class CertificateWatcher:
    """Owns what connections are accepted with; connections that are open keep what they began with."""

    def __init__(self, files: CertificateFiles) -> None:
        """Nothing is read yet."""
        self._files = files
        self._versions = files.versions()
        self.context: ssl.SSLContext

    def load(self) -> None:
        """Reads the files. Raises CertificateError."""
        self._versions = self._files.versions()
        self.context = self._files.context()

    async def watch(self) -> None:
        """Reads the files whenever one has changed, until it is cancelled. What cannot be used is logged once, and what
        there was stays: a certificate and its key are two files, and one is written before the other."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # Beside the event loop, as the files may lie on a disk of the network.
            versions = await asyncio.to_thread(self._files.versions)
            if versions == self._versions:
                continue
            self._versions = versions
            try:
                self.context = await asyncio.to_thread(self._files.context)
            except CertificateError as error:
                log.error("certificate not read; the one before stays", extra={"reason": str(error)})
            else:
                log.info("certificate read", extra={"file": str(self._files.certificate)})


def _version(path: Path) -> FileVersion | None:
    try:
        return FileVersion.of(path.stat())
    except OSError:
        return None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return (
            "no PEM file of a certificate and its key"
            if error.reason is None
            else error.reason.lower().replace("_", " ")
        )
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _no_passphrase() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ValueError("the key has a passphrase; give one without")
