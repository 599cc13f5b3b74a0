"""One hostile client: whom it attacks, how it speaks HTTP, and what it was answered.

It speaks HTTP by hand, as it means to do it wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

ANSWER_TIMEOUT = 30.0
"""Seconds after which a hostile client leaves without the answer, as other clients would."""
MAX_ANSWER_BYTES = 16 * 2**20
AT_ONCE = 32
"""Requests, or sockets, of one attack that are open at a time."""
EXCERPT = 200


class Answer(NamedTuple):
    """What a server has said by the time it closed the connection."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_documented(self) -> bool:
        """Whether a server may say so: anything but a 5xx, and a 503 that says when to come again (docs/api.md)."""
        return self.status < 500 or (self.status == 503 and "retry-after" in self.headers)


class AttackReport(NamedTuple):
    """What an attack was answered, for whoever has started it."""

    answers: str
    """How many of which status."""
    complaints: tuple[str, ...]
    """What no client may be answered, however hostile it is."""


class AttackCounts:
    """Owns what one attack was answered."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.unanswered = 0
        """Requests whose connection broke, or that the client left."""
        self.complaints: list[str] = []
        """What no client may be answered, however hostile it is."""

    def record(self, what: str, answer: Answer | None) -> None:
        """Counts an answer; None: there was none."""
        if answer is None:
            self.unanswered += 1
            return
        self.statuses[answer.status] += 1
        if not answer.is_documented:
            said = answer.body[:EXCERPT].decode(errors="replace")
            self.complaints.append(f"{what}: HTTP {answer.status}: {said}")

    def report(self) -> AttackReport:
        """All of it."""
        counts = [f"{count} x {status}" for status, count in sorted(self.statuses.items())]
        return AttackReport(", ".join([*counts, f"{self.unanswered} unanswered"]), tuple(self.complaints))


class HostileConnection(NamedTuple):
    """A hostile client's end of a TCP connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Raises OSError where the server has closed it."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, timeout: float = ANSWER_TIMEOUT) -> Answer | None:
        """All that comes until the server closes, as a response; None where that is none, or does not end in time."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(timeout):
                parts, size = list[bytes](), 0
                while size < MAX_ANSWER_BYTES and (part := await self.reader.read(65536)):
                    parts.append(part)
                    size += len(part)
            return parsed(b"".join(parts))
        return None


class Victim(NamedTuple):
    """The server that is attacked."""

    host: str
    port: int
    authorization: str
    """A header's line, empty without a key."""
    model: str

    @classmethod
    def at(cls, url: str, api_key: str | None, model: str) -> Victim:
        """`url`: plain HTTP."""
        parts = urlsplit(url)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        return cls(parts.hostname or "127.0.0.1", parts.port or 80, key, model)

    def head(self, path: str, length: int | None, more: str = "") -> bytes:
        """Of a POST of JSON, after whose answer the server is to close; `length`: None: the body has no end."""
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        fixed = f"Host: {self.host}\r\n{self.authorization}Connection: close\r\n{size}\r\n"
        kind = "" if "content-type" in more.lower() else "Content-Type: application/json\r\n"
        return f"POST {path} HTTP/1.1\r\n{fixed}{kind}{more}\r\n".encode()

    def completion(self, **fields: Any) -> bytes:
        """A body of /v1/completions."""
        return msgspec.json.encode({"model": self.model, "prompt": "Once upon a time", "max_tokens": 4} | fields)

    def chat(self, content: Any = "Hello", **fields: Any) -> bytes:
        """A body of /v1/chat/completions."""
        messages = [{"role": "user", "content": content}]
        return msgspec.json.encode({"model": self.model, "messages": messages, "max_tokens": 4} | fields)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[HostileConnection]:
        """A connection that is reset at the end. Raises OSError."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield HostileConnection(reader, writer)
        finally:
            writer.transport.abort()

    async def post(self, path: str, body: bytes, more: str = "", timeout: float = ANSWER_TIMEOUT) -> Answer | None:
        """The answer to a whole request; None where there is none. A server may answer, and close, before all was
        sent."""
        with contextlib.suppress(OSError):
            async with self.connected() as connection:
                connection.writer.write(self.head(path, len(body), more) + body)
                return await connection.answer(timeout)
        return None

    async def get(self, path: str) -> Answer | None:
        """The answer to a GET; None where there is none."""
        head = f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n{self.authorization}Connection: close\r\n\r\n"
        with contextlib.suppress(OSError):
            async with self.connected() as connection:
                await connection.send(head.encode())
                return await connection.answer()
        return None


Attack = Callable[[Victim, AttackCounts], Awaitable[None]]


async def all_of(jobs: Iterable[Callable[[], Awaitable[None]]], at_once: int = AT_ONCE) -> None:
    """Does them in their order, some at a time. A connection that the server refuses or breaks ends that job alone."""
    waiting = iter(jobs)

    async def client() -> None:
        for job in waiting:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await job()

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client())


def parsed(data: bytes) -> Answer | None:
    """A response as it came over the wire, its body as it was framed; None where it is none."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not end or not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        return None
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(rest[:3]), headers, body)
