"""Does transfers: maps the arena that each names, and copies chunk by chunk. Knows no bus, and no order of things."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client import Counter, Histogram

from kvstore.arena.mapped_arena import ArenaError, MappedArena
from kvstore.arena.shared_bandwidth import BandwidthShare
from kvstore.core.layout import file_name
from services.worker.kv.copier import BoundCopier, Copied, RankKvCache, TransferChunk
from services.worker.kv.pages import PagePrefault
from services.worker.kv.rank_heads import RankHeads
from shared.ids import ArenaId
from shared.messages.worker import Transfer
from shared.telemetry.metrics import service_registry

CHUNK_BYTES = 4 << 20
"""Copied between two looks at whether to go on: a millisecond's work or less."""

STOP_CHECK_SECONDS = 0.02
"""Between two looks at whether to stop, while a copy waits for its share of the bandwidth."""

Outcome = Literal["done", "failed", "late", "stopped"]
"""late: a lease ended before the copy under it did, as the machine is slow or a process died. Its slots have other
generations since, so that nothing of another's was written or believed: a saved block is missing in the store, one to
load is computed."""

_log = logging.getLogger(__name__)

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

METRICS = service_registry("worker")
TRANSFERS = Counter(
    "baton_worker_transfers_total",
    "Finished transfers to and from the KV store.",
    ["kind", "outcome"],
    registry=METRICS,
)
TRANSFERRED = Counter(
    "baton_worker_transferred_bytes_total", "Bytes of KV blocks that this rank has copied.", ["kind"], registry=METRICS
)
COPY_WAITS = Counter(
    "baton_worker_transfer_wait_seconds_total",
    "Seconds that copies waited for their share of kv-bandwidth.",
    ["kind"],
    registry=METRICS,
)
TRANSFER_SECONDS = Histogram(
    "baton_worker_transfer_seconds",
    "Seconds of one transfer, without waiting.",
    ["kind"],
    buckets=_BUCKETS,
    registry=METRICS,
)


def record_transfer(kind: str, outcome: str, copied: int, seconds: float) -> None:
    """Counts a transfer that is over: `copied` bytes of this rank's share, in so many seconds."""
    TRANSFERS.labels(kind, outcome).inc()
    TRANSFERRED.labels(kind).inc(copied)
    TRANSFER_SECONDS.labels(kind).observe(seconds)


class BrokenTransfer(Exception):
    """A transfer that names blocks which the rank has not: a bug of whoever made it."""


class TransferFailed(Exception):
    """A transfer for which the store's side lacks something; the text says what."""

    outcome: Outcome = "failed"


class LateCopy(TransferFailed):
    """The transfer came too late: a slot is no longer reserved or pinned for it."""

    outcome = "late"


