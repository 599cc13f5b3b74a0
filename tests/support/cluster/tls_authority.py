"""A certificate authority of a test's own, made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvstore.transfer.tls import TransferTls

HERE = "127.0.0.1"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Authority:
    """Owns the authority's key; signs for one host at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._openssl("req", "-x509", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=stores", *NEW_KEY)

    def signed(self, name: str, host: str = HERE) -> TransferTls:
        return TransferTls.read(*self.files(name, host))

    def flags(self, name: str, host: str = HERE) -> tuple[str, ...]:
        """For `python -m kvstore`."""
        certificate, key, authority = self.files(name, host)
        return ("--transfer-tls-cert", certificate, "--transfer-tls-key", key, "--transfer-tls-ca", authority)

    def files(self, name: str, host: str = HERE) -> tuple[str, str, str]:
        self._openssl(
            "req", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", *NEW_KEY
        )
        (self._folder / f"{name}.ext").write_text(f"subjectAltName=IP:{host}\n")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
        certificate, key, authority = (str(self._folder / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem"))
        return certificate, key, authority

    def _openssl(self, *argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=self._folder, check=True, capture_output=True)
