"""A hostile client: which answers it may be given, and that a server which breaks off ends no attack."""

from __future__ import annotations

import asyncio

import pytest

from deploy.chaos.attacks.__main__ import ATTACKS
from deploy.chaos.attacks.attack import Answer, AttackCounts, Victim, all_of, parsed
from deploy.chaos.faults.choice import FAULTS


@pytest.mark.parametrize(
    ("status", "headers", "documented"),
    [(200, {}, True), (413, {}, True), (500, {}, False), (503, {}, False), (503, {"retry-after": "1"}, True)],
)
def test_of_5xx_only_a_503_that_says_when_to_come_again_is_documented(
    status: int, headers: dict[str, str], documented: bool
) -> None:
    counts = AttackCounts()
    counts.record("deep JSON", Answer(status, headers, b"why"))
    assert counts.report().answers == f"1 x {status}, 0 unanswered"
    assert counts.report().complaints == (() if documented else (f"deep JSON: HTTP {status}: why",))


def test_a_response_is_read_as_it_came() -> None:
    answer = parsed(b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\n\r\n{}")
    assert answer == Answer(503, {"retry-after": "2"}, b"{}")
    assert parsed(b"") is None
    assert parsed(b"HTTP/1.1 200 OK\r\n") is None
    assert parsed(b"SSH-2.0-OpenSSH\r\n\r\n") is None


async def test_a_server_that_closes_every_connection_ends_no_attack() -> None:
    """Each client that is shut out is counted, or leaves, and the next one comes."""
    came = 0

    def shut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.transport.abort()

    async with await asyncio.start_server(shut, "127.0.0.1", 0) as server:
        victim = Victim.at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key", "m")
        for name in ("half-closed", "json", "upgrades", "cancelled-streams"):
            counts, before = AttackCounts(), came
            await ATTACKS[name](victim, counts)
            assert came - before >= 24, name
            assert not counts.complaints


async def test_a_stream_that_begins_with_a_5xx_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.chaos.attacks.sockets.CANCELLED", 2)

    def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oh\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(fail, "127.0.0.1", 0) as server:
        victim, counts = Victim.at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, "m"), AttackCounts()
        await ATTACKS["cancelled-streams"](victim, counts)
    assert counts.complaints == ["a stream: HTTP 500: "] * 2


async def test_jobs_are_done_some_at_a_time() -> None:
    running = most = done = 0

    async def job() -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done += 1
        if done % 2:
            raise ConnectionResetError

    await all_of((job for _ in range(20)), at_once=3)
    assert (most, done) == (3, 20)


def test_every_attack_is_a_row_of_its_own() -> None:
    assert set(FAULTS["hostile"].targets(None)) == set(ATTACKS)  # type: ignore[arg-type]
