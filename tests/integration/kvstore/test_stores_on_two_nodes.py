"""Two real store processes with two node ids: blocks go from one to the other, and through Redis, and nothing hangs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.redis_server import RedisServer, redis_server
from tests.support.cluster.stores_in_two_namespaces import unshare, why_no_namespaces
from tests.support.cluster.tls_authority import Authority
from tests.support.kv.arenas import chain
from tests.support.kv.store_process import PATIENCE, StoreClient, StoreProcess, clients, know_each_other
from tests.support.paths import REPOSITORY

TRANSFER = ("--transfer-port", "0")
Pair = tuple[StoreProcess, StoreProcess]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def pair(shared_nats: NatsServer) -> Iterator[Pair]:
    """On two nodes, pulling from each other; every test has blocks of its own."""
    one, two = (StoreProcess(shared_nats.url, node, *TRANSFER) for node in ("one", "two"))
    one.start()
    two.start()
    yield one, two
    one.close()
    two.close()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


async def pushed_out(client: StoreClient, label: object) -> None:
    """Returns once nothing is in the arena but new blocks."""
    names = chain(label, client.arena.slots)

    async def full_of_them() -> bool:
        # A slot that is just being given memory is not to be had.
        await client.save(names)
        return await client.found(names) == (len(names), 0)

    await eventually(full_of_them)


async def nothing_pinned(client: StoreClient) -> None:
    async def is_so() -> bool:
        return client.report is not None and (client.report.pinned, client.report.reserved) == (0, 0)

    await asyncio.sleep(0.6)  # the report that is there may be an old one
    await eventually(is_so)


async def test_what_one_node_has_another_pulls_and_keeps(shared_nats: NatsServer, pair: Pair) -> None:
    one, two = pair
    names = chain("pulled", 12)
    async with clients(shared_nats.url, one, two) as (at_one, at_two):
        await know_each_other(at_one, at_two)
        assert await at_one.save(names[:10]) == 10
        assert await at_two.found(names) == (0, 0)
        assert await at_two.found(names, source=one) == (10, 10)
        assert await at_two.found(names) == (10, 0)
        await nothing_pinned(at_one)
        await nothing_pinned(at_two)


async def test_what_one_node_is_computing_another_has_as_soon_as_it_is_committed(
    shared_nats: NatsServer, pair: Pair
) -> None:
    one, two = pair
    names = chain("followed", 12)
    async with clients(shared_nats.url, one, two) as (at_one, at_two):
        await know_each_other(at_one, at_two)
        assert await at_one.save(names[:4]) == 4
        await at_two.prefetch(names, source=one)
        for length in (4, 8, 12):
            await at_one.save(names[:length])

            async def is_here(length: int = length) -> bool:
                return await at_two.found(names) == (length, 0)

            await eventually(is_here)
        await nothing_pinned(at_one)


async def test_a_source_that_dies_is_a_miss_and_is_asked_again_when_it_is_back(
    shared_nats: NatsServer, pair: Pair
) -> None:
    one, two = pair
    names = chain("of the dead", 6)
    async with clients(shared_nats.url, one, two) as (at_one, at_two):
        await know_each_other(at_one, at_two)
        await at_one.save(names)
        one.kill()
        assert await at_two.found(names, source=one) == (0, 0)
        one.start()
        await at_one.attach()

        async def pulled() -> bool:
            return await at_two.found(names, source=one) == (6, 6)

        await eventually(pulled)


async def test_a_source_that_is_frozen_costs_no_more_than_the_deadline(shared_nats: NatsServer, pair: Pair) -> None:
    one, two = pair
    names = chain("frozen", 6)
    async with clients(shared_nats.url, one, two) as (at_one, at_two):
        await know_each_other(at_one, at_two)
        await at_one.save(names)
        await at_two.save(names[:2])
        one.signal(signal.SIGSTOP)
        assert await at_two.found(names, source=one, deadline=0.1) == (2, 0)
        one.signal(signal.SIGCONT)
        assert await at_two.found(names, source=one) == (6, 4)


async def test_with_certificates_stores_exchange_blocks_and_without_they_do_not(
    shared_nats: NatsServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    one, two = (StoreProcess(shared_nats.url, node, *TRANSFER, *authority.flags(node)) for node in ("tls-1", "tls-2"))
    plain = StoreProcess(shared_nats.url, "tls-none", *TRANSFER)
    names = chain("secret", 4)
    async with clients(shared_nats.url, one, two, plain) as (at_one, at_two, at_plain):
        await know_each_other(at_one, at_two, at_plain)
        await at_one.save(names)
        assert await at_plain.found(names, source=one) == (0, 0)
        assert await at_two.found(names, source=one) == (4, 4)


async def test_evicted_blocks_come_back_from_redis_also_to_another_node(
    shared_nats: NatsServer, own_redis: RedisServer
) -> None:
    redis = ("--redis-url", own_redis.url)
    one, two = (StoreProcess(shared_nats.url, n, *redis, memory=12 * 4096) for n in ("redis-1", "redis-2"))
    old = chain("old", 5)
    async with clients(shared_nats.url, one, two) as (at_one, at_two):
        assert await at_one.save(old) == 5
        await pushed_out(at_one, "others")

        async def found_there() -> bool:
            return await at_two.found(old) == (5, 5)

        await eventually(found_there)
        assert await at_one.found(old) == (5, 5)
        assert await at_one.found(old) == (5, 0)


async def test_a_redis_that_is_killed_in_use_is_a_miss_and_found_again(
    shared_nats: NatsServer, own_redis: RedisServer
) -> None:
    one = StoreProcess(shared_nats.url, "reborn", "--redis-url", own_redis.url, memory=12 * 4096)
    async with clients(shared_nats.url, one) as (client,):

        async def comes_back(label: str) -> bool:
            names = chain(label, 5)
            await client.save(names)
            await pushed_out(client, (label, "others"))
            return await client.found(names) == (5, 5)

        await eventually(lambda: comes_back("before"))
        own_redis.kill()
        assert await client.found(chain("never there", 3)) == (0, 0)
        await client.save(chain("meanwhile", 5))
        assert await client.found(chain("meanwhile", 5)) == (5, 0)
        own_redis.start()
        await eventually(lambda: comes_back("after"))


async def test_a_redis_that_hangs_delays_only_who_searches_there(
    shared_nats: NatsServer, own_redis: RedisServer
) -> None:
    store = StoreProcess(shared_nats.url, "beside", "--redis-url", own_redis.url, memory=12 * 4096)
    async with clients(shared_nats.url, store) as (client,):

        async def used() -> bool:
            names = chain("below", 5)
            await client.save(names)
            await pushed_out(client, "others")
            return await client.found(names) == (5, 5)

        await eventually(used)
        here = chain("here", 5)
        await client.save(here)
        own_redis.signal(signal.SIGSTOP)
        slow = asyncio.create_task(client.found(chain("nowhere", 3), deadline=8.0))
        await asyncio.sleep(0.1)
        assert await client.found(here) == (5, 0)
        assert await client.save(chain("more", 2)) == 2
        assert not slow.done()
        own_redis.signal(signal.SIGCONT)
        assert await slow == (0, 0)


async def test_a_store_stops_when_told_whatever_it_is_connected_to(shared_nats: NatsServer) -> None:
    one = StoreProcess(shared_nats.url, "stops", *TRANSFER, "--redis-url", "redis://127.0.0.1:1/0")
    async with clients(shared_nats.url, one) as (client,):
        assert await client.found(chain("nothing", 2)) == (0, 0)
        assert await asyncio.to_thread(one.stop) == 0
        assert "Traceback" not in one.log


# ---- what cannot be had


def test_a_store_that_cannot_have_what_it_is_told_says_so_and_ends(shared_nats: NatsServer, tmp_path: Path) -> None:
    argv = ["--node", "n", "--directory", str(tmp_path), "--nats-url", shared_nats.url, "--metrics-port", "none"]
    elsewhere = ["--transfer-port", "0", "--transfer-host", "203.0.113.7", "--insecure"]
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore", *argv, *elsewhere], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "kvstore: transfer-port: cannot listen on 203.0.113.7" in ended.stderr
    assert "Traceback" not in ended.stderr


# ---- two network namespaces


def test_stores_in_two_network_namespaces_exchange_blocks(tmp_path: Path) -> None:
    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)
    ended = subprocess.run(
        [*unshare(), sys.executable, "-m", "tests.support.cluster.stores_in_two_namespaces", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["pulled 6 6", "pulled 6 6"]
