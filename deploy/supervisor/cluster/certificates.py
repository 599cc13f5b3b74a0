"""The authority of a stack of several hosts, and the certificates that it signs, one for each host; likewise of a
federation and its clusters."""

from __future__ import annotations

import hmac
import ipaddress
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=3650)
"""Nothing renews certificates: a stack that shall have new ones gets a new authority (docs/hosts.md)."""
BACKDATED = timedelta(days=3650)
"""So that no certificate is of the future to a host whose clock is behind: it is told so in clearer words."""


class BadSigningRequest(Exception):
    """What was to be signed is no signing request, or not signed with its own key."""


def new_key() -> bytes:
    """A private key on the curve P-256, as PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def derived_key(secret: bytes, purpose: bytes) -> bytes:
    """The private key that a secret stands for, the same wherever that is known, as PEM. Twice as many bits as it
    needs make it as good as drawn (FIPS 186-5, A.2.1)."""
    number = int.from_bytes(hmac.digest(secret, purpose, "sha512"))
    return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def new_authority(key: bytes, subject: str = "baton hosts") -> bytes:
    """A certificate that signs itself and others' certificates, as PEM."""
    own = _private(key)
    name = _named(subject)
    return _pem(
        _builder(name, name, own.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(own, hashes.SHA256())
    )


def signing_request(key: bytes, node: str) -> bytes:
    """What a host sends to have its key certified, as PEM."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_named(node))
        .sign(_private(key), hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def signed(request: bytes, node: str, address: str, authority: bytes, authority_key: bytes) -> bytes:
    """The certificate of the host `node`, reached at `address`, for the key of a signing request; as PEM. Of the
    request only the key counts. Raises BadSigningRequest."""
    try:
        asked = x509.load_pem_x509_csr(request)
    except ValueError:
        raise BadSigningRequest("no signing request in PEM") from None
    if not asked.is_signature_valid:
        raise BadSigningRequest("not signed with its own key")
    issuer = x509.load_pem_x509_certificate(authority).subject
    return _pem(
        _builder(_named(node), issuer, asked.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(address)]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(_private(authority_key), hashes.SHA256())
    )


def is_for(certificate: bytes, address: str) -> bool:
    """Whether a certificate names this address."""
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return _alternative(address) in names.value


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a PEM certificate's DER, 32 bytes. Raises ValueError where it is no certificate."""
    return sha256(x509.load_pem_x509_certificate(certificate).public_bytes(serialization.Encoding.DER)).digest()


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    loaded = serialization.load_pem_private_key(key, password=None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey), "made by `new_key`"
    return loaded


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: object) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    assert isinstance(key, ec.EllipticCurvePublicKey), "hosts' keys are made by `new_key`"
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
