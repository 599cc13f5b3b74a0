"""Stored chats: what a chat was asked, and what was answered. They lie in the database, so any gateway finds them, and
each belongs to the API key that asked for it.

A record says little, as lists look through many of them. Its contents are the answer's JSON, then that of each message;
one chunk behind them says how long each message is, so that a page of messages is read without the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, abbreviated, not_allowed
from services.gateway.api.fields.stored_chat import ChatToStore
from services.gateway.database.oldest_first import OldestFirst
from services.gateway.database.records import (
    CHUNK_BYTES,
    READ_BYTES,
    Database,
    Hold,
    Record,
    RecordLimits,
    RecordUnknown,
)

CHATS = "chat"
SIZES = 2**20
"""Position of the chunk with the sizes of the messages, behind all contents."""
MAX_PAGE_BYTES = 16 * 2**20
"""Bytes of the objects on a page: one that would go beyond is the next page's first, unless it is alone."""
MAX_SCANNED = 10_000
"""Chats that one list looks at where it filters, and has found something: what it has not is where clients go on from.
All that a key has are no more than are kept for it."""
SCANNED_AT_ONCE = 500


class ChatLimits(NamedTuple):
    """What one API key may keep; the oldest go first."""

    chats: int
    size: int
    """Bytes."""
    seconds: float


class StoredChat(Struct, frozen=True, kw_only=True):
    """What a record says."""

    model: str
    metadata: dict[str, str]
    answer_size: int
    messages: int


class ChatPage(NamedTuple):
    """Objects of a list, and whether there are more behind them."""

    objects: list[Raw]
    ids: list[str]
    more: bool


class ChatFilter(NamedTuple):
    """Which chats a list shows."""

    model: str | None = None
    metadata: Mapping[str, str] = {}

    def allows(self, stored: StoredChat) -> bool:
        """Returns whether it shows this one."""
        named = self.model is None or stored.model == self.model
        return named and self.metadata.items() <= stored.metadata.items()


_decoder = msgspec.json.Decoder(StoredChat)
_sizes = msgspec.json.Decoder(list[int])


