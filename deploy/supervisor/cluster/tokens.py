"""Join tokens: what a new host needs to find a stack, to know that it is the right one, and to be let in."""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED
from shared.private_files import private_opener

PREFIX = "baton1."
CHECK_BYTES = 4
DEFAULT_LIFETIME = 24 * 3600.0
MAX_TOKENS = 1_000
"""Of those that have not expired."""


class BadToken(Exception):
    """A text that is no join token, or not all of one."""


class JoinToken(Struct, frozen=True, array_like=True):
    """The contents of a token."""

    address: str
    """Of the first host."""
    port: int
    """Where it lets hosts in."""
    authority: bytes
    """SHA-256 of the certificate of the stack's authority."""
    id: str
    """Names the token in lists; no secret."""
    secret: str

    def text(self) -> str:
        """As it is printed: one word."""
        packed = msgspec.msgpack.encode(self)
        return PREFIX + urlsafe_b64encode(_check(packed) + packed).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> JoinToken:
        """The token that was printed so. Raises BadToken."""
        body = text.strip().removeprefix(PREFIX)
        try:
            raw = urlsafe_b64decode(body + "=" * (-len(body) % 4))
            check, packed = raw[:CHECK_BYTES], raw[CHECK_BYTES:]
            if not text.strip().startswith(PREFIX) or check != _check(packed):
                raise BadToken("it is none that `baton token` printed, or a part is missing")
            return msgspec.msgpack.decode(packed, type=cls)
        except (*NOT_DECODED, ValueError):
            raise BadToken("it is none that `baton token` printed, or a part is missing") from None


def _check(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=CHECK_BYTES).digest()


class IssuedToken(Struct, frozen=True):
    """What is kept of a token: not its secret."""

    hash: str
    expires: float
    """Unix seconds."""


TokenState = Literal["valid", "expired", "unknown"]


class TokenFile:
    """Owns the file of issued tokens, which `baton token` writes and the first host's supervisor reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def issue(self, now: float, lifetime: float) -> tuple[str, str]:
        """Id and secret of a new token. Raises OSError, and ValueError where there are too many."""
        identity, secret = secrets.token_hex(4), secrets.token_urlsafe(24)
        with self._changed() as tokens:
            for expired in [name for name, each in tokens.items() if each.expires <= now]:
                del tokens[expired]
            if len(tokens) >= MAX_TOKENS:
                raise ValueError(f"{len(tokens)} tokens are valid; revoke some")
            tokens[identity] = IssuedToken(_hashed(secret), now + lifetime)
        return identity, secret

    def revoke(self, identity: str) -> bool:
        """Whether there was such a token. Hosts that have joined by it stay. Raises OSError."""
        with self._changed() as tokens:
            return tokens.pop(identity, None) is not None

    def tokens(self) -> Mapping[str, IssuedToken]:
        """All that were issued and not removed since, by id. Raises OSError."""
        try:
            return _decoded(self._path.read_bytes())
        except FileNotFoundError:
            return {}

    def state_of(self, identity: str, secret: str, now: float) -> TokenState:
        """Whether whoever has this lets a host in. Raises OSError."""
        token = self.tokens().get(identity)
        if token is None or not hmac.compare_digest(token.hash, _hashed(secret)):
            return "unknown"
        return "valid" if now < token.expires else "expired"

    @contextmanager
    def _changed(self) -> Iterator[dict[str, IssuedToken]]:
        with open(self._path, "a+b", opener=private_opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            tokens = _decoded(file.read())
            yield tokens
            file.seek(0)
            file.truncate()
            file.write(msgspec.json.encode(tokens))
            file.flush()
            os.fsync(file.fileno())


def _decoded(content: bytes) -> dict[str, IssuedToken]:
    try:
        return msgspec.json.decode(content or b"{}", type=dict[str, IssuedToken])
    except NOT_DECODED:  # being written just now, or spoilt: nobody is let in by what cannot be read
        return {}


def _hashed(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
