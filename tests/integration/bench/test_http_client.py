"""The load generator's HTTP client, against a socket that says exactly what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from services.bench.client.http_client import HttpClient, HttpClientError, Response

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nWiki\r\n6;x=y\r\npedia \r\nB\r\nin \r\nchunks\r\n0\r\n\r\n"
COUNTED = OK + b"content-length: 5\r\n\r\nhello"
UNTIL_CLOSED = OK + b"\r\nuntil the end"


class Script:
    """A server that answers each request with the next of `answers`, in pieces of `piece` bytes."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.piece = 1 << 20
        self.close_after = False
        self.requests: list[bytes] = []
        self.connections = 0

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                for at in range(0, len(answer), self.piece):
                    writer.write(answer[at : at + self.piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close_after:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def script() -> AsyncIterator[tuple[Script, HttpClient]]:
    script = Script()
    server = await asyncio.start_server(script.client, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/", api_key="secret")
    yield script, client
    client.close()
    server.close()


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
async def test_chunks_are_put_together_wherever_they_are_cut(script: tuple[Script, HttpClient], piece: int) -> None:
    server, client = script
    server.answers, server.piece = [CHUNKED, COUNTED], piece
    parts: list[bytes] = []
    assert await client.post("/v1/x", b"{}", lambda data, now: parts.append(data), 5) == 200
    assert parts == [b"Wiki", b"pedia ", b"in \r\nchunks"]
    assert await client.call("GET", "/v1/y") == Response(200, b"hello")
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /base/v1/x HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in server.requests[0]
    assert server.requests[0].endswith(b"\r\n\r\n{}")


async def test_a_body_may_end_with_the_connection(script: tuple[Script, HttpClient]) -> None:
    server, client = script
    server.answers, server.close_after = [UNTIL_CLOSED, COUNTED], True
    assert await client.call("GET", "/") == Response(200, b"until the end")
    assert await client.call("GET", "/") == Response(200, b"hello")
    assert server.connections == 2


async def test_an_idle_connection_that_the_server_closed_is_replaced(script: tuple[Script, HttpClient]) -> None:
    server, client = script
    server.answers, server.close_after = [COUNTED, COUNTED], True
    for _ in range(2):
        assert await client.call("POST", "/", b"x") == Response(200, b"hello")
    assert server.connections == 2
    assert len(server.requests) == 2


async def test_other_statuses_and_interim_responses_are_read(script: tuple[Script, HttpClient]) -> None:
    server, client = script
    server.answers = [b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"]
    assert await client.call("GET", "/") == Response(503, b"")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CHUNKED[:-9], "closed by the server"),
        (COUNTED[:-2], "closed by the server"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "invalid literal"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP response"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "no end"),
    ],
)
async def test_a_broken_response_is_an_error(script: tuple[Script, HttpClient], answer: bytes, said: str) -> None:
    server, client = script
    server.answers, server.close_after = [answer], True
    with pytest.raises(HttpClientError, match=said):
        await client.call("GET", "/")


async def test_a_server_that_says_nothing_is_given_up(script: tuple[Script, HttpClient]) -> None:
    server, client = script
    server.answers = [OK, COUNTED]
    with pytest.raises(HttpClientError, match=r"within 0\.05 s"):
        await client.call("GET", "/", timeout=0.05)
    assert await client.call("GET", "/") == Response(200, b"hello")


async def test_an_error_of_the_reader_ends_the_request_only(script: tuple[Script, HttpClient]) -> None:
    server, client = script
    server.answers = [COUNTED, COUNTED]

    def refuse(data: bytes, now: float) -> None:
        raise HttpClientError("not this")

    with pytest.raises(HttpClientError, match="not this"):
        await client.post("/", b"", refuse, 5)
    assert await client.call("GET", "/") == Response(200, b"hello")


async def test_nobody_at_the_address_is_said_by_name() -> None:
    with pytest.raises(HttpClientError, match=r"127\.0\.0\.1:1 cannot be reached"):
        await HttpClient("http://127.0.0.1:1").call("GET", "/")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    make: Callable[[str], HttpClient] = HttpClient
    with pytest.raises(ValueError, match="is no http or https URL"):
        make(url)
