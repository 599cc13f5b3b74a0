"""The Redis tier against a real Redis, which is killed, frozen, full and lied in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
import uvloop
from redis.asyncio import Redis

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, pack_block
from kvstore.tiers import redis_tier
from kvstore.tiers.redis_connection import RedisConnection, RedisUnavailable
from kvstore.tiers.redis_tier import RedisTier, key_of
from shared.blocks import BlockHash
from tests.support.cluster.redis_server import RedisServer, redis_server
from tests.support.kv.random_blocks import SHAPE, chain, hashes

LAYOUT = "5eed" * 6
PATIENCE = 60.0
INFLIGHT = 2**20


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@contextlib.asynccontextmanager
async def running(url: str, ttl: float = 60.0, inflight: int = INFLIGHT) -> AsyncIterator[RedisTier]:
    tier = RedisTier(url, ttl, inflight)
    task = asyncio.create_task(tier.run())
    try:
        yield tier
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def present(tier: RedisTier) -> None:
    await until(lambda: tier.is_present)


async def written(tier: RedisTier) -> None:
    await until(lambda: tier.bytes_in_flight == 0)


async def found(
    tier: RedisTier, names: Sequence[BlockHash], *, layout: str = LAYOUT, seconds: float = PATIENCE
) -> list[InFlightBlock]:
    blocks: list[InFlightBlock] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for block in tier.fetch(layout, names, SHAPE):
                blocks.append(block)
    return blocks


def counted(counter: object, *labels: str) -> float:
    return counter.labels(redis_tier.TIER, *labels)._value.get()  # type: ignore[attr-defined, no-any-return]


async def test_what_was_evicted_comes_back_as_it_was(shared_redis: RedisServer) -> None:
    blocks = chain(5, seed=1)
    async with running(shared_redis.url) as tier:
        await present(tier)
        assert all(tier.offer(LAYOUT, block) for block in blocks)
        await written(tier)
        assert await found(tier, hashes(blocks)) == blocks


async def test_the_copy_is_made_before_the_offer_returns(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=2)
    slot = bytearray(block.payload)
    async with running(shared_redis.url) as tier:
        await present(tier)
        tier.offer(LAYOUT, block._replace(payload=memoryview(slot)))
        slot[:] = bytes(len(slot))
        await written(tier)
        assert await found(tier, [block.hash]) == [block]


async def test_a_run_ends_at_the_first_block_that_is_missing(shared_redis: RedisServer) -> None:
    blocks = chain(4, seed=3)
    async with running(shared_redis.url) as tier:
        await present(tier)
        for block in (blocks[0], blocks[1], blocks[3]):
            tier.offer(LAYOUT, block)
        await written(tier)
        assert await found(tier, hashes(blocks)) == blocks[:2]


async def test_a_run_longer_than_one_round_trip_may_bring_comes_whole(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "READ_BYTES", 2 * SHAPE.payload_bytes)
    blocks = chain(7, seed=4)
    async with running(shared_redis.url) as tier:
        await present(tier)
        for block in blocks:
            tier.offer(LAYOUT, block)
        await written(tier)
        assert await found(tier, hashes(blocks)) == blocks


async def test_a_search_that_finds_nothing_leaves_its_connection_to_the_next(shared_redis: RedisServer) -> None:
    blocks = chain(40, seed=15)
    async with running(shared_redis.url) as tier, Redis.from_url(shared_redis.url) as redis:
        await present(tier)
        await found(tier, hashes(blocks))
        before = (await redis.info("stats"))["total_connections_received"]
        for _ in range(5):
            assert await found(tier, hashes(blocks)) == []
        assert (await redis.info("stats"))["total_connections_received"] == before


async def test_what_came_before_the_deadline_counts_and_redis_is_not_away_for_it(own_redis: RedisServer) -> None:
    shape = BlockShape(cells=1, cell_bytes=2**20)
    blocks = chain(24, shape, seed=16)
    async with running(own_redis.url, inflight=2**26) as tier:
        await present(tier)
        for block in blocks:
            tier.offer(LAYOUT, block)
        await written(tier)
        for _ in range(redis_tier.LATE_IN_A_ROW + 1):
            search = tier.fetch(LAYOUT, hashes(blocks), shape)
            came = [await anext(search)]
            own_redis.signal(signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1), contextlib.aclosing(search):
                    async for block in search:
                        came.append(block)
            own_redis.signal(signal.SIGCONT)
            assert came == blocks[: len(came)]
            assert len(came) < len(blocks)
        assert tier.is_present


async def test_blocks_of_another_layout_are_misses(shared_redis: RedisServer) -> None:
    blocks = chain(2, seed=5)
    async with running(shared_redis.url) as tier:
        await present(tier)
        tier.offer(LAYOUT, blocks[0])
        await written(tier)
        assert await found(tier, hashes(blocks), layout="0" * 24) == []


async def test_blocks_live_as_long_as_they_are_told_and_longer_when_read(shared_redis: RedisServer) -> None:
    kept, left = chain(2, seed=6)
    async with running(shared_redis.url, ttl=1000) as tier, Redis.from_url(shared_redis.url) as redis:
        await present(tier)
        tier.offer(LAYOUT, kept)
        tier.offer(LAYOUT, left)
        await written(tier)
        for block in (kept, left):
            assert 0 < await redis.pttl(key_of(LAYOUT, block.hash)) <= 1_000_000
            await redis.pexpire(key_of(LAYOUT, block.hash), 500_000)
        await found(tier, [kept.hash])
        assert await redis.pttl(key_of(LAYOUT, kept.hash)) > 500_000
        assert await redis.pttl(key_of(LAYOUT, left.hash)) <= 500_000


async def test_what_is_past_its_time_is_gone(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=7)
    async with running(shared_redis.url, ttl=0.02) as tier:
        await present(tier)
        tier.offer(LAYOUT, block)
        await written(tier)
        await asyncio.sleep(0.05)
        assert await found(tier, [block.hash]) == []


async def test_a_block_that_another_store_has_sent_is_not_sent_again_and_lives_on(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=8)
    async with (
        running(shared_redis.url, ttl=1000) as tier,
        running(shared_redis.url, ttl=1000) as other,
        Redis.from_url(shared_redis.url) as redis,
    ):
        await present(tier)
        await present(other)
        tier.offer(LAYOUT, block)
        await written(tier)
        await redis.pexpire(key_of(LAYOUT, block.hash), 500_000)
        before = counted(metrics.TIER_STORED)
        other.offer(LAYOUT, block)
        await written(other)
        assert counted(metrics.TIER_STORED) == before
        assert await redis.pttl(key_of(LAYOUT, block.hash)) > 500_000


async def test_what_is_there_or_on_its_way_need_not_be_offered_again(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=17)
    async with running(shared_redis.url) as tier, Redis.from_url(shared_redis.url) as redis:
        await present(tier)
        assert not tier.has(LAYOUT, block.hash)
        tier.offer(LAYOUT, block)
        assert tier.has(LAYOUT, block.hash)
        await written(tier)
        assert tier.offer(LAYOUT, block)
        assert tier.bytes_in_flight == 0
        await redis.delete(key_of(LAYOUT, block.hash))
        assert await found(tier, [block.hash]) == []
        assert not tier.has(LAYOUT, block.hash)


async def test_a_block_that_is_offered_anew_while_it_waits_is_sent_once(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks it up meanwhile finds nothing, and it is not taken to be there any more."""
    monkeypatch.setattr(redis_tier, "MAX_REMEMBERED", 0)
    first, second = chain(2, seed=16)
    before = counted(metrics.TIER_STORED)
    async with running(shared_redis.url) as tier:
        await present(tier)
        assert all(tier.offer(LAYOUT, block) for block in (first, first, second))
        await written(tier)
        assert await found(tier, hashes([first, second])) == [first, second]
    assert counted(metrics.TIER_STORED) == before + 2


