"""What commands of Baton ask a server by HTTPS with: whom they trust, and the certificate that they show."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from shared.config import process_environment

CERTIFICATE, KEY = "BATON_CLIENT_CERT", "BATON_CLIENT_KEY"
"""Variables that name PEM files: of a certificate for servers that want one, and of its key where that is another."""


class ClientCertificateError(Exception):
    """The certificate that is to be shown cannot be used; says which variable, which file, and why."""


def client_context(environment: Mapping[str, str] | None = None) -> ssl.SSLContext:
    """Trusts what OpenSSL trusts, or the authorities in `SSL_CERT_FILE`; shows the certificate that the environment
    names, if any. Raises ClientCertificateError."""
    environment = process_environment() if environment is None else environment
    context = ssl.create_default_context()
    certificate, key = environment.get(CERTIFICATE), environment.get(KEY) or None
    if not certificate:
        if key:
            raise ClientCertificateError(f"{KEY} {key}: {CERTIFICATE} has to name its certificate")
        return context
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        files = f"{CERTIFICATE} {certificate}" + (f", {KEY} {key}" if key else "")
        why = error.reason or "no PEM file of a certificate and its key" if isinstance(error, ssl.SSLError) else error
        raise ClientCertificateError(f"{files}: {getattr(why, 'strerror', None) or why}") from None
    return context


def _no_passphrase() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ValueError("the key has a passphrase; give one without")