class Transfers:
    """Owns the mapping of the arena that the newest transfer named. Used from one thread."""

    def __init__(self, share: RankKvCache, directory: Path) -> None:
        self._share = share
        self._directory = directory
        self._bound: tuple[MappedArena, BoundCopier] | None = None
        self._bytes_of_block = 0
        self._pages = PagePrefault(share)
        self._mapping = self._map_found()
        self._bandwidth = BandwidthShare(directory)

    def prepare(self) -> bool:
        """Does a little of what would cost the next transfers time; whether there was anything to do."""
        if next(self._mapping, False):
            return True
        if not self._pages.left:
            return False
        self._pages.provide_some()
        return True

    def run(self, transfer: Transfer, stopped: Callable[[], bool]) -> Outcome:
        """Copies until all is done, something fails, or `stopped` says so. Raises BrokenTransfer."""
        whole = self._checked(transfer)
        begun = time.perf_counter()
        try:
            outcome = self._run(transfer, whole, stopped)
        except (OSError, ArenaError, TransferFailed) as error:
            outcome = error.outcome if isinstance(error, TransferFailed) else "failed"
            level = logging.INFO if outcome == "late" else logging.WARNING
            _log.log(level, "%s %d %s: %s", transfer.kind, transfer.number, outcome, error)
        self._pages.used(int(whole.blocks.max(initial=0)))
        copied = len(whole.blocks) * self._bytes_of_block if outcome == "done" else 0
        record_transfer(transfer.kind, outcome, copied, time.perf_counter() - begun)
        return outcome

    def close(self) -> None:
        """Lets go of the arena."""
        if self._bound is not None:
            self._bound[1].close()
            self._bound = None

    def _run(self, transfer: Transfer, whole: TransferChunk, stopped: Callable[[], bool]) -> Outcome:
        if transfer.kind == "save" and not self._share.writes:
            return "done"
        arena, copier = self._bound_to(transfer)
        if len(whole.slots) and int(whole.slots.max()) >= arena.slots:
            raise TransferFailed(f"slot {whole.slots.max()} of {arena.slots}")
        copy = copier.save if transfer.kind == "save" else copier.load
        for chunk in _chunks(whole, max(1, CHUNK_BYTES // self._bytes_of_block)):
            self._await_share(transfer.kind, len(chunk.blocks) * self._bytes_of_block, stopped)
            if stopped():
                return "stopped"
            _require_all(copy(chunk))
        return "done"

    def _await_share(self, kind: str, size: int, stopped: Callable[[], bool]) -> None:
        """Waits until so many bytes may be copied, beside what others of this host copy, or until `stopped`."""
        wait = self._bandwidth.take(size)
        if wait <= 0.0:
            return
        COPY_WAITS.labels(kind).inc(wait)
        until = time.perf_counter() + wait
        while (left := until - time.perf_counter()) > 0.0 and not stopped():
            time.sleep(min(left, STOP_CHECK_SECONDS))

    def _checked(self, transfer: Transfer) -> TransferChunk:
        blocks = np.frombuffer(transfer.blocks, dtype="<u4")
        slots = np.frombuffer(transfer.slots, dtype="<u4")
        generations = np.frombuffer(transfer.generations, dtype="<u8")
        if not len(blocks) == len(slots) == len(generations):
            raise BrokenTransfer(f"{len(blocks)} blocks, {len(slots)} slots, {len(generations)} generations")
        if len(blocks) and int(blocks.max()) >= self._share.num_blocks:
            raise BrokenTransfer(f"block {blocks.max()} of {self._share.num_blocks}")
        return TransferChunk(blocks.astype(np.int32), slots.astype(np.uint32), generations.astype(np.uint64))

    def _bound_to(self, transfer: Transfer) -> tuple[MappedArena, BoundCopier]:
        path = self._directory / transfer.path
        if self._bound is not None and (self._bound[0].path, self._bound[0].arena) == (path, transfer.arena):
            return self._bound
        if path.parent != self._directory:
            raise TransferFailed(f"{transfer.path!r} is no file of the store's directory")
        arena, copier, _ = self._bind(path, transfer.arena)
        return arena, copier

    def _map_found(self) -> Iterator[Literal[True]]:
        """Maps what other processes have left, or this one's predecessor, chunk by chunk: whoever asks for it first is
        served as fast as those that follow."""
        try:
            arena, _, heads = self._bind(self._directory / file_name(self._share.layout), None)
            for _ in heads.map_committed(max(1, CHUNK_BYTES // self._bytes_of_block)):
                yield True
                if self._bound is None or self._bound[0] is not arena:
                    return
        except (OSError, ArenaError, TransferFailed) as error:
            _log.info("arenas are not mapped in advance: %s", error)

    def _bind(self, path: Path, wanted: ArenaId | None) -> tuple[MappedArena, BoundCopier, RankHeads]:
        """Lets go of any other arena. Raises OSError, ArenaError, TransferFailed."""
        self.close()
        arena = MappedArena.open(path, wanted)
        if arena.layout != self._share.layout:
            raise TransferFailed(f"{path} holds {arena.layout}, this rank {self._share.layout}")
        share = self._share
        heads = RankHeads(arena, share.first_head, share.num_heads, share.first_layer, share.num_layers)
        self._bytes_of_block = heads.bytes_of_slot
        copier = share.copier.bind(heads)
        self._bound = arena, copier
        return arena, copier, heads


def _chunks(whole: TransferChunk, count: int) -> Iterator[TransferChunk]:
    for first in range(0, len(whole.blocks), count):
        part = slice(first, first + count)
        yield TransferChunk(whole.blocks[part], whole.slots[part], whole.generations[part])


def _require_all(copied: Copied) -> None:
    match copied:
        case "all":
            return
        case "other generation":
            raise LateCopy("its lease has ended, and a slot is another block's or rests; nothing of that was touched")
        case "other checksum":
            raise TransferFailed("a slot has another checksum than it should have")
