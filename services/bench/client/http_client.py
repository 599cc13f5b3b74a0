"""A small HTTP/1.1 client that hands over a response's body as it arrives: what a load generator needs, and no more.

A general client (aiohttp) costs several times as much processor time per streamed token, which the server under
test then lacks. Redirects, proxies, cookies and compression are left out on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from services.bench.errors import BenchError
from shared.tls.client_context import ClientCertificateError, client_context

MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 2**20
"""Largest response that is read as a whole, in bytes."""

OnData = Callable[[bytes, float], None]
"""Gets body bytes and the time (perf_counter) of their arrival."""


class HttpClientError(BenchError):
    """The request could not be made, or the response not be read."""


class Response(NamedTuple):
    """A whole response: its status code and body."""

    status: int
    body: bytes
    """Whole, unless it was handed over piece by piece."""


class _Connection(asyncio.Protocol):
    """Owns one connection and the response that is being read from it."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._consume: Callable[[float], bool] = self._read_head
        self.alive = False
        self.reused = False
        self.any_byte = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = cast(asyncio.Transport, transport), True  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._done is not None and not self._done.done():
            if self._consume == self._read_until_closed and exc is None:
                self._done.set_result(self._status)
            else:
                self._done.set_exception(HttpClientError(f"the connection broke: {exc or 'closed by the server'}"))

    async def exchange(self, request: bytes, on_data: OnData) -> int:
        """Sends `request`, gives the body of a 200 (or any other) to `on_data`, answers with the status."""
        assert self._transport is not None
        self._buffer, self._consume, self.any_byte = b"", self._read_head, False
        self._on_data = on_data
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()
            return
        now = time.perf_counter()
        self.any_byte = True
        self._buffer = self._buffer + data if self._buffer else data
        try:
            if self._consume(now):
                self._done.set_result(self._status)
        except Exception as error:
            self.close()
            self._done.set_exception(error if isinstance(error, HttpClientError) else HttpClientError(str(error)))

    def _read_head(self, now: float) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEADER_BYTES:
                raise HttpClientError("the response's header has no end")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = [*first.split(" ", 2), ""]
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise HttpClientError(f"no HTTP response: {first[:80]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._status, self._buffer = int(status), rest
        self._keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        if 100 <= self._status < 200:
            return bool(rest) and self._read_head(now)
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._consume = self._read_chunks
        elif "content-length" in headers:
            self._left = int(headers["content-length"])
            self._consume = self._read_counted
        else:
            self._keep = False
            self._consume = self._read_until_closed
        return self._consume(now)

    def _read_chunks(self, now: float) -> bool:
        buffer, at = self._buffer, 0
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line_end].partition(b";")[0], 16)
            start, end = line_end + 2, line_end + 2 + size
            if len(buffer) < end + 2:
                break
            if size == 0:
                return True
            self._on_data(buffer[start:end], now)
            at = end + 2
        self._buffer = buffer[at:]
        return False

    def _read_counted(self, now: float) -> bool:
        data, self._buffer = self._buffer[: self._left], b""
        self._left -= len(data)
        if data:
            self._on_data(data, now)
        return self._left == 0

    def _read_until_closed(self, now: float) -> bool:
        if self._buffer:
            self._on_data(self._buffer, now)
        self._buffer = b""
        return False

    @property
    def reusable(self) -> bool:
        return self.alive and self._keep

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Owns the idle connections to one server."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """Raises ValueError where `base_url` is no http or https URL, or no certificate that could be shown there."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is no http or https URL")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        try:
            self._tls = client_context() if url.scheme == "https" else None
        except ClientCertificateError as error:
            raise ValueError(str(error)) from None
        self._prefix = url.path.rstrip("/")
        authority = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._common = f"Host: {authority}:{self._port}\r\n{authorization}Accept: */*\r\n"
        self._idle: deque[_Connection] = deque()

    async def post(self, path: str, body: bytes, on_data: OnData, timeout: float) -> int:
        """Posts JSON and hands the response's body to `on_data`. Raises HttpClientError."""
        header = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._request(self._head("POST", path, header) + body, on_data, timeout)

    async def call(self, method: str, path: str, body: bytes | None = None, timeout: float = 30.0) -> Response:
        """A request whose response is read whole. Raises HttpClientError."""
        parts: list[bytes] = []
        held = 0

        def keep(data: bytes, now: float) -> None:
            nonlocal held
            held += len(data)
            if held > MAX_BODY_BYTES:
                raise HttpClientError(f"{path}: a response of more than {MAX_BODY_BYTES} bytes")
            parts.append(data)

        if body is None:
            status = await self._request(self._head(method, path, ""), keep, timeout)
        else:
            status = await self.post(path, body, keep, timeout)
        return Response(status, b"".join(parts))

    def close(self) -> None:
        """Closes the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    def _head(self, method: str, path: str, header: str) -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{header}\r\n".encode()

    async def _request(self, request: bytes, on_data: OnData, timeout: float) -> int:
        try:
            async with asyncio.timeout(timeout):
                return await self._exchange(request, on_data)
        except TimeoutError:
            raise HttpClientError(f"no complete response within {timeout:g} s") from None

    async def _exchange(self, request: bytes, on_data: OnData) -> int:
        while True:
            connection = await self._connection()
            try:
                status = await connection.exchange(request, on_data)
            except BaseException as error:
                connection.close()
                if isinstance(error, HttpClientError) and connection.reused and not connection.any_byte:
                    continue  # the server had closed the idle connection: no request was made
                raise
            self._give_back(connection)
            return status

    def _give_back(self, connection: _Connection) -> None:
        if connection.reusable:
            connection.reused = True
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return await self._open()

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise HttpClientError(f"{self._host}:{self._port} cannot be reached: {error}") from None
        return connection
