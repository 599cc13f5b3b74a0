"""Redis under the arena: evicted blocks go there in the background, and come back when somebody asks in time.

Nothing here raises for what Redis does, and nothing waits for it longer than it was told to: whatever does not come is
a miss, whatever does not go is dropped, and both are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore import tier_metrics as metrics
from kvstore.carried import CarriedBlock, Shape, is_sound, packed, unpacked
from shared.blocks import BlockHash

log = logging.getLogger(__name__)

TIER = "redis"
BATCH_BYTES = 4 * 2**20
"""Of one write. Sending more at a time would hold up whoever asks the store meanwhile."""
BATCH_BLOCKS = 64
READ_BYTES = 32 * 2**20
"""Of one read; longer runs take several round trips, so that memory stays bounded."""
CONNECTIONS = 8
CONNECT_SECONDS = 1.0
WRITE_SECONDS = 5.0
"""For one write, until Redis counts as away."""
LATE_IN_A_ROW = 3
"""Reads that ended by their deadline, until Redis counts as away: the next ones need not wait for nothing, too."""
RETRY_FIRST, RETRY_LONGEST = 0.1, 5.0
"""Seconds between looks for a Redis that is away."""

LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""What says that Redis is away; other errors of Redis are answers. The built-in TimeoutError is an OSError."""


class _Outgoing(NamedTuple):
    key: str
    value: bytes


def key_of(layout: str, name: BlockHash) -> str:
    return f"baton:kv:{layout}:{name.hex()}"


