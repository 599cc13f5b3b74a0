"""Files of the package as HTTP responses: read once, packed where the client takes that."""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import NamedTuple

from services.gateway.http.call import Call

HTML = b"text/html; charset=utf-8"
CACHED = b"max-age=3600"


class StaticFile(NamedTuple):
    """A file's bytes as they are sent to clients that take gzip, and to others."""

    content: bytes
    packed: bytes | None
    """None: it is not packed."""


class StaticFiles:
    """Owns the files of one folder that were asked for; there are few of them."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._files: dict[str, StaticFile] = {}

    def file(self, name: str) -> StaticFile:
        """Returns a file, packed where a packed one lies there. Raises FileNotFoundError."""
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    async def respond(self, call: Call, name: str, content_type: bytes, cached: bytes = CACHED) -> None:
        """Sends a file. `cached`: for how long browsers keep it."""
        file = self.file(name)
        headers = [(b"cache-control", cached), (b"vary", b"accept-encoding")]
        body = file.content
        if file.packed is not None and b"gzip" in call.headers.get(b"accept-encoding", b""):
            headers.append((b"content-encoding", b"gzip"))
            body = file.packed
        await call.respond(body, content_type=content_type, headers=headers)

    def _read(self, name: str) -> StaticFile:
        folder = files(self._package)
        if (packed := folder / f"{name}.gz").is_file():
            content = packed.read_bytes()
            return StaticFile(gzip.decompress(content), content)
        return StaticFile((folder / name).read_bytes(), None)
