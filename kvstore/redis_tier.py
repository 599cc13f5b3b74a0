"""Redis under the arena: evicted blocks go there in the background, and come back when somebody asks in time.

Nothing here raises for what Redis does, and nothing waits for it longer than it was told to: whatever does not come is
a miss, whatever does not go is dropped, and both are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import NamedTuple

from kvstore import tier_metrics as metrics
from kvstore.carried import CarriedBlock, Shape, is_sound, packed, unpacked
from kvstore.redis_link import Away, RedisLink, Refused
from shared.blocks import BlockHash

log = logging.getLogger(__name__)

TIER = "redis"
BATCH_BYTES = 4 * 2**20
"""Of one write. Sending more at a time would hold up whoever asks the store meanwhile."""
BATCH_BLOCKS = 64
READ_BYTES = 32 * 2**20
"""Asked for in one go. It is Redis that holds what is not read yet."""
LATE_IN_A_ROW = 3
"""Searches that ended before anything came, until Redis counts as away: the next need not wait for nothing, too."""


MAX_REMEMBERED = 65_536
"""Blocks known to be there; the oldest are forgotten first."""


class _Outgoing(NamedTuple):
    key: str
    value: bytes


def key_of(layout: str, name: BlockHash) -> str:
    return f"baton:kv:{layout}:{name.hex()}"


class RedisTier:
    """Owns the blocks on their way to Redis, and the link. `kvstore.tiers.Tier`."""

    def __init__(self, url: str, ttl: float, inflight_bytes: int) -> None:
        """Raises ValueError for a URL that is none."""
        self._link = RedisLink(url)
        self._ttl_ms = max(1, int(ttl * 1000))
        self._limit = inflight_bytes
        self._outgoing: deque[_Outgoing] = deque()
        self._spoiled: deque[str] = deque(maxlen=BATCH_BLOCKS)
        self._taken: OrderedDict[str, float] = OrderedDict()
        """Keys that are there or on their way, and until when that is taken for granted, in `_life` of Redis."""
        self._life = 0
        self._work = asyncio.Event()
        self._late = 0
        self.bytes_in_flight = 0
        metrics.PRESENT.labels(TIER).set_function(lambda: self.is_present)

    @property
    def is_present(self) -> bool:
        """Whether it is worth asking, and offering."""
        return self._link.present.is_set()

    async def run(self) -> None:
        """Writes what was offered, and looks for a Redis that is away. Until cancelled; closes the connections then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_on())
                tasks.create_task(self._link.watch())
        finally:
            await self._link.close()

    # ---- there

    def offer(self, layout: str, block: CarriedBlock) -> bool:
        """Takes a copy of an evicted block along; False where Redis is away or too much is on its way already."""
        if self.has(layout, block.hash):
            return True
        if not self.is_present or self.bytes_in_flight + len(block.payload) > self._limit:
            metrics.DROPPED.labels(TIER, "full" if self.is_present else "away").inc()
            return False
        outgoing = _Outgoing(key_of(layout, block.hash), packed(block))
        self._outgoing.append(outgoing)
        self._remember(outgoing.key)
        self._count_in_flight(len(outgoing.value))
        self._work.set()
        return True

    def has(self, layout: str, name: BlockHash) -> bool:
        """For half of the time to live. Redis may have thrown it away for others meanwhile."""
        if self._life != self._link.life:
            self._life = self._link.life
            self._taken.clear()
        return self._taken.get(key_of(layout, name), 0.0) > time.monotonic()

    def _remember(self, key: str) -> None:
        self._taken[key] = time.monotonic() + self._ttl_ms / 2000
        self._taken.move_to_end(key)
        if len(self._taken) > MAX_REMEMBERED:
            self._taken.popitem(last=False)

    def _forget(self, batch: Iterable[_Outgoing]) -> None:
        for outgoing in batch:
            self._taken.pop(outgoing.key, None)

    async def _write_on(self) -> None:
        while True:
            await self._work.wait()
            await self._link.present.wait()
            batch = self._next_batch()
            try:
                await self._write(batch)
            except Away:
                self._forget(batch)
                metrics.DROPPED.labels(TIER, "away").inc(len(batch))
            except Refused as error:
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
        """What Redis has already just lives on: a block that comes and goes is sent once."""
        if self._spoiled:
            await self._link.remove([self._spoiled.popleft() for _ in range(len(self._spoiled))])
        known = await self._link.touch([outgoing.key for outgoing in batch], self._ttl_ms)
        # One that was missed while it waited here, and was evicted anew, is in the batch twice.
        new = {outgoing.key: outgoing for outgoing, there in zip(batch, known, strict=True) if not there}
        answers = await self._link.put({key: outgoing.value for key, outgoing in new.items()}, self._ttl_ms)
        for outgoing, refused in zip(new.values(), answers, strict=True):
            if refused is not None:
                self._refused([outgoing], refused)
            else:
                metrics.STORED.labels(TIER).inc()
                metrics.BYTES_OUT.labels(TIER).inc(len(outgoing.value))

    def _refused(self, batch: Sequence[_Outgoing], why: str) -> None:
        self._forget(batch)
        metrics.DROPPED.labels(TIER, "refused").inc(len(batch))
        log.warning("redis took no block", extra={"error": why})

    def _count_in_flight(self, change: int) -> None:
        self.bytes_in_flight += change
        metrics.IN_FLIGHT.labels(TIER).set(self.bytes_in_flight)

    # ---- and back

    async def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: Shape) -> AsyncGenerator[CarriedBlock, None]:
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
                self._taken.pop(key_of(layout, wanted[found]), None)
                return

    async def _read(self, layout: str, wanted: Sequence[BlockHash]) -> AsyncGenerator[bytes, None]:
        """Until the first that is not there, or Redis does not answer."""
        if not self.is_present:
            return
        keys = [key_of(layout, name) for name in wanted]
        came = False
        try:
            async with contextlib.aclosing(self._link.get(keys, self._ttl_ms)) as values:
                async for value in values:
                    came = True
                    yield value
            self._late = 0
        except asyncio.CancelledError:
            self._was_late(came)
            raise
        except Away:
            metrics.FAILED.labels(TIER, "away").inc()
        except Refused as error:
            metrics.FAILED.labels(TIER, "refused").inc()
            log.warning("redis gave no block", extra={"error": str(error)})

    def _was_late(self, came: bool) -> None:
        metrics.FAILED.labels(TIER, "late").inc()
        self._late += not came
        if self._late >= LATE_IN_A_ROW:
            self._link.lose(f"{self._late} searches in a row ended by their deadline")
            self._late = 0

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
        self._taken.pop(key_of(layout, name), None)
        self._spoiled.append(key_of(layout, name))
        self._work.set()
