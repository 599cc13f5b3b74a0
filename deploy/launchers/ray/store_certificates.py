"""Certificates by which the KV stores of a stack's engines know each other on the nodes of a Ray cluster."""

from __future__ import annotations

import threading
from pathlib import Path

from deploy.supervisor.cluster import certificates
from shared.private_files import PRIVATE_FOLDER, write_private

CERTIFICATE, KEY, AUTHORITY = "store.pem", "store.key", "ca.pem"
FOLDER = "ray"


class StoreAuthority:
    """Owns the folder `ray` of a run directory: an authority's key and certificate, which the next supervisor goes on
    with, as the stores do that it signed for."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir.absolute() / FOLDER
        self._lock = threading.Lock()

    def files_for(self, node: str, address: str) -> dict[str, bytes]:
        """The files of a store on a node that others reach at `address`, by name: its certificate and key, and what it
        checks others' with. Raises OSError."""
        certificate, authority_key = self._authority()
        key = certificates.new_key()
        request = certificates.signing_request(key, node)
        signed = certificates.signed(request, node, address, certificate, authority_key)
        return {CERTIFICATE: signed, KEY: key, AUTHORITY: certificate}

    def _authority(self) -> tuple[bytes, bytes]:
        certificate, key = self._folder / AUTHORITY, self._folder / "ca.key"
        with self._lock:
            if not certificate.exists():
                self._folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
                write_private(key, certificates.new_key())
                write_private(certificate, certificates.new_authority(key.read_bytes(), "baton stores"))
            return certificate.read_bytes(), key.read_bytes()
