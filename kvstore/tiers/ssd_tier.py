"""A folder on a local SSD as a lower tier: evicted blocks are written in batches and found again after a restart.

Files are touched by threads of this tier only: one writes, several read. Nothing here raises for what the disk does:
while it is full, blocks are dropped and those that are there are read; while it fails or the folder is gone, the tier
is away and looks for it again. All of it is counted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.core.layout import CHECKSUM
from kvstore.core.segments import MIN_SEGMENTS, RecordPlace, Segment, SegmentIndex, SegmentRoom
from kvstore.tiers.segment_files import FolderRefused, RecordShape, SegmentFiles, pack_record, record_shape
from shared.blocks import BlockHash
from shared.messages.lifecycle import TierReport
from shared.reliability.retry import Backoff

log = logging.getLogger(__name__)

TIER = "ssd"
INFLIGHT_BYTES = 64 * 2**20
"""Blocks that wait to be written, at the most; beyond that, evicted blocks are dropped."""
BATCH_BYTES = 8 * 2**20
BATCH_BLOCKS = 256
"""The most of one write."""
READERS = 8
"""Threads that read: as many requests as the disk gets at a time."""
GROUP_BYTES = 2**20
"""Read by one thread at a time, if blocks are smaller."""
AHEAD_BYTES = 32 * 2**20
"""Read ahead of the block that is wanted next, at the most."""
RETRY = Backoff(first=0.2, longest=10.0)
"""Seconds until the folder is looked for again."""
FULL_SECONDS = 30.0
"""After the disk was full: as long, no more room is taken than the tier has already."""
READ_ERRORS_IN_A_ROW = 3
"""Until the tier counts as away."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

P = ParamSpec("P")
T = TypeVar("T")


class _OutgoingRecord(NamedTuple):
    layout: str
    name: BlockHash
    block: BlockShape
    shape: RecordShape
    record: mmap.mmap


class _Read(NamedTuple):
    blocks: list[InFlightBlock | None]
    seconds: float


class _Timing:
    """Owns how long one kind of access took, in all."""

    def __init__(self, kind: str) -> None:
        self._histogram = metrics.TIER_IO_SECONDS.labels(TIER, kind)
        self._blocks, self._seconds = 0, 0.0

    def record(self, blocks: int, seconds: float) -> None:
        self._histogram.observe(seconds)
        self._blocks += blocks
        self._seconds += seconds

    @property
    def mean(self) -> float:
        """Seconds per block."""
        return self._seconds / self._blocks if self._blocks else 0.0


