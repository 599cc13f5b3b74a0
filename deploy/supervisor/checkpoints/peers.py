"""One connection to a host that sends its model: asks what there is, and for pieces of files."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

from deploy.supervisor.checkpoints.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    BadManifest,
    CheckpointFile,
    CheckpointManifest,
    read_manifest,
)

ANSWER_SECONDS = 10.0
"""Without a byte, after which a host counts as gone."""
CHUNK_SECONDS = 60.0
"""For one chunk, of a host that sends it byte by byte."""
_OK, _PARTIAL, _NOT_FOUND, _BUSY = 200, 206, 404, 503


class PeerAddress(NamedTuple):
    """Where a host sends its model."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def read(cls, text: str) -> PeerAddress:
        """HOST:PORT, IPv6 addresses in brackets. Raises ValueError."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))


class PeerFailed(Exception):
    """The host is not there, or its answer did not come to an end. Another try may go better."""


class PeerBusy(PeerFailed):
    """The host is there and cannot answer yet: it reads its model, or sends to many others."""


class OtherModel(Exception):
    """The host has no file of this identity, so it serves another model. Another try would go no better."""


class Chunk(NamedTuple):
    """A chunk of a file, as a peer sent it."""

    number: int
    data: memoryview
    """Valid until the next one is asked for."""
    is_sound: bool
    """Whether it is what the manifest says."""


class PeerConnection:
    """Owns a connection and the memory for one chunk. Used from one thread. Waits end after ANSWER_SECONDS."""

    def __init__(self, address: PeerAddress, tls: ssl.SSLContext) -> None:
        self.address = address
        self._http = http.client.HTTPSConnection(address.host, address.port, timeout=ANSWER_SECONDS, context=tls)
        self._buffer = bytearray(CHUNK_BYTES)

    def close(self) -> None:
        """Ends what is under way."""
        self._http.close()

    def manifest(self) -> CheckpointManifest:
        """What the host has. Raises PeerFailed, PeerBusy, BadManifest."""
        answer = self._answer("/manifest", {})
        try:
            data = answer.read(MAX_MANIFEST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from None
        self._check(answer, _OK, data)
        if len(data) > MAX_MANIFEST_BYTES:
            raise BadManifest(f"more than {MAX_MANIFEST_BYTES} bytes")
        return read_manifest(data)

    def chunks(self, file: CheckpointFile, first: int, count: int) -> Iterator[Chunk]:
        """Chunks of a file, one after the other. Raises PeerFailed, PeerBusy, OtherModel."""
        begin, end = first * CHUNK_BYTES, min(file.size, (first + count) * CHUNK_BYTES)
        answer = self._answer(f"/files/{file.identity}", {"Range": f"bytes={begin}-{end - 1}"})
        if answer.status != _PARTIAL:
            try:
                self._check(answer, _PARTIAL, answer.read(CHUNK_BYTES))
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error) from None
        for number in range(first, first + count):
            view = memoryview(self._buffer)[: file.chunk_size(number)]
            self._fill(answer, view)
            yield Chunk(number, view, sha256(view).digest() == file.digest(number))
        answer.read()

    def _fill(self, answer: http.client.HTTPResponse, view: memoryview) -> None:
        at, deadline = 0, time.monotonic() + CHUNK_SECONDS
        while at < len(view):
            if time.monotonic() > deadline:
                raise self._failed(f"{len(view)} bytes took more than {CHUNK_SECONDS:g} s")
            try:
                got = answer.readinto(view[at:])
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error) from None
            if not got:
                raise self._failed("it ended the connection")
            at += got

    def _answer(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        try:
            self._http.request("GET", path, headers=headers)
            return self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from None

    def _check(self, answer: http.client.HTTPResponse, expected: int, body: bytes) -> None:
        if answer.status == expected:
            return
        said = f"HTTP {answer.status} {body[:200].decode(errors='replace')}".strip()
        if answer.status == _NOT_FOUND:
            raise OtherModel(said)
        self._http.close()
        raise (PeerBusy if answer.status == _BUSY else PeerFailed)(said)

    def _failed(self, error: object) -> PeerFailed:
        self._http.close()  # the next request opens another one
        return PeerFailed(getattr(error, "strerror", None) or str(error) or type(error).__name__)
