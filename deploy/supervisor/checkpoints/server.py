"""Sends a model's files to other hosts: an ASGI application that answers ranges of files named by their identity.

`GET /manifest` is what there is; 503 while that is still being read. `GET /files/IDENTITY` with one `Range` is a piece
of a file; 404 where no file of that identity is here. Who may ask, TLS has decided (see `__main__`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from deploy.supervisor.checkpoints.manifest import CheckpointManifest, manifest_of

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Bytes in memory for each request that is answered."""
SEND_SECONDS = 30.0
"""For one piece; who takes longer to receive it is left."""
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _SentFile(NamedTuple):
    path: Path
    size: int


class CheckpointServer:
    """Owns what is known of the model's files. Reads them for the first who asks what there is, not before."""

    def __init__(self, folder: Path, keep: Path, *, weights: bool) -> None:
        """`keep`: where the manifest is written down; see `manifest_of`."""
        self._folder, self._keep, self._weights = folder, keep, weights
        self._made: asyncio.Task[CheckpointManifest] | None = None
        self._files: dict[str, _SentFile] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it; nothing but HTTP is answered."""
        if scope["type"] != "http":
            return
        path, headers = scope["path"], dict(scope["headers"])
        manifest = await self._manifest()
        if scope["method"] != "GET" or not path.startswith(("/manifest", "/files/")):
            await _answer(send, 404, b"GET /manifest, GET /files/IDENTITY")
        elif isinstance(manifest, str):
            await _answer(send, 500, manifest.encode())
        elif manifest is None:
            await _answer(send, 503, b"the model's files are being read", ((b"retry-after", b"1"),))
        elif path == "/manifest":
            await _answer(send, 200, manifest.encoded(), ((b"etag", f'"{manifest.identity}"'.encode()),))
        else:
            await self._send_range(path.removeprefix("/files/"), headers.get(b"range", b"").decode("latin-1"), send)

    async def _manifest(self) -> CheckpointManifest | str | None:
        """None: not yet. A text: why there is none."""
        if self._made is None:
            self._made = asyncio.create_task(
                asyncio.to_thread(manifest_of, self._folder, self._keep, weights=self._weights)
            )
        await asyncio.wait({self._made}, timeout=0.2)
        if not self._made.done():
            return None
        try:
            manifest = self._made.result()
        except OSError as error:
            self._made = None
            log.warning("model's files cannot be read: %s", error)
            return f"the model's files cannot be read: {error}"
        if not self._files:
            self._files = {
                each.identity: _SentFile(self._folder / each.name, each.size) for each in reversed(manifest.files)
            }
        return manifest

    async def _send_range(self, identity: str, wanted: str, send: Send) -> None:
        file = self._files.get(identity)
        if file is None:
            await _answer(send, 404, b"no file of this identity is here")
            return
        match = _RANGE.fullmatch(wanted)
        first, last = (int(match[1]), int(match[2])) if match is not None else (0, -1)
        if not first <= last < file.size:
            content_range = f"bytes */{file.size}".encode()
            await _answer(send, 416, b"Range: bytes=FIRST-LAST", ((b"content-range", content_range),))
            return
        try:
            opened = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            await _answer(send, 500, str(error).encode())
            return
        try:
            await _send_file(send, opened, first, last, file.size)
        finally:
            os.close(opened)


async def _send_file(send: Send, file: int, first: int, last: int, size: int) -> None:
    headers = _headers(last + 1 - first, ((b"content-range", f"bytes {first}-{last}/{size}".encode()),))
    await send({"type": "http.response.start", "status": 206, "headers": headers})
    at = first
    while at <= last:
        piece = await asyncio.to_thread(os.pread, file, min(PIECE, last + 1 - at), at)
        if not piece:
            raise OSError(f"the file became shorter than {size} bytes")  # ends the connection: the answer is not whole
        at += len(piece)
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": piece, "more_body": at <= last})


async def _answer(send: Send, status: int, body: bytes, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _headers(len(body), more)})
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body})


def _headers(length: int, more: tuple[tuple[bytes, bytes], ...]) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/octet-stream"), (b"content-length", str(length).encode()), *more]