class SsdTier:
    """Owns the blocks on their way to the disk, and the index of those that are there. Implements
    `kvstore.tiers.interface.LowerTier`."""

    name = TIER

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit`: bytes that the tier's files may take. Raises FolderRefused where another store works in the folder
        or it holds something else; a folder that cannot be had otherwise is looked for in the background."""
        self._files = SegmentFiles(folder)
        self._limit = limit
        self._index = SegmentIndex(limit)
        self._outgoing: deque[_OutgoingRecord] = deque()
        self._pending: set[tuple[str, BlockHash]] = set()
        """Blocks in `_outgoing`, or being written."""
        self._spare: list[mmap.mmap] = []
        """Buffers of records that were written; touched before, they cost no page faults."""
        self._work = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ssd-read")
        self._reading, self._writing = _Timing("read"), _Timing("write")
        self._limited_until = self._paused_until = 0.0
        self._read_errors = 0
        self._hits = self._stored = self._evicted = 0
        self.bytes_in_flight = 0
        self.is_present = False
        """Whether the folder is open and its content known."""
        self.problem = "its content is not known yet"
        """Why it is not present or takes no blocks; empty where all is well."""
        metrics.TIER_PRESENT.labels(TIER).set_function(lambda: self.is_present)
        metrics.TIER_BYTES.labels(TIER, "allowed").set(limit)
        try:
            self._files.open()
        except OSError as error:
            self.problem = str(error)

    # ---- background

    async def run(self) -> None:
        """Opens the folder, again whenever it was lost, and writes what is offered, until cancelled."""
        try:
            tries = 0
            while True:
                since = time.monotonic()
                if await self._opened():
                    await self._write_batches()
                # A disk that fails again at once is not read anew without a pause.
                tries = 0 if time.monotonic() - since > RETRY.longest else tries + 1
                await asyncio.sleep(RETRY.pause(tries))
        finally:
            self.is_present = False
            self._readers.shutdown(wait=False, cancel_futures=True)
            # A write that is under way ends before another store may have the folder.
            self._writer.shutdown(cancel_futures=True)
            self._files.close()

    async def _opened(self) -> bool:
        try:
            found = await self._on(self._writer, self._open_and_scan)
        except (OSError, FolderRefused) as error:
            self._say(str(error))
            return False
        self._index = SegmentIndex(self._limit)
        for segment in self._index.recover(found):
            await self._on(self._writer, self._files.remove, segment)
        self.is_present, self.problem, self._read_errors = True, "", 0
        metrics.TIER_DIRECT.labels(TIER).set(self._files.is_direct)
        self._set_gauges()
        log.info(
            "ssd tier opened" if self._files.is_direct else "ssd tier opened without O_DIRECT: through the page cache",
            extra={"folder": str(self._files.folder), "blocks": self._index.blocks, "bytes": self._index.bytes},
        )
        return True

    def _open_and_scan(self) -> list[Segment]:
        self._files.open()
        return self._files.scan()

    def _lose(self, why: str) -> None:
        """The folder counts as away until it was opened again."""
        self.is_present = False
        self._say(why)
        self._work.set()

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("ssd tier", extra={"folder": str(self._files.folder), "problem": problem})
        self.problem = problem

    async def _on(self, threads: ThreadPoolExecutor, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: do(*args, **kwargs))

    def report(self) -> TierReport:
        """For the store's lifecycle."""
        return TierReport(
            name=TIER,
            present=self.is_present,
            blocks=self._index.blocks,
            bytes_used=self._index.bytes,
            bytes_total=self._limit,
            hits=self._hits,
            stored=self._stored,
            evictions=self._evicted,
            read_seconds=self._reading.mean,
            write_seconds=self._writing.mean,
            direct=self._files.is_direct,
            problem=self.problem,
        )

    # ---- writing

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Takes a copy of an evicted block along; False where the disk is away or too much is on its way already."""
        if self.has(layout, block.hash):
            return True
        cells = len(block.checksums) // CHECKSUM.size
        shape = BlockShape(cells, len(block.payload) // max(1, cells))
        record = record_shape(shape)
        full = self.bytes_in_flight + record.record_bytes > INFLIGHT_BYTES or self._paused_until > time.monotonic()
        if not self.is_present or full:
            metrics.TIER_DROPPED.labels(TIER, "full" if self.is_present else "away").inc()
            return False
        buffer = self._buffer(record.record_bytes)
        pack_record(block, record, buffer)
        self._outgoing.append(_OutgoingRecord(layout, block.hash, shape, record, buffer))
        self._pending.add((layout, block.hash))
        self._count_in_flight(record.record_bytes)
        self._work.set()
        return True

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether the block is on the disk or on its way there."""
        return self.is_present and ((layout, name) in self._pending or self._index.has(layout, name))

    def _buffer(self, size: int) -> mmap.mmap:
        if self._spare and len(self._spare[-1]) == size:
            return self._spare.pop()
        self._spare.clear()
        return mmap.mmap(-1, size)

    async def _write_batches(self) -> None:
        """Until the folder is lost; what is on its way then is dropped."""
        while self.is_present:
            await self._work.wait()
            batch = self._next_batch()
            written = 0
            try:
                while written < len(batch) and self.is_present:
                    count = await self._write(batch[written:])
                    if count is None:
                        break
                    written += count
            finally:
                self._finish(batch, written)
            if not self._outgoing and self.is_present:
                self._work.clear()
        while lost := self._next_batch():
            self._finish(lost, 0)

    def _next_batch(self) -> list[_OutgoingRecord]:
        """The next blocks of one layout."""
        batch: list[_OutgoingRecord] = []
        size = 0
        while self._outgoing and len(batch) < BATCH_BLOCKS and size < BATCH_BYTES:
            if batch and (self._outgoing[0].layout, self._outgoing[0].shape) != (batch[0].layout, batch[0].shape):
                break
            batch.append(self._outgoing.popleft())
            size += batch[-1].shape.record_bytes
        return batch

    async def _write(self, batch: Sequence[_OutgoingRecord]) -> int | None:
        """Writes the beginning of `batch`, as much as the segment has room for; returns how many blocks, or None if
        the disk takes none."""
        self._lift_limit()
        first, evicted_before = batch[0], self._index.evictions
        room = self._index.room(first.layout, first.shape.record_bytes)
        self._count_evicted(self._index.evictions - evicted_before)
        if room is None:
            return None
        segment = room.segment
        fitting = batch[: segment.capacity - len(segment.names)]
        begin = time.perf_counter()
        try:
            await self._on(self._writer, self._carry_out, room, fitting)
        except OSError as error:
            return await self._failed_write(room, error)
        self._writing.record(len(fitting), time.perf_counter() - begin)
        self._index.written(segment, [outgoing.name for outgoing in fitting])
        self._stored += len(fitting)
        metrics.TIER_STORED.labels(TIER).inc(len(fitting))
        metrics.TIER_BYTES_OUT.labels(TIER).inc(sum(outgoing.shape.record_bytes for outgoing in fitting))
        self._set_gauges()
        if segment.is_full:
            await self._seal(segment)
        return len(fitting)

    def _carry_out(self, room: SegmentRoom, records: Sequence[_OutgoingRecord]) -> None:
        for evicted in room.evicted:
            self._files.remove(evicted)
        if room.is_new:
            self._files.create(room.segment, records[0].block)
        self._files.write(room.segment, len(room.segment.names), [outgoing.record for outgoing in records])

    async def _seal(self, segment: Segment) -> None:
        try:
            await self._on(self._writer, self._files.seal, segment)
        except OSError as error:
            self._lose(str(error))

    async def _failed_write(self, room: SegmentRoom, error: OSError) -> int | None:
        """A full disk costs the blocks that were to be written; anything else means that the folder is lost."""
        if error.errno not in FULL:
            self._lose(str(error))
            return None
        if room.is_new:
            self._index.remove(room.segment)
        self._say(str(error))
        now = time.monotonic()
        if now < self._limited_until:
            self._paused_until = self._limited_until
            return None
        # Others have the room. For a while the tier takes what they left, and goes on within that.
        self._limited_until = now + FULL_SECONDS
        try:
            free = await self._on(self._writer, self._files.free_bytes)
        except OSError as lost:
            self._lose(str(lost))
            return None
        self._index.limit = min(self._limit, self._index.bytes + free - free // MIN_SEGMENTS)
        return 0

    def _lift_limit(self) -> None:
        if self._limited_until and time.monotonic() >= self._limited_until:
            self._index.limit = self._limit
            self._limited_until = 0.0
            self.problem = ""

    def _finish(self, batch: Sequence[_OutgoingRecord], written: int) -> None:
        self._pending.difference_update((outgoing.layout, outgoing.name) for outgoing in batch)
        self._count_in_flight(-sum(outgoing.shape.record_bytes for outgoing in batch))
        self._spare.extend(outgoing.record for outgoing in batch)
        if written < len(batch):
            metrics.TIER_DROPPED.labels(TIER, "full" if self.is_present else "away").inc(len(batch) - written)

    def _count_in_flight(self, change: int) -> None:
        self.bytes_in_flight += change
        metrics.TIER_IN_FLIGHT.labels(TIER).set(self.bytes_in_flight)

    def _set_gauges(self) -> None:
        metrics.TIER_BYTES.labels(TIER, "used").set(self._index.bytes)
        metrics.TIER_BLOCKS.labels(TIER).set(self._index.blocks)

    def _count_evicted(self, blocks: int) -> None:
        self._evicted += blocks
        metrics.TIER_EVICTED.labels(TIER).inc(blocks)

    # ---- fetching

    async def fetch(
        self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """The leading run of `hashes` that is on the disk, checked, as it comes; several reads are under way."""
        record_bytes = record_shape(shape).record_bytes
        places = self._index.find(layout, hashes) if self.is_present else []
        groups = _groups([place for place in places if place.segment.record_bytes == record_bytes])
        ahead: deque[tuple[list[RecordPlace], asyncio.Future[_Read]]] = deque()
        try:
            while True:
                while sum(len(group) for group, _ in ahead) * record_bytes < AHEAD_BYTES:
                    if (group := next(groups, None)) is None:
                        break
                    ahead.append((group, self._read(group, shape)))
                if not ahead:
                    return
                group, coming = ahead[0]
                blocks, seconds = await coming
                self._reading.record(len(blocks), seconds)
                for place, block in zip(group, blocks, strict=True):
                    if block is None:
                        self._spoiled(place)
                        return
                    self._hits += 1
                    metrics.TIER_HITS.labels(TIER).inc()
                    metrics.TIER_BYTES_IN.labels(TIER).inc(len(block.payload))
                    yield block
                self._read_errors = 0
                ahead.popleft()
        except OSError as error:
            self._failed_read(ahead[0][0], error)
        finally:
            for _, coming in ahead:
                if not coming.cancel() and not coming.cancelled():
                    coming.exception()  # nobody waits for it any more

    def _read(self, group: Sequence[RecordPlace], shape: BlockShape) -> asyncio.Future[_Read]:
        segment = group[0].segment
        wanted = [(place.record, place.name) for place in group]

        def read() -> _Read:
            begin = time.perf_counter()
            return _Read(self._files.read(segment, wanted, shape), time.perf_counter() - begin)

        return asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _failed_read(self, group: Sequence[RecordPlace], error: OSError) -> None:
        segment = group[0].segment
        metrics.TIER_FAILED.labels(TIER, "gone" if error.errno == errno.ENOENT else "error").inc()
        if error.errno == errno.ENOENT:
            self._index.remove(segment)
            self._set_gauges()
            return
        log.warning("the SSD did not return blocks", extra={"error": str(error)})
        for place in group:
            self._index.drop(place)
        self._read_errors += 1
        if self._read_errors >= READ_ERRORS_IN_A_ROW:
            self._lose(str(error))

    def _spoiled(self, place: RecordPlace) -> None:
        """The record is not what was written: torn by a crash, or spoilt since."""
        metrics.TIER_SPOILED.labels(TIER).inc()
        log.warning("block on the SSD with a wrong checksum", extra={"path": str(self._files.path(place.segment))})
        self._index.drop(place)


def _groups(places: Sequence[RecordPlace]) -> Iterator[list[RecordPlace]]:
    """Neighbours in the chain that lie in one file, `GROUP_BYTES` of them at the most."""
    group: list[RecordPlace] = []
    for place in places:
        full = group and len(group) * place.segment.record_bytes >= GROUP_BYTES
        if group and (full or place.segment is not group[0].segment):
            yield group
            group = []
        group.append(place)
    if group:
        yield group