async def test_what_was_taken_for_granted_ends_with_half_of_its_time(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=18)
    async with running(shared_redis.url, ttl=0.1) as tier:
        await present(tier)
        tier.offer(LAYOUT, block)
        await until(lambda: not tier.has(LAYOUT, block.hash))


@pytest.mark.parametrize("harm", ["payload", "checksums", "length", "name", "nonsense"])
async def test_a_spoiled_value_is_a_miss_and_is_taken_away(shared_redis: RedisServer, harm: str) -> None:
    first, second = chain(2, seed=9)
    value = pack_block(first)
    spoiled = {
        "payload": value[:-7] + bytes([value[-7] ^ 1]) + value[-6:],
        "checksums": pack_block(first._replace(checksums=second.checksums)),
        "length": value[:-1],
        "name": pack_block(first._replace(hash=second.hash)),
        "nonsense": b"?",
    }[harm]
    async with running(shared_redis.url) as tier, Redis.from_url(shared_redis.url) as redis:
        await present(tier)
        await redis.set(key_of(LAYOUT, first.hash), spoiled)
        before = counted(metrics.TIER_SPOILED)
        assert await found(tier, [first.hash]) == []
        assert counted(metrics.TIER_SPOILED) == before + 1
        async with asyncio.timeout(PATIENCE):
            while await redis.exists(key_of(LAYOUT, first.hash)):
                await asyncio.sleep(0.005)


async def test_a_value_of_another_type_is_a_miss(shared_redis: RedisServer) -> None:
    [block] = chain(1, seed=10)
    async with running(shared_redis.url) as tier, Redis.from_url(shared_redis.url) as redis:
        await present(tier)
        await redis.rpush(key_of(LAYOUT, block.hash), "not a block")  # type: ignore[misc]
        assert await found(tier, [block.hash]) == []
        assert tier.is_present
        await redis.delete(key_of(LAYOUT, block.hash))


