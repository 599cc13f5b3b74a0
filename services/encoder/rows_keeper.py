"""Keeps rows in shared memory, where workers of this host read them; others ask for pieces."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from services.encoder import metrics
from services.encoder.core.row_table import ImageHash, RowTable, rows_name
from shared.ids import InstanceId, RowsName
from shared.media.rows_folder import NoRoom, RowsFolder, clear_dead
from shared.media.rows_reader import PIECE_BYTES
from shared.messages.encoder import ROWS_LEASE, ReadRows, RowsPiece
from shared.messages.generation import MediaRows, PromptEmbeds

log = logging.getLogger(__name__)

ROOM_TIMEOUT = 60.0
"""Seconds that rows wait for room that other requests' rows have."""
ROOM_INTERVAL = 0.2
CLEAR_INTERVAL = 30.0
"""Seconds between two looks at what dead processes left."""


class RowsUnkept(Exception):
    """There is no room for these rows; the text says why."""

    def __init__(self, message: str, *, ever: bool) -> None:
        """`ever`: whether there may be room later."""
        super().__init__(message)
        self.ever = ever


class RowsKeeper:
    """Owns an encoder's folder of rows, and what is known of them. Everything but `keep` is done at once."""

    def __init__(
        self, owner: InstanceId, root: Path | None, max_bytes: int, cache_bytes: int, lease: float = ROWS_LEASE
    ) -> None:
        """`root`: folder of the host's folders of rows; None: this one is the encoder's own. What a former process of
        this name left is leased as if it were new. Raises FolderTaken, OSError."""
        self._owner, self._root, self._lease = owner, root, lease
        self._max_bytes = max_bytes
        self._table = RowTable(max_bytes, cache_bytes, lease)
        self._folder = RowsFolder(None if root is None else root / owner)
        self._cleared_at = now = time.monotonic()
        for name, size in self._folder.found().items():
            self._table.keep(name, size, now, None, None)
        self._arrived = asyncio.Lock()
        """Held by who waits for room, so that those behind wait their turn."""

    def find(self, image: ImageHash) -> PromptEmbeds | None:
        """Where the rows of an image are kept, from now on for as long as a lease; None where they are not."""
        found = self._table.find(image, time.monotonic())
        if found is None:
            return None
        name, answer = found
        if not self._folder.has(name, answer.kept[0].count * answer.row_bytes):
            return None
        self._folder.renew(name)
        return answer

    async def keep(self, image: ImageHash, rows: PromptEmbeds) -> PromptEmbeds:
        """Keeps rows of an image in the order of the calls; what stands for them in messages. Raises RowsUnkept."""
        size = len(rows.rows)
        if not self._table.fits(size):
            raise RowsUnkept(f"the image has {size} bytes of rows; {self._max_bytes} are allowed", ever=False)
        name = await asyncio.to_thread(rows_name, rows)
        answer = replace(rows, rows=b"", media=(MediaRows(name, rows.count, self._owner),))
        if not self._folder.has(name, size) or not self._table.renew((name,), time.monotonic()):
            async with self._arrived:
                await self._put(name, rows.rows)
        self._table.keep(name, size, time.monotonic(), image, answer)
        self._measure()
        return answer

    async def _put(self, name: RowsName, rows: bytes) -> None:
        """Raises RowsUnkept."""
        end = time.monotonic() + ROOM_TIMEOUT
        while True:
            now, why = time.monotonic(), "what open requests need leaves no room for the image's rows"
            if (forgotten := self._table.make_room(len(rows), now)) is not None:
                self._remove(forgotten)
                try:
                    return await asyncio.to_thread(self._folder.put, name, rows)
                except NoRoom as error:
                    why = f"shared memory has no room for the image's rows ({error})"
                    self._remove(self._table.make_room(self._max_bytes, now) or ())
            if now >= end:
                raise RowsUnkept(why, ever=True)
            await asyncio.sleep(ROOM_INTERVAL)

    def renew(self, names: Iterable[RowsName]) -> None:
        """Open requests need these rows."""
        for name in self._table.renew(names, time.monotonic()):
            self._folder.renew(name)

    def forget(self) -> None:
        """No image is found any more; rows that nobody needs are removed."""
        self._remove(self._table.forget_images(time.monotonic()))
        self._measure()

    def piece(self, request: ReadRows) -> RowsPiece:
        """For who shares no memory with this process."""
        self.renew((request.name,))
        return RowsPiece(self._folder.piece(request.name, request.start, PIECE_BYTES))

    def tick(self) -> None:
        """Forgets what no lease and no cache holds, and clears folders of processes that are dead."""
        now = time.monotonic()
        self._remove(self._table.trim(now))
        self._measure()
        if self._root is not None and now - self._cleared_at > CLEAR_INTERVAL:
            self._cleared_at = now
            if removed := clear_dead(self._root, self._lease):
                log.info("rows of dead processes removed", extra={"count": removed})

    def close(self) -> None:
        """What is leased stays for those that need it, until another encoder or the end of the stack removes it."""
        self._folder.close()

    def _remove(self, names: Iterable[RowsName]) -> None:
        for name in names:
            self._folder.remove(name)

    def _measure(self) -> None:
        metrics.CACHE_BYTES.set(self._table.bytes_used)
