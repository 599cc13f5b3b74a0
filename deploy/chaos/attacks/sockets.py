"""Attacks on connections: clients that come in thousands and leave, read nothing, send half of it, or no HTTP."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from deploy.chaos.attacks.attack import ANSWER_TIMEOUT, AttackCounts, Victim, all_of, parsed

COMPLETIONS = "/v1/completions"
CANCELLED = 1000
"""Streams that are left after their first token."""
HALF_CLOSED = 100
SLOW = 48
SILENT = 400
CUT = 100
UPGRADES = 300
LASTS = 5.0
"""Seconds that clients who only hold something hold it."""
PAUSE = 0.05
LONG_ANSWER = 400
"""Tokens of a stream that is not meant to be read to its end."""
SMALL_BUFFER = 2048


async def cancelled_streams(victim: Victim, counts: AttackCounts) -> None:
    """Streams that are left after their first token, every second one by a reset."""
    body = victim.completion(stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)

    async def stream(resets: bool) -> None:
        async with victim.connected() as connection:
            await connection.send(victim.head(COMPLETIONS, len(body)) + body)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                counts.record("a stream", parsed(await connection.reader.readuntil(b"\r\n\r\n")))
                await connection.reader.readuntil(b"data:")
            if not resets:
                connection.writer.close()

    await all_of(partial(_patient, partial(stream, number % 2 == 0)) for number in range(CANCELLED))


async def half_closed(victim: Victim, counts: AttackCounts) -> None:
    """Clients that end their sending direction: after a whole request, within its body, within its head."""
    body = victim.completion(stream=True, max_tokens=64, ignore_eos=True)
    whole = victim.head(COMPLETIONS, len(body)) + body

    async def client(sent: bytes) -> None:
        async with victim.connected() as connection:
            await connection.send(sent)
            connection.writer.write_eof()
            counts.record("half-closed", await connection.answer())

    ways = (whole, whole[:-10], whole[:40])
    await all_of(partial(client, ways[number % len(ways)]) for number in range(HALF_CLOSED))


async def slow_readers(victim: Victim, counts: AttackCounts) -> None:
    """Streams of every API, and whole answers, that are read a byte at a time, by sockets with hardly any room."""
    said = [{"role": "user", "content": "Hello"}]
    chat: dict[str, Any] = {"max_tokens": LONG_ANSWER, "stream": True, "ignore_eos": True}
    asked = [
        (COMPLETIONS, victim.completion(stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)),
        (COMPLETIONS, victim.completion(prompt="fox " * 400, echo=True, logprobs=5, max_tokens=64, ignore_eos=True)),
        ("/v1/chat/completions", victim.chat(logprobs=True, top_logprobs=20, n=4, **chat)),
        ("/v1/responses", msgspec.json.encode({"model": victim.model, "input": "Hello", "stream": True})),
        ("/v1/messages", victim.chat(max_tokens=LONG_ANSWER, stream=True)),
        ("/api/chat", msgspec.json.encode({"model": victim.model, "messages": said})),
    ]

    async def client(path: str, body: bytes) -> None:
        loop, plain = asyncio.get_running_loop(), socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        plain.setblocking(False)
        try:
            await loop.sock_connect(plain, (victim.host, victim.port))
            await loop.sock_sendall(plain, victim.head(path, len(body)) + body)
            end = loop.time() + LASTS
            while loop.time() < end:
                async with asyncio.timeout(LASTS):
                    if not await loop.sock_recv(plain, 1):
                        break
                await asyncio.sleep(PAUSE)
        finally:
            plain.close()
            counts.unanswered += 1

    await all_of((partial(_patient, partial(client, *asked[number % len(asked)])) for number in range(SLOW)), SLOW)


async def silent_clients(victim: Victim, counts: AttackCounts) -> None:
    """Many connections that send nothing, half a head, or a head that promises a body."""
    starts = (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", victim.head(COMPLETIONS, 2**20) + b"{")

    async def client(start: bytes) -> None:
        async with victim.connected() as connection:
            await connection.send(start)
            await asyncio.sleep(LASTS)
            counts.unanswered += 1

    await all_of((partial(client, starts[number % len(starts)]) for number in range(SILENT)), SILENT)


async def cut_uploads(victim: Victim, counts: AttackCounts) -> None:
    """Files, sounds and bodies, with a length and in chunks, whose clients are gone after half of it, or trickle."""
    form = "Content-Type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    half = b'{"model":"' + b"x" * 2**19

    async def client(head: bytes, pieces: tuple[bytes, ...]) -> None:
        async with victim.connected() as connection:
            await connection.send(head)
            for piece in pieces:
                await connection.send(piece)
                await asyncio.sleep(PAUSE)
            counts.unanswered += 1

    ways: list[tuple[bytes, tuple[bytes, ...]]] = [
        (victim.head(COMPLETIONS, 2**20), (half,)),
        (victim.head("/v1/chat/completions", None), (chunk,) * 8),
        (victim.head("/v1/files", 2**20, form), (part, b"x" * 2**19)),
        (victim.head("/v1/audio/transcriptions", None, form), (b"%x\r\n%b\r\n" % (len(part), part), chunk)),
        (victim.head(COMPLETIONS, 100), tuple(bytes([each]) for each in half[:40])),
    ]
    await all_of(partial(client, *ways[number % len(ways)]) for number in range(CUT))


async def upgrades(victim: Victim, counts: AttackCounts) -> None:
    """Web sockets where there are none, at addresses of other servers' and at our own, and frames behind them."""
    paths = ("/v1/realtime?model=x", COMPLETIONS, "/v1/audio/transcriptions", "/")
    frame = b"\x81\xfe\x10\x00\x00\x00\x00\x00" + b"x" * 4096

    async def client(path: str) -> None:
        async with victim.connected() as connection:
            fixed = "Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Version: 13\r\n"
            key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            head = f"GET {path} HTTP/1.1\r\nHost: {victim.host}\r\n{victim.authorization}{fixed}{key}\r\n"
            await connection.send(head.encode() + frame * 4)
            counts.record(f"an upgrade at {path}", await connection.answer(LASTS))

    await all_of(partial(client, paths[number % len(paths)]) for number in range(UPGRADES))


