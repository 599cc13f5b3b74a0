"""Redis as a lower tier: evicted blocks are written in the background, and fetched by searches.

Nothing here raises for what Redis does, and nothing waits for it beyond its deadline: blocks that do not come are
misses, blocks that are not taken are dropped, and both are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import NamedTuple

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, is_sound, pack_block, unpack_block
from kvstore.tiers.redis_connection import RedisConnection, RedisRefusal, RedisUnavailable
from shared.blocks import BlockHash
from shared.messages.lifecycle import TierReport
from shared.reliability.recent import RecentEntries

log = logging.getLogger(__name__)

TIER = "redis"
BATCH_BYTES = 4 * 2**20
"""The most bytes of one write. Sending more at a time would hold up requests to the store."""
BATCH_BLOCKS = 64
READ_BYTES = 32 * 2**20
"""The most bytes requested from Redis at once. Redis buffers what is not read yet."""
LATE_IN_A_ROW = 3
"""Searches that ended before anything came, until Redis counts as away: the next need not wait for nothing, too."""


MAX_REMEMBERED = 65_536
"""Blocks known to be there; the oldest are forgotten first."""


class _Outgoing(NamedTuple):
    key: str
    value: bytes


def key_of(layout: str, name: BlockHash) -> str:
    """The key of a block in Redis; layouts are part of it, as equal tokens have other values under each."""
    return f"baton:kv:{layout}:{name.hex()}"


class RedisTier:
    """Owns the blocks on their way to Redis, and the connection. Implements `kvstore.tiers.interface.LowerTier`."""

    name = TIER

    def __init__(self, url: str, ttl: float, inflight_bytes: int) -> None:
        """Raises ValueError for a URL that is none."""
        self._redis = RedisConnection(url)
        self._ttl_ms = max(1, int(ttl * 1000))
        self._limit = inflight_bytes
        self._outgoing: deque[_Outgoing] = deque()
        self._spoiled: deque[str] = deque(maxlen=BATCH_BLOCKS)
        self._known_keys: RecentEntries[str, float] = RecentEntries(MAX_REMEMBERED)
        """Keys that are there or on their way, and until when that is taken for granted, in `_life` of Redis."""
        self._life = 0
        self._work = asyncio.Event()
        self._late = 0
        self._hits = self._stored = 0
        self.bytes_in_flight = 0
        metrics.TIER_PRESENT.labels(TIER).set_function(lambda: self.is_present)

    @property
    def is_present(self) -> bool:
        """Whether it is worth asking, and offering."""
        return self._redis.present.is_set()

    def report(self) -> TierReport:
        """For the store's lifecycle. What Redis holds is Redis's to say."""
        problem = "" if self.is_present else "it does not answer"
        return TierReport(name=TIER, present=self.is_present, hits=self._hits, stored=self._stored, problem=problem)

    async def run(self) -> None:
        """Writes offered blocks, and reconnects to Redis, until it is cancelled; then it closes the connections."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_batches())
                tasks.create_task(self._redis.watch())
        finally:
            await self._redis.close()

    # ---- writing

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Takes a copy of an evicted block along; False where Redis is away or too much is on its way already."""
        if self.has(layout, block.hash):
            return True
        if not self.is_present or self.bytes_in_flight + len(block.payload) > self._limit:
            metrics.TIER_DROPPED.labels(TIER, "full" if self.is_present else "away").inc()
            return False
        outgoing = _Outgoing(key_of(layout, block.hash), pack_block(block))
        self._outgoing.append(outgoing)
        self._remember(outgoing.key)
        self._count_in_flight(len(outgoing.value))
        self._work.set()
        return True

    def has(self, layout: str, name: BlockHash) -> bool:
        """Assumed for half of the time to live, though Redis may have evicted the block meanwhile."""
        if self._life != self._redis.life:
            self._life = self._redis.life
            self._known_keys.clear()
        return self._known_keys.get(key_of(layout, name), 0.0) > time.monotonic()

    def _remember(self, key: str) -> None:
        self._known_keys[key] = time.monotonic() + self._ttl_ms / 2000

    def _forget(self, batch: Iterable[_Outgoing]) -> None:
        for outgoing in batch:
            self._known_keys.pop(outgoing.key, None)

    async def _write_batches(self) -> None:
        while True:
            await self._work.wait()
            await self._redis.present.wait()
            batch = self._next_batch()
            try:
                await self._write(batch)
            except RedisUnavailable:
                self._forget(batch)
                metrics.TIER_DROPPED.labels(TIER, "away").inc(len(batch))
            except RedisRefusal as error:
                self._refused(batch, str(error))
            finally:
                self._count_in_flight(-sum(len(outgoing.value) for outgoing in batch))
            if not self._outgoing and not self._spoiled:
                self._work.clear()

    def _next_batch(self) -> list[_Outgoing]:
        batch: list[_Outgoing] = []
        size = 0
        while self._outgoing and len(batch) < BATCH_BLOCKS and size < BATCH_BYTES:
            batch.append(self._outgoing.popleft())
            size += len(batch[-1].value)
        return batch

    async def _write(self, batch: Sequence[_Outgoing]) -> None:
        """For blocks that Redis has already, only the time to live is renewed: a block evicted again is not sent
        again."""
        if self._spoiled:
            await self._redis.remove([self._spoiled.popleft() for _ in range(len(self._spoiled))])
        known = await self._redis.touch([outgoing.key for outgoing in batch], self._ttl_ms)
        # A block that was missed while it waited here, and was evicted again, is in the batch twice.
        new = {outgoing.key: outgoing for outgoing, there in zip(batch, known, strict=True) if not there}
        answers = await self._redis.put({key: outgoing.value for key, outgoing in new.items()}, self._ttl_ms)
        for outgoing, refused in zip(new.values(), answers, strict=True):
            if refused is not None:
                self._refused([outgoing], refused)
            else:
                self._stored += 1
                metrics.TIER_STORED.labels(TIER).inc()
                metrics.TIER_BYTES_OUT.labels(TIER).inc(len(outgoing.value))

    def _refused(self, batch: Sequence[_Outgoing], why: str) -> None:
        self._forget(batch)
        metrics.TIER_DROPPED.labels(TIER, "refused").inc(len(batch))
        log.warning("redis did not store blocks", extra={"error": why})

    def _count_in_flight(self, change: int) -> None:
        self.bytes_in_flight += change
        metrics.TIER_IN_FLIGHT.labels(TIER).set(self.bytes_in_flight)

    # ---- fetching

    async def fetch(
        self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """The leading run of `hashes` that Redis has, checked, as it comes: a deadline in the middle costs only what
        had not come by then. One round trip for as many blocks as `READ_BYTES` hold."""
        per_trip = max(1, READ_BYTES // shape.payload_bytes)
        for start in range(0, len(hashes), per_trip):
            found = 0
            wanted = hashes[start : start + per_trip]
            async with contextlib.aclosing(self._read(layout, wanted)) as values:
                async for value in values:
                    block = self._checked(layout, wanted[found], value, shape)
                    if block is None:
                        return
                    found += 1
                    yield block
            if found < len(wanted):
                self._known_keys.pop(key_of(layout, wanted[found]), None)
                return

    async def _read(self, layout: str, wanted: Sequence[BlockHash]) -> AsyncGenerator[bytes, None]:
        """The values up to the first that is not there, or until Redis does not answer."""
        if not self.is_present:
            return
        keys = [key_of(layout, name) for name in wanted]
        came = False
        try:
            async with contextlib.aclosing(self._redis.get(keys, self._ttl_ms)) as values:
                async for value in values:
                    came = True
                    yield value
            self._late = 0
        except asyncio.CancelledError:
            self._record_late(came)
            raise
        except RedisUnavailable:
            metrics.TIER_FAILED.labels(TIER, "away").inc()
        except RedisRefusal as error:
            metrics.TIER_FAILED.labels(TIER, "refused").inc()
            log.warning("redis did not return blocks", extra={"error": str(error)})

    def _record_late(self, came: bool) -> None:
        metrics.TIER_FAILED.labels(TIER, "late").inc()
        self._late += not came
        if self._late >= LATE_IN_A_ROW:
            self._redis.lose(f"{self._late} searches in a row ended by their deadline")
            self._late = 0

    def _checked(self, layout: str, name: BlockHash, value: bytes, shape: BlockShape) -> InFlightBlock | None:
        block = unpack_block(value)
        if block is None or block.hash != name or not is_sound(block, shape):
            self._remove_spoiled(layout, name)
            return None
        self._hits += 1
        metrics.TIER_HITS.labels(TIER).inc()
        metrics.TIER_BYTES_IN.labels(TIER).inc(len(block.payload))
        return block

    def _remove_spoiled(self, layout: str, name: BlockHash) -> None:
        """The value under this key is not the block that was written: it is removed in the background."""
        metrics.TIER_SPOILED.labels(TIER).inc()
        log.warning("block in redis with a wrong checksum", extra={"layout": layout, "hash": name.hex()})
        self._known_keys.pop(key_of(layout, name), None)
        self._spoiled.append(key_of(layout, name))
        self._work.set()
