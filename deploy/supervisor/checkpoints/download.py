"""Fetches a model's files from several hosts at once, each chunk checked before it counts as there.

What a former try left is not believed but read and checked; so nothing has to be written down on the way. A host that
goes silent, ends a connection or sends a wrong chunk gets the rest of its work taken away, and after a few times in a
row none any more. In memory there is one chunk for each connection.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.supervisor.checkpoints.manifest import (
    CHUNK_BYTES,
    CheckpointFile,
    CheckpointManifest,
    Progress,
    chunk_digests,
)
from deploy.supervisor.checkpoints.peers import OtherModel, PeerAddress, PeerBusy, PeerConnection, PeerFailed

log = logging.getLogger(__name__)

CONNECTIONS_PER_PEER = 2
RUN_CHUNKS = 4
"""Asked for at once: enough that the way there and back does not count, few enough to be fetched from another host."""
MAX_FAILURES = 3
"""In a row, after which a host is asked no more."""
RETRY_SECONDS = 0.5
BUSY_SECONDS = 300.0
"""That a host may take to read its own model before it sends it."""
REPORT_EVERY = 2.0


class DownloadFailed(Exception):
    """The files are not all here. What is here stays, for the next try; the text names each host's last problem."""


class _Run(NamedTuple):
    file: int
    first: int
    length: int


class _ModelSender:
    """What became of one host. Guarded by the download's lock."""

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self.failures = 0
        self.bytes = 0
        self.problem: str | None = None
        self.gave_up = False


class CheckpointDownload:
    """Owns the files of one download, its threads, and what is still to be fetched."""

    def __init__(
        self, folder: Path, manifest: CheckpointManifest, peers: Sequence[PeerAddress], tls: ssl.SSLContext
    ) -> None:
        self._folder, self._manifest, self._tls = folder, manifest, tls
        self._peers = [_ModelSender(each) for each in peers]
        self._queue: deque[_Run] = deque()
        self._in_flight = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._files: list[int] = []
        self.found = 0
        """Bytes that were there, and right, before anything was fetched."""
        self.fetched = 0

    @property
    def bytes_from(self) -> dict[str, int]:
        """Bytes of sound chunks, by the host that they came from."""
        return {str(each.address): each.bytes for each in self._peers}

    def run(self, report: Progress) -> None:
        """Returns when all files are there and checked. Raises DownloadFailed, OSError."""
        try:
            for number, file in enumerate(self._manifest.files):
                self._open(number, file)
            self._fetch_all(report)
        finally:
            for each in self._files:
                os.close(each)

    def _open(self, number: int, file: CheckpointFile) -> None:
        path = self._folder / file.name
        missing = list(range(file.chunks))
        if path.exists():
            digests = chunk_digests(path, file.size)
            missing = [chunk for chunk, digest in enumerate(digests) if digest != file.digest(chunk)]
        opened = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        self._files.append(opened)
        os.truncate(opened, file.size)
        self.found += file.size - sum(map(file.chunk_size, missing))
        for chunk in missing:
            last = self._queue[-1] if self._queue else None
            if (
                last is not None
                and (last.file, last.first + last.length) == (number, chunk)
                and last.length < RUN_CHUNKS
            ):
                self._queue[-1] = last._replace(length=last.length + 1)
            else:
                self._queue.append(_Run(number, chunk, 1))

    def _fetch_all(self, report: Progress) -> None:
        threads = [
            threading.Thread(target=self._work, args=(peer,), name=f"fetch-{peer.address}", daemon=True)
            for peer in self._peers
            for _ in range(CONNECTIONS_PER_PEER)
        ]
        for thread in threads:
            thread.start()
        try:
            began = time.monotonic()
            for thread in threads:
                while thread.is_alive():
                    thread.join(REPORT_EVERY)
                    if thread.is_alive():
                        report(self._words(began))
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        if self._queue:
            why = "; ".join(f"{each.address}: {each.problem or 'nothing'}" for each in self._peers)
            raise DownloadFailed(f"{self._words(began)}; no host sends the rest ({why})")

    def _words(self, began: float) -> str:
        rate = self.fetched / max(time.monotonic() - began, 1e-3)
        there, peers = self.found + self.fetched, sum(not each.gave_up for each in self._peers)
        return f"{there / 2**20:.0f} of {self._manifest.size / 2**20:.0f} MiB, {rate / 1e6:.0f} MB/s from {peers} hosts"

    # ---- on the threads

    def _work(self, peer: _ModelSender) -> None:
        connection = PeerConnection(peer.address, self._tls)
        busy_until = time.monotonic() + BUSY_SECONDS
        try:
            while (run := self._next(peer)) is not None:
                left = run
                try:
                    for chunk in connection.chunks(self._manifest.files[run.file], run.first, run.length):
                        if not chunk.is_sound:
                            raise PeerFailed(
                                f"chunk {chunk.number} of {self._manifest.files[run.file].name} is not sound"
                            )
                        self._write(run.file, chunk.number, chunk.data)
                        left = left._replace(first=left.first + 1, length=left.length - 1)
                        self._record_chunk(peer, len(chunk.data))
                except (PeerFailed, OtherModel, OSError) as error:
                    connection.close()
                    self._record_failure(peer, error, patient=time.monotonic() < busy_until)
                finally:
                    self._give_back(left)
        finally:
            connection.close()

    def _next(self, peer: _ModelSender) -> _Run | None:
        """What to fetch next; None where nothing is left, or nothing more is asked of this host."""
        with self._changed:
            while not (self._stopped or peer.gave_up):
                if self._queue:
                    self._in_flight += 1
                    return self._queue.popleft()
                if not self._in_flight:
                    break
                self._changed.wait(1.0)  # what others have under way may come back
            return None

    def _write(self, file: int, chunk: int, data: memoryview) -> None:
        at = chunk * CHUNK_BYTES
        while data:
            written = os.pwrite(self._files[file], data, at)
            at, data = at + written, data[written:]

    def _record_chunk(self, peer: _ModelSender, size: int) -> None:
        with self._changed:
            peer.failures = 0
            peer.bytes += size
            self.fetched += size

    def _record_failure(self, peer: _ModelSender, error: Exception, *, patient: bool) -> None:
        with self._changed:
            peer.problem = str(error)
            if isinstance(error, PeerBusy) and patient:
                self._changed.wait(RETRY_SECONDS)
                return
            peer.failures += 1
            if peer.failures >= MAX_FAILURES or not isinstance(error, PeerFailed):
                peer.gave_up = True
                log.warning("host is asked no more", extra={"host": str(peer.address), "problem": peer.problem})
            elif not peer.gave_up:
                self._changed.wait(RETRY_SECONDS)

    def _give_back(self, left: _Run) -> None:
        with self._changed:
            self._in_flight -= 1
            if left.length:
                self._queue.append(left)
            self._changed.notify_all()
