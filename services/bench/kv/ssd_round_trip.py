"""Blocks to a local disk and back, through the store's own SSD tier, and how long a single block takes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.tiers.segment_files import FolderRefused
from kvstore.tiers.ssd_tier import INFLIGHT_BYTES, SsdTier
from services.bench.kv.blocks import KvOptions, KvShape, make_blocks
from services.bench.kv.rates import KvTransferRate, MemoryCopy, PathFailed
from services.bench.statistics import percentile

WRITE, READ = "to SSD", "from SSD"
ROUND_TIMEOUT = 120.0
"""Seconds for writing the blocks of one round."""
START_TIMEOUT = 5.0
SINGLE_READS = 64
"""Blocks that are read one at a time after each round, at the most."""
LOOK_EVERY = 0.0005


def measure(options: KvOptions) -> list[KvTransferRate]:
    """Blocks to the disk of `options.ssd` and back, round by round, in a folder of its own that is removed. Raises
    PathFailed."""
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=options.ssd) as folder:
            return asyncio.run(_round_trips(options.shape, options.rounds, Path(folder) / "ssd"))
    except (OSError, FolderRefused) as error:
        raise PathFailed(str(error)) from None


async def _round_trips(shape: KvShape, rounds: int, folder: Path) -> list[KvTransferRate]:
    """Each round under a layout of its own: blocks that are there are not written again. Raises PathFailed."""
    room = 2 * (rounds + 2) * shape.total_bytes + 2**30
    tier, copy, blocks = SsdTier(folder, room), MemoryCopy(shape), make_blocks(shape)
    written, read, copied, single = [], [], [], []
    background = asyncio.create_task(tier.run())
    try:
        await _until(lambda: tier.is_present, START_TIMEOUT, tier)
        for number in range(rounds + 1):  # the first one touches the memory and counts for nothing
            layout = f"bench-{number}"
            copied.append(copy.seconds())
            written.append(await _written(tier, layout, blocks))
            read.append(await _read(tier, layout, blocks, shape))
            single += [
                await _read(tier, layout, [block], shape) for block in blocks[:: len(blocks) // SINGLE_READS + 1]
            ]
    finally:
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background
    size, latency = shape.total_bytes, percentile(single, 50)
    return [
        KvTransferRate(WRITE, size, written[1:], copied[1:]),
        KvTransferRate(READ, size, read[1:], copied[1:], latency),
    ]


async def _written(tier: SsdTier, layout: str, blocks: Sequence[InFlightBlock]) -> float:
    begin = time.perf_counter()
    room = INFLIGHT_BYTES - 2 * len(blocks[0].payload)
    for block in blocks:
        await _until(lambda: tier.bytes_in_flight < room, ROUND_TIMEOUT, tier)
        if not tier.offer(layout, block):
            raise PathFailed(tier.problem or f"a block of {len(block.payload)} bytes is not taken")
    await _until(lambda: tier.bytes_in_flight == 0, ROUND_TIMEOUT, tier)
    return time.perf_counter() - begin


async def _read(tier: SsdTier, layout: str, blocks: Sequence[InFlightBlock], shape: KvShape) -> float:
    begin = time.perf_counter()
    found = [block.hash async for block in tier.fetch(layout, [block.hash for block in blocks], shape.block)]
    seconds = time.perf_counter() - begin
    if len(found) < len(blocks):
        raise PathFailed(tier.problem or f"the disk kept {len(found)} of {len(blocks)} blocks")
    return seconds


async def _until(condition: Callable[[], bool], seconds: float, tier: SsdTier) -> None:
    """Raises PathFailed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise PathFailed(tier.problem or f"not done within {seconds:.0f} s")
        await asyncio.sleep(LOOK_EVERY)