class ChatStore:
    """Reads and writes stored chats. Its operations raise DatabaseUnavailable, and what `hold` does, which is asked for
    room for what they are to read."""

    def __init__(self, database: Database, limits: ChatLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._database, self._limits, self._clock = database, limits, clock
        self._oldest_first = OldestFirst(database, CHATS, RecordLimits(limits.chats, limits.size))

    async def insert(self, id: str, owner: str, model: str, asked: ChatToStore, answer: bytes) -> None:
        """Stores a chat. `answer`: the JSON of what the client gets."""
        answer = answer[:-1] + b"," + asked.repeated[1:]
        contents = b"".join([answer, *asked.messages])
        stored = StoredChat(model=model, metadata=asked.metadata, answer_size=len(answer), messages=len(asked.messages))
        now, value = self._clock(), msgspec.json.encode(stored)
        record = Record(
            kind=CHATS,
            id=id,
            owner=owner,
            created=now,
            expires=now + self._limits.seconds,
            value=value,
            size=len(value) + len(contents),
        )
        parts = range(0, len(contents), CHUNK_BYTES)
        chunks = {i: contents[start : start + CHUNK_BYTES] for i, start in enumerate(parts)}
        chunks[SIZES] = msgspec.json.encode(list(map(len, asked.messages)))
        await self._database.insert(record)
        try:
            await self._database.add_chunks(CHATS, id, chunks)
        except RecordUnknown:
            return  # deleted meanwhile
        await self._oldest_first.added(owner, record.size)

    async def get(self, id: str, owner: str, hold: Hold) -> Raw:
        """Returns one of the owner's chats. Raises RequestError 404."""
        record, stored = await self._find(id, owner)
        await hold(stored.answer_size)
        return await self._shown(record.id, stored)

    async def set_metadata(self, id: str, owner: str, metadata: dict[str, str], hold: Hold) -> Raw:
        """Returns the chat with other metadata. Raises RequestError 404."""
        while True:
            record, stored = await self._find(id, owner)
            await hold(stored.answer_size)
            changed = replace(stored, metadata=metadata)
            value = msgspec.json.encode(changed)
            size = record.size - len(record.value) + len(value)
            if await self._database.replace(record.changed(value=value, size=size)) is not None:
                return await self._shown(record.id, changed)

    async def delete(self, id: str, owner: str) -> None:
        """Forgets it. Raises RequestError 404."""
        await self._find(id, owner)
        await self._database.delete(CHATS, id)

    async def page(
        self, owner: str, wanted: ChatFilter, hold: Hold, *, limit: int, after: str | None, newest_first: bool
    ) -> ChatPage:
        """Returns a page of the owner's chats. Raises RequestError 400 where there is none of the id `after`."""
        page, size, scanned, begin = ChatPage([], [], more=False), 0, 0, after
        while scanned < MAX_SCANNED or not page.ids:
            try:
                records = await self._database.page(
                    CHATS, owner, limit=SCANNED_AT_ONCE, after=after, newest_first=newest_first
                )
            except RecordUnknown:
                if page.ids:
                    return page._replace(more=True)  # it was deleted meanwhile
                if scanned:
                    after, scanned = begin, 0
                    continue
                raise not_allowed("after", after, "the id of a stored chat is") from None
            for record in records:
                stored = _decoder.decode(record.value)
                if not wanted.allows(stored):
                    continue
                size += stored.answer_size
                if len(page.ids) == limit or (page.ids and size > MAX_PAGE_BYTES):
                    return page._replace(more=True)
                await hold(stored.answer_size)
                try:
                    page.objects.append(await self._shown(record.id, stored))
                except RequestError:
                    continue  # deleted meanwhile
                page.ids.append(record.id)
            if len(records) < SCANNED_AT_ONCE:
                return page
            after, scanned = records[-1].id, scanned + len(records)
        return page._replace(more=True)

    async def messages(
        self, id: str, owner: str, hold: Hold, *, limit: int, after: str | None, newest_first: bool
    ) -> ChatPage:
        """Returns a page of what a chat was asked. Raises RequestError: 404 where the chat is not there, 400 where it
        has no message `after`."""
        record, stored = await self._find(id, owner)
        order = range(stored.messages)
        if newest_first:
            order = order[::-1]
        ids = [f"{record.id}-{i}" for i in order]
        begin = 0
        if after is not None:
            if after not in ids:
                raise not_allowed("after", after, "the id of one of the messages is")
            begin = ids.index(after) + 1
        found = await self._database.chunks(CHATS, id, after=SIZES - 1)
        if not found:
            raise _unknown(id)
        sizes = _sizes.decode(found[0][1])
        starts = list(accumulate(sizes, initial=stored.answer_size))
        shown, size = list[int](), 0
        for i in order[begin : begin + limit]:
            size += sizes[i]
            if shown and size > MAX_PAGE_BYTES:
                break
            shown.append(i)
        await hold(sum(sizes[i] for i in shown))
        objects = await self._parts(id, [(starts[i], starts[i + 1]) for i in shown])
        named = [
            Raw(b'{"id":"%b",%b' % (f"{id}-{i}".encode(), data[1:])) for i, data in zip(shown, objects, strict=True)
        ]
        return ChatPage(named, [f"{id}-{i}" for i in shown], begin + len(shown) < len(ids))

    async def _find(self, id: str, owner: str) -> tuple[Record, StoredChat]:
        record = await self._database.get(CHATS, id)
        if record is None or record.owner != owner:
            raise _unknown(id)
        return record, _decoder.decode(record.value)

    async def _shown(self, id: str, stored: StoredChat) -> Raw:
        """A chat as clients see it."""
        [answer] = await self._parts(id, [(0, stored.answer_size)])
        return Raw(b'%b,"metadata":%b}' % (answer[:-1], msgspec.json.encode(stored.metadata)))

    async def _parts(self, id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of the contents, each from its first byte to behind its last; chunks without any are not read. Raises
        RequestError 404."""
        parts, begin, read = list[bytes](), 0, b""
        for start, end in sorted(places):
            if start >= begin + len(read):
                begin, read = start // CHUNK_BYTES * CHUNK_BYTES, b""
            else:  # what is before it is read, and not needed any more
                kept = start // CHUNK_BYTES * CHUNK_BYTES
                begin, read = kept, read[kept - begin :]
            while begin + len(read) < end:
                position = (begin + len(read)) // CHUNK_BYTES
                most = min(READ_BYTES, -(-end // CHUNK_BYTES) * CHUNK_BYTES - begin - len(read))
                found = await self._database.chunks(CHATS, id, after=position - 1, max_bytes=most)
                more = b"".join(data for place, data in found if place < SIZES)
                if not more:
                    raise _unknown(id)
                read += more
            parts.append(read[start - begin : end - begin])
        return parts if list(places) == sorted(places) else parts[::-1]


def _unknown(id: str) -> RequestError:
    return RequestError(404, f"Chat completion with id {abbreviated(id)} not found.", param="completion_id")