class RedisTier:
    """Owns the connections to Redis, the blocks on their way there, and whether Redis counts as away."""

    def __init__(self, url: str, ttl: float, inflight_bytes: int) -> None:
        self._redis = _client(url)
        self._ttl_ms = max(1, int(ttl * 1000))
        self._limit = inflight_bytes
        self._outgoing: deque[_Outgoing] = deque()
        self._spoiled: deque[str] = deque(maxlen=BATCH_BLOCKS)
        self._work = asyncio.Event()
        self._present = asyncio.Event()
        self._away = asyncio.Event()
        self._away.set()
        self._late = 0
        self.bytes_in_flight = 0
        metrics.PRESENT.labels(TIER).set(0)

    @property
    def is_present(self) -> bool:
        """Whether it is worth asking, and offering."""
        return self._present.is_set()

    async def run(self) -> None:
        """Writes what was offered, and looks for a Redis that is away. Until cancelled; closes the connections then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_on())
                tasks.create_task(self._look_on())
        finally:
            with contextlib.suppress(exceptions.RedisError, OSError):
                await self._redis.aclose()

    # ---- there

    def offer(self, layout: str, block: CarriedBlock) -> bool:
        """Takes a copy of an evicted block along; False where Redis is away or too much is on its way already."""
        if not self.is_present or self.bytes_in_flight + len(block.payload) > self._limit:
            metrics.DROPPED.labels(TIER, "full" if self.is_present else "away").inc()
            return False
        outgoing = _Outgoing(key_of(layout, block.hash), packed(block))
        self._outgoing.append(outgoing)
        self._count_in_flight(len(outgoing.value))
        self._work.set()
        return True

    async def _write_on(self) -> None:
        while True:
            await self._work.wait()
            await self._present.wait()
            batch = self._next_batch()
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._write(batch)
            except LOST as error:
                self._lose(error)
                metrics.DROPPED.labels(TIER, "away").inc(len(batch))
            except exceptions.RedisError as error:
                self._refused(len(batch), error)
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
        """What Redis has already just lives on: a block that comes and goes is sent once."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for outgoing in batch:
                pipeline.pexpire(outgoing.key, self._ttl_ms)
            while self._spoiled:
                pipeline.unlink(self._spoiled.popleft())
            known = await pipeline.execute(raise_on_error=False)
            new = [outgoing for outgoing, there in zip(batch, known, strict=False) if there is not True and there != 1]
            for outgoing in new:
                pipeline.set(outgoing.key, outgoing.value, px=self._ttl_ms)
            self._count_written(new, await pipeline.execute(raise_on_error=False))

    def _count_written(self, batch: Sequence[_Outgoing], answers: Sequence[Any]) -> None:
        for outgoing, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                self._refused(1, answer)
            else:
                metrics.STORED.labels(TIER).inc()
                metrics.BYTES_OUT.labels(TIER).inc(len(outgoing.value))

    def _refused(self, blocks: int, error: Exception) -> None:
        """It is there, but out of memory, read-only, or not ours to write to."""
        metrics.DROPPED.labels(TIER, "refused").inc(blocks)
        log.warning("redis took no block", extra={"error": str(error)})

    def _count_in_flight(self, change: int) -> None:
        self.bytes_in_flight += change
        metrics.IN_FLIGHT.labels(TIER).set(self.bytes_in_flight)

    # ---- and back

    async def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: Shape) -> AsyncGenerator[CarriedBlock, None]:
        """The leading run of `hashes` that Redis has, checked. One round trip for as many as `READ_BYTES` hold."""
        per_trip = max(1, READ_BYTES // shape.payload_bytes)
        for start in range(0, len(hashes), per_trip):
            wanted = hashes[start : start + per_trip]
            values = await self._read(layout, wanted)
            for name, value in zip(wanted, values, strict=False):
                block = self._checked(layout, name, value, shape)
                if block is None:
                    return
                yield block
            if len(values) < len(wanted):
                return

    async def _read(self, layout: str, wanted: Sequence[BlockHash]) -> list[bytes]:
        """Of the leading ones that are there; none where Redis does not answer. What is read lives on."""
        if not self.is_present:
            return []
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for name in wanted:
                    pipeline.getex(key_of(layout, name), px=self._ttl_ms)
                answers = await pipeline.execute(raise_on_error=False)
        except asyncio.CancelledError:
            self._was_late()
            raise
        except LOST as error:
            metrics.FAILED.labels(TIER, "away").inc()
            self._lose(error)
            return []
        except exceptions.RedisError as error:
            metrics.FAILED.labels(TIER, "refused").inc()
            log.warning("redis answered no search", extra={"error": str(error)})
            return []
        self._late = 0
        return list(takewhile(lambda answer: isinstance(answer, bytes), answers))

    def _checked(self, layout: str, name: BlockHash, value: bytes, shape: Shape) -> CarriedBlock | None:
        block = unpacked(value)
        if block is None or block.hash != name or not is_sound(block, shape):
            self._throw_away(layout, name)
            return None
        metrics.HITS.labels(TIER).inc()
        metrics.BYTES_IN.labels(TIER).inc(len(block.payload))
        return block

    def _throw_away(self, layout: str, name: BlockHash) -> None:
        """What is there under this name is not what had gone there."""
        metrics.SPOILED.labels(TIER).inc()
        log.warning("a block in redis is spoiled", extra={"layout": layout, "hash": name.hex()})
        self._spoiled.append(key_of(layout, name))
        self._work.set()

    def _was_late(self) -> None:
        metrics.FAILED.labels(TIER, "late").inc()
        self._late += 1
        if self._late >= LATE_IN_A_ROW:
            self._lose(TimeoutError(f"{self._late} searches in a row ended by their deadline"))

    # ---- whether it is there

    def _lose(self, error: Exception) -> None:
        if self.is_present:
            log.warning("redis is away", extra={"error": str(error) or type(error).__name__})
        self._present.clear()
        self._away.set()
        metrics.PRESENT.labels(TIER).set(0)

    async def _look_on(self) -> None:
        """Waits until Redis is away, then until it is back."""
        pause = RETRY_FIRST
        while True:
            await self._away.wait()
            if await self._answers():
                self._found()
                pause = RETRY_FIRST
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_LONGEST)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                await self._redis.echo("there")
        except (exceptions.RedisError, OSError):
            return False
        return True

    def _found(self) -> None:
        self._late = 0
        self._away.clear()
        self._present.set()
        metrics.PRESENT.labels(TIER).set(1)
        log.info("redis is there")


def _client(url: str) -> Redis:
    """Never tries twice on its own, and has one bounded pool. Raises ValueError for a URL that is none."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=WRITE_SECONDS,
        protocol=2,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=WRITE_SECONDS,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
    )
    return Redis.from_pool(pool)