async def test_no_more_is_in_flight_than_allowed_and_what_is_above_is_dropped(own_redis: RedisServer) -> None:
    blocks = chain(20, seed=11)
    room = 5 * len(pack_block(blocks[0]))
    async with running(own_redis.url, inflight=room) as tier:
        await present(tier)
        own_redis.signal(signal.SIGSTOP)
        before = counted(metrics.TIER_DROPPED, "full")
        taken = []
        for block in blocks:
            taken.append(tier.offer(LAYOUT, block))
            assert tier.bytes_in_flight <= room
            await asyncio.sleep(0)
        assert taken == [True] * 5 + [False] * 15
        assert counted(metrics.TIER_DROPPED, "full") == before + 15
        own_redis.signal(signal.SIGCONT)
        await written(tier)
        assert await found(tier, hashes(blocks)) == blocks[:5]


async def test_without_a_redis_everything_is_a_miss_and_nothing_is_taken() -> None:
    [block] = chain(1)
    async with running("redis://127.0.0.1:1/0") as tier:
        await asyncio.sleep(0.05)
        assert not tier.offer(LAYOUT, block)
        assert await found(tier, [block.hash]) == []
        assert tier.bytes_in_flight == 0


async def test_a_redis_that_wants_another_password_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    [block] = chain(1)
    with redis_server("--requirepass", "right") as server:
        async with running(server.url.replace("//", "//:wrong@")) as tier:
            await until(lambda: "redis does not answer" in caplog.text)
            await asyncio.sleep(0.4)
            assert caplog.text.count("redis does not answer") == 1
            assert not tier.offer(LAYOUT, block)
            assert "wrong" not in caplog.text
        async with running(server.url.replace("//", "//:right@")) as tier:
            await present(tier)


async def test_a_redis_that_dies_in_use_is_missed_and_found_again(own_redis: RedisServer) -> None:
    blocks = chain(30, seed=12)
    async with running(own_redis.url) as tier:
        await present(tier)
        for block in blocks[:10]:
            tier.offer(LAYOUT, block)
        await written(tier)
        for block in blocks[10:20]:
            tier.offer(LAYOUT, block)
        own_redis.kill()
        await found(tier, hashes(blocks))
        await until(lambda: not tier.is_present)
        assert await found(tier, hashes(blocks)) == []
        assert not tier.offer(LAYOUT, blocks[20])
        own_redis.start()
        await present(tier)
        await written(tier)
        assert all(tier.offer(LAYOUT, block) for block in blocks)
        await written(tier)
        assert await found(tier, hashes(blocks)) == blocks


async def test_a_frozen_redis_costs_no_more_than_the_deadline_and_soon_nothing(own_redis: RedisServer) -> None:
    blocks = chain(3, seed=13)
    async with running(own_redis.url) as tier:
        await present(tier)
        for block in blocks:
            tier.offer(LAYOUT, block)
        await written(tier)
        own_redis.signal(signal.SIGSTOP)
        for _ in range(redis_tier.LATE_IN_A_ROW):
            assert await found(tier, hashes(blocks), seconds=0.01) == []
        assert not tier.is_present
        own_redis.signal(signal.SIGCONT)
        await present(tier)
        assert await found(tier, hashes(blocks)) == blocks


async def test_a_full_redis_refuses_and_is_still_read() -> None:
    blocks = chain(3, seed=14)
    with redis_server("--maxmemory-policy", "noeviction") as server:
        async with running(server.url) as tier, Redis.from_url(server.url) as redis:
            await present(tier)
            tier.offer(LAYOUT, blocks[0])
            await written(tier)
            await redis.config_set("maxmemory", "1")
            before = counted(metrics.TIER_DROPPED, "refused")
            tier.offer(LAYOUT, blocks[1])
            tier.offer(LAYOUT, blocks[2])
            await written(tier)
            assert counted(metrics.TIER_DROPPED, "refused") == before + 2
            assert tier.is_present
            await redis.config_set("maxmemory", "0")
            assert await found(tier, hashes(blocks)) == blocks[:1]


def test_a_connection_that_is_closed_under_a_write_means_that_redis_is_away(shared_redis: RedisServer) -> None:
    """With the loop of the services, whose error is another one than asyncio's."""

    async def write_to_a_closed_connection() -> None:
        redis = RedisConnection(shared_redis.url)
        connection = await redis._connection()
        try:
            connection._writer.transport.abort()
            await asyncio.sleep(0.01)
            with pytest.raises(RedisUnavailable, match="the handler is closed"), redis._translated_errors():
                connection._writer.writelines([b"PING\r\n"])
            with pytest.raises(RuntimeError, match="another"), redis._translated_errors():
                raise RuntimeError("another")
        finally:
            await redis._pool.release(connection)
            await redis.close()

    uvloop.run(write_to_a_closed_connection())