async def no_http(victim: Victim, counts: AttackCounts) -> None:
    """What is no HTTP, or bends its rules: noise, TLS, two lengths, endless heads and chunks, pipelined requests."""
    noise, body = random.Random(0), victim.completion(max_tokens=1)
    whole = victim.head(COMPLETIONS, len(body)).replace(b"Connection: close\r\n", b"") + body
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{victim.authorization}".encode()
    sent = {
        "noise": noise.randbytes(4096),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(500),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "two lengths": start + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n" + body,
        "a length and chunks": start + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + body,
        "a length below zero": start + b"Content-Length: -1\r\n\r\n" + body,
        "a length that is none": start + b"Content-Length: 1e9\r\n\r\n" + body,
        "a chunk of any size": start + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body,
        "a long head": start + b"X-Long: " + b"x" * 2**20 + b"\r\n\r\n",
        "many headers": start + b"".join(b"X-%d: 1\r\n" % at for at in range(20_000)) + b"\r\n",
        "a long path": b"GET /" + b"a/" * 2**15 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "a pipeline": whole * 64,
        "a pipeline of refusals": b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n" * 500,
    }

    async def client(what: str, data: bytes) -> None:
        async with victim.connected() as connection:
            connection.writer.write(data)
            counts.record(what, await connection.answer(LASTS))

    await all_of(partial(client, what, data) for what, data in sent.items() for _ in range(3))


async def _patient(job: Callable[[], Awaitable[None]]) -> None:
    """Waits no longer than clients do: one whose server takes longer leaves."""
    try:
        await job()
    except TimeoutError:
        return


SOCKET_ATTACKS = {
    "cancelled-streams": cancelled_streams,
    "half-closed": half_closed,
    "slow-readers": slow_readers,
    "silent-clients": silent_clients,
    "cut-uploads": cut_uploads,
    "upgrades": upgrades,
    "no-http": no_http,
}
