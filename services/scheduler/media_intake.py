"""Has the rows of images on this host before the core gets their request, and holds them until it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler import metrics
from shared import topics
from shared.bus import Bus
from shared.ids import EngineId, InstanceId, RequestId, RowsName
from shared.media.rows_folder import NoRoom, RowsFolder
from shared.media.rows_reader import PIECE_BYTES, RowsLost, read_rows
from shared.messages.encoder import ReadRows, RowsPiece
from shared.messages.gateway import RequestFailed, RowsMissing
from shared.messages.generation import MediaRows, PromptEmbeds
from shared.messages.scheduler import GenerateRequest

log = logging.getLogger(__name__)

ROOM_TIMEOUT = 120.0
"""Seconds that a request waits for room that the rows of others have."""


class RowsMemory(NamedTuple):
    """Where an engine has rows, and how many bytes of them."""

    root: Path | None = None
    """The folder of the host's folders of rows; None: the engine has one of its own."""
    max_bytes: int = 2**30


@dataclass(slots=True)
class _HeldRows:
    size: int
    users: int = 0


class MediaIntake:
    """Owns the engine's folder of rows: links to files of encoders of this host, copies of what is on others.

    Rows of the engine's requests have `max_bytes` at most. Whose rows find no room, or are fetched, waits here, in the
    order of arrival, as the core is to know nothing of files.
    """

    def __init__(
        self,
        bus: Bus,
        engine: EngineId,
        memory: RowsMemory,
        admit: Callable[[GenerateRequest], Awaitable[None]],
    ) -> None:
        """`admit`: is given a request whose rows are here."""
        self._bus, self._root, self._max_bytes = bus, memory.root, memory.max_bytes
        self._engine = engine
        self._admit = admit
        self._folder: RowsFolder | None = None
        self._held: dict[RowsName, _HeldRows] = {}
        self._users: dict[RequestId, tuple[RowsName, ...]] = {}
        self._arriving: dict[RequestId, GenerateRequest] = {}
        """Requests that wait here, in their order."""
        self._arrived = asyncio.Event()
        self._changed = asyncio.Event()
        self.bytes_used = 0

    def __len__(self) -> int:
        return len(self._arriving)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._arriving

    def take(self, generate: GenerateRequest) -> GenerateRequest | None:
        """The request with the files of its rows, where they are on this host and there is room; else it waits here,
        until `admit` gets it, or it fails. One without such rows is given back as it is."""
        embeds = generate.generation.prompt_embeds
        if embeds is None or not embeds.media:
            return generate
        if not self._arriving and (held := self._hold(generate, embeds)) is not None:
            return held
        self._arriving[generate.generation.request] = generate
        self._arrived.set()
        return None

    def cancel(self, request: RequestId) -> None:
        """A request that waits here is wanted no longer."""
        self._arriving.pop(request, None)

    def release_ended(self, requests: Collection[RequestId]) -> None:
        """Lets rows go that none of these, the engine's, has."""
        for request in [each for each in self._users if each not in requests and each not in self._arriving]:
            for name in self._users.pop(request):
                held = self._held[name]
                held.users -= 1
                if not held.users:
                    self._forget(name)
            self._changed.set()
        metrics.ROWS_BYTES.set(self.bytes_used)

    def piece(self, request: ReadRows) -> RowsPiece:
        """For ranks on other hosts."""
        if request.name not in self._held:
            return RowsPiece(b"", released=True)
        return RowsPiece(self._opened().piece(request.name, request.start, PIECE_BYTES))

    async def run(self) -> None:
        """Fetches rows, one request after the other, until it is cancelled. Raises what `admit` raises."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._arriving:
                request = next(iter(self._arriving))
                generate = self._arriving[request]
                try:
                    held = await self._fetch(generate)
                except (RowsLost, NoRoom) as error:
                    log.warning("rows lost", extra={"request": request, "reason": str(error)})
                    if self._arriving.pop(request, None) is not None:
                        await self._fail(generate, f"rows of an image: {error}")
                    continue
                if request in self._arriving:  # it was not cancelled meanwhile
                    await self._admit(held)
                    self._arriving.pop(request, None)

    def close(self) -> None:
        """Nobody needs the rows any more."""
        if self._folder is not None:
            for name in list(self._held):
                self._forget(name)
            self._folder.close()

    async def _fetch(self, generate: GenerateRequest) -> GenerateRequest:
        """Raises RowsLost, NoRoom."""
        embeds = generate.generation.prompt_embeds
        assert embeds is not None, "only who has rows waits"
        end = time.monotonic() + ROOM_TIMEOUT
        while not self._fits(embeds):
            if (left := end - time.monotonic()) <= 0 or not self._users:
                raise NoRoom(f"{_size(embeds)} bytes find no room in {self._max_bytes}, rows_memory of the scheduler")
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
        for each in embeds.kept:
            size, folder = each.count * embeds.row_bytes, self._opened()
            if not self._here(each, size):
                rows = await read_rows(self._bus, topics.kept_rows(each.owner), each.name, size)
                await asyncio.to_thread(folder.put, each.name, rows)
                metrics.ROWS_FETCHED.inc(size)
        held = self._hold(generate, embeds)
        if held is None:
            raise RowsLost("they were removed")
        return held

    async def _fail(self, generate: GenerateRequest, reason: str) -> None:
        """One that the core has never seen."""
        generation = generate.generation
        inbox = topics.gateway_inbox(generation.gateway)
        await self._bus.publish(inbox, RowsMissing(generation.request), confirm=True)
        await self._bus.publish(inbox, RequestFailed(generation.request, generation.attempt, reason), confirm=True)

    def _hold(self, generate: GenerateRequest, embeds: PromptEmbeds) -> GenerateRequest | None:
        """The request with the files of its rows; None where some are not here, or there is no room."""
        if not self._fits(embeds) or not all(self._here(each, each.count * embeds.row_bytes) for each in embeds.kept):
            return None
        generation = generate.generation
        if generation.request not in self._users:
            self._users[generation.request] = tuple(each.name for each in embeds.kept)
            for each in embeds.kept:
                self._count(each.name, each.count * embeds.row_bytes)
        folder = self._opened()
        media = tuple(
            each if each is None else replace(each, path=str(folder.file_of(each.name))) for each in embeds.media
        )
        return replace(generate, generation=replace(generation, prompt_embeds=replace(embeds, media=media)))

    def _count(self, name: RowsName, size: int) -> None:
        held = self._held.setdefault(name, _HeldRows(size))
        if not held.users:
            self.bytes_used += size
        held.users += 1

    def _fits(self, embeds: PromptEmbeds) -> bool:
        new = {each.name: each.count * embeds.row_bytes for each in embeds.kept if each.name not in self._held}
        return self.bytes_used + sum(new.values()) <= self._max_bytes

    def _here(self, rows: MediaRows, size: int) -> bool:
        """Whether rows are in the engine's folder, or can be linked to it."""
        folder = self._opened()
        if folder.has(rows.name, size):
            return True
        return self._root is not None and folder.link(rows.name, self._root / rows.owner / rows.name.hex(), size)

    def _forget(self, name: RowsName) -> None:
        self.bytes_used -= self._held.pop(name).size
        self._opened().remove(name)

    def _opened(self) -> RowsFolder:
        """Made with the first rows: most models take no images. What a former scheduler of this name left goes."""
        if self._folder is None:
            self._folder = RowsFolder(None if self._root is None else self._root / InstanceId(self._engine))
            for name in self._folder.found():
                self._folder.remove(name)
        return self._folder


def _size(embeds: PromptEmbeds) -> int:
    return sum(each.count for each in embeds.kept) * embeds.row_bytes
