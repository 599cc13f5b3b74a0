"""Bodies that are large, slow or many: the gateway goes on for everybody else, and its memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from tests.support.cluster.nats_server import NatsServer
from tests.support.gateway.fake_services import MODEL, said
from tests.support.gateway.gateway_process import gateway_process

MIB = 2**20


class Sender:
    """A client that sends a request piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(status.split()[1]), headers, body


@asynccontextmanager
async def sender(http: httpx2.AsyncClient, headers: str, path: str = "/v1/completions") -> AsyncIterator[Sender]:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    try:
        client = Sender(reader, writer)
        await client.send(f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode())
        yield client
    finally:
        writer.close()


def small(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "x", "max_tokens": 2} | fields


def many_values(size: int) -> bytes:
    """A chat whose one message has a text part in every four bytes, and then a mistake."""
    return b'{"messages":[{"role":"user","content":[%b7]}]}' % (b'"a",' * (size // 4))


async def metric(http: httpx2.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}{{"))


async def until_held(http: httpx2.AsyncClient, least: float, most: float | None = None) -> None:
    """`most`: None: `least`, and no more."""
    async with asyncio.timeout(60):
        while not least <= await metric(http, "baton_gateway_body_bytes") <= (least if most is None else most):
            await asyncio.sleep(0.01)


async def test_small_requests_are_served_while_a_large_body_is_read(shared_nats: NatsServer) -> None:
    async with gateway_process(shared_nats) as (http, _, _ring):
        body = many_values(8 * MIB)
        ended: list[str] = []

        async def post_large() -> None:
            answer = await http.post("/v1/chat/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert answer.json()["error"]["param"] == "messages[0].content[2097152]"
            ended.append("large")

        async def post_small() -> None:
            # Held: the large body has arrived, or most of it has.
            async with asyncio.timeout(60):
                while await metric(http, "baton_gateway_body_bytes") < 7 * MIB:
                    await asyncio.sleep(0.01)
            for _ in range(20):
                answer = await http.post("/v1/completions", json=small())
                assert answer.json()["choices"][0]["text"] == said(2)
                ended.append("small")

        await asyncio.gather(post_large(), post_small())
        assert ended == ["small"] * 20 + ["large"]


async def test_bodies_in_flight_are_bounded_and_small_ones_still_pass(shared_nats: NatsServer) -> None:
    flags = ["--max-body", "1MiB", "--max-bodies", "4MiB", "--body-stall-s", "600", "--body-s", "600"]
    async with gateway_process(shared_nats, *flags) as (http, _, _ring):
        half = b'{"prompt":"' + b"x" * (512 * 1024 - 11)
        async with sender(http, f"content-length: {MIB}") as one, sender(http, f"content-length: {MIB}") as two:
            async with sender(http, "transfer-encoding: chunked") as three:
                for client in (one, two):
                    await client.send(half + b"y" * (512 * 1024 - 1))  # all but a byte
                for _ in range(16):
                    await three.send(b"%x\r\n%b\r\n" % (2**16 - 1, b"x" * (2**16 - 1)))
                await until_held(http, 3 * MIB)  # three quarters, which is what large bodies may hold
                refused = await http.post("/v1/completions", content=half + b'"}')
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert "4194304" in refused.json()["error"]["message"]
                assert (await http.post("/v1/completions", json=small())).status_code == 200
            await until_held(http, 2 * MIB)  # the client of the chunked body left
            large = await http.post("/v1/completions", json=small(prompt="x" * (512 * 1024)))
            assert large.json()["choices"][0]["text"] == said(2)
        await until_held(http, 0)


async def test_a_body_waits_for_room_and_then_goes_on(shared_nats: NatsServer) -> None:
    flags = ["--max-body", "1MiB", "--max-bodies", "2MiB", "--body-stall-s", "600"]
    async with gateway_process(shared_nats, *flags) as (http, _, _ring):
        body = json.dumps(small(prompt="x" * (MIB - 1000))).encode()
        async with sender(http, f"content-length: {len(body)}") as first:
            await first.send(body[:-1])
            await until_held(http, len(body))
            waiting = asyncio.create_task(http.post("/v1/completions", content=body))
            await first.send(body[-1:])
            assert (await first.answer())[0] == 200
            assert (await waiting).status_code == 200


async def test_bodies_with_media_do_not_wait_for_each_other_half_read(shared_nats: NatsServer) -> None:
    """Of the first a megabyte is read, and it has room for all; then the others in turn. Six are three quarters."""
    flags = ["--max-body", "1MiB", "--max-media-body", "4MiB", "--max-bodies", "8MiB", "--body-stall-s", "600"]
    async with gateway_process(shared_nats, *flags) as (http, _, ring):
        ring.images = 8
        await until_media_are_taken(http)
        bodies = [sender(http, f"content-length: {4 * MIB}", "/v1/chat/completions") for _ in range(3)]
        async with bodies[0] as one, bodies[1] as two, bodies[2] as three:
            for client in (one, two, three):
                await client.send(b"x" * (MIB + 4096))
                await until_held(http, 4 * MIB, 6 * MIB)
            await one.send(b"x" * (3 * MIB - 4096))
            assert (await one.answer())[0] == 400
            await until_held(http, 4 * MIB, 6 * MIB)
            await two.send(b"x" * (3 * MIB - 4096))
            assert (await two.answer())[0] == 400
            await until_held(http, 4 * MIB)
        await until_held(http, 0)


async def until_media_are_taken(http: httpx2.AsyncClient) -> None:
    """Until the gateway has heard that the model takes any: a chat may be larger then."""
    text = {"model": MODEL, "messages": [{"role": "user", "content": "x" * MIB}]}
    async with asyncio.timeout(60):
        while "without its images" not in (await http.post("/v1/chat/completions", json=text)).text:
            await asyncio.sleep(0.05)


async def test_requests_are_admitted_before_their_bodies_are_read(shared_nats: NatsServer) -> None:
    async with gateway_process(shared_nats, "--max-open-requests", "2", "--body-stall-s", "600") as (http, _, _ring):
        async with sender(http, "content-length: 100000") as one, sender(http, "content-length: 100000") as two:
            for client in (one, two):
                await client.send(b"{")
            await until_held(http, 200_000)
            async with sender(http, "content-length: 100000") as third:
                status, headers, _ = await third.answer()  # nothing of its body was sent
                assert (status, int(headers["retry-after"])) == (429, 1)
        await until_held(http, 0)
        assert (await http.post("/v1/completions", json=small())).status_code == 200


async def test_a_body_that_stalls_or_takes_too_long_is_given_up(shared_nats: NatsServer) -> None:
    async with gateway_process(shared_nats, "--body-stall-s", "1", "--body-s", "4") as (http, _, _ring):
        async with sender(http, "content-length: 100000") as stalling, sender(http, "content-length: 9999") as dripping:
            await stalling.send(b"{")
            answer = asyncio.create_task(dripping.answer())
            while not answer.done():
                await dripping.send(b" ")
                await asyncio.wait([answer], timeout=0.1)
            status, headers, body = await answer
            assert (status, headers["connection"]) == (408, "close")
            assert "did not arrive within 4 s" in body.decode()
            status, _, body = await stalling.answer()
            assert status == 408
            assert "nothing of the body came for 1 s" in body.decode()
        await until_held(http, 0)


async def test_a_gateway_that_stood_still_reads_what_came_meanwhile(shared_nats: NatsServer) -> None:
    """Its clock's word comes before that of its sockets: it gave clients up for its own pause."""
    body = json.dumps(small()).encode()
    expecting = f"content-length: {len(body)}\r\nexpect: 100-continue"
    async with (
        gateway_process(shared_nats, "--body-stall-s", "0.5") as (http, gateway, _ring),
        sender(http, expecting) as client,
    ):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"  # it waits for it now
        gateway.send_signal(signal.SIGSTOP)
        await client.send(body)
        await asyncio.sleep(1)
        gateway.send_signal(signal.SIGCONT)
        assert (await client.answer())[0] == 200
