"""Stored conversations: items in the order in which they were added. They lie in the database, so any gateway goes on
with them, and each belongs to the API key that made it.

The record of a conversation says which number its next addition has. Whoever adds replaces the record first, and so
has that number alone; then the items are written, all in one transaction. What a response adds keeps its number for
the gateway that takes the response up, so that it is added once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, abbreviated, invalid
from services.gateway.api.responses.conversation import conversation_object
from services.gateway.api.responses.input_items import Item
from services.gateway.api.responses.written_items import WrittenItem, written_items
from services.gateway.database.oldest_first import Additions
from services.gateway.database.records import CHUNK_BYTES, Database, Record, RecordLimits, RecordUnknown

log = logging.getLogger(__name__)

CONVERSATIONS = "conversation"
MAX_ITEMS = 10_000
MAX_BYTES = 64 * 2**20
"""Of one conversation, deleted items included."""
MAX_RECENT = 32
"""Responses of which it is known that they were added."""
PIECES = 4096
"""Chunks that one addition may have: its positions are its number times this, and following ones."""


class ConversationLimits(NamedTuple):
    """What one API key may keep."""

    conversations: int
    size: int
    """Bytes."""
    seconds: float
    """From its last addition on."""


class StoredConversation(Struct, frozen=True, kw_only=True):
    """What a record says."""

    metadata: dict[str, str] = {}
    additions: int = 0
    """Number of the next one."""
    items: int = 0
    """That were added."""
    deleted: dict[str, int] = {}
    """Ids of items; of each the number of the first addition that may have it again."""
    recent: dict[str, int] = {}
    """Numbers of what the last responses have added."""


class ConversationObject(NamedTuple):
    """A conversation and its record."""

    record: Record
    stored: StoredConversation

    def body(self) -> dict[str, Any]:
        """OpenAI's conversation object."""
        return conversation_object(self.record.id, self.record.created, self.stored.metadata)


_decoder = msgspec.json.Decoder(StoredConversation)


class ConversationStore:
    """Reads and writes conversations; all state is the database's. Its operations raise DatabaseUnavailable."""

    def __init__(self, database: Database, limits: ConversationLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._database, self._limits, self._clock = database, limits, clock
        self._additions = Additions()

    async def create(self, owner: str, items: list[Item], metadata: dict[str, str]) -> ConversationObject:
        """A new conversation. Raises RequestError 400 where the key has too many, or too much."""
        now = self._clock()
        record = Record(
            kind=CONVERSATIONS,
            id=f"conv_{secrets.token_hex(24)}",
            owner=owner,
            created=now,
            expires=now + self._limits.seconds,
            value=msgspec.json.encode(StoredConversation(metadata=metadata)),
        )
        limits = RecordLimits(self._limits.conversations, self._limits.size - 1)  # one byte at least is to be added
        usage = await self._database.insert_within(record, limits)
        if usage is not None and usage.records >= limits.records:
            text = f"{usage.records} conversations are kept for this key, which is the limit; delete some"
            raise RequestError(400, text, code="too_many_conversations")
        if usage is not None:
            raise self._too_much(usage.size)
        if items:
            await self.add(record.id, owner, items)
        return await self.get(record.id, owner)

    async def get(self, id: str, owner: str) -> ConversationObject:
        """One of the owner's conversations. Raises RequestError 404."""
        record = await self._database.get(CONVERSATIONS, id)
        if record is None or record.owner != owner:
            raise _unknown(id)
        return ConversationObject(record, _decoder.decode(record.value))

    async def set_metadata(self, id: str, owner: str, metadata: dict[str, str]) -> ConversationObject:
        """The conversation with other metadata. Raises RequestError 404."""
        return await self._change(id, owner, lambda stored: replace(stored, metadata=metadata))

    async def delete(self, id: str, owner: str) -> None:
        """Forgets it, with its items. Raises RequestError 404."""
        await self.get(id, owner)
        await self._database.delete(CONVERSATIONS, id)

    async def items(self, id: str, owner: str) -> list[WrittenItem]:
        """All its items, the oldest first. Raises RequestError 404."""
        found = await self.get(id, owner)
        deleted = found.stored.deleted
        chunks: list[tuple[int, bytes]] = []
        while more := await self._database.chunks(CONVERSATIONS, id, chunks[-1][0] if chunks else -1):
            chunks += more
        items: list[WrittenItem] = []
        for number, pieces in groupby(chunks, lambda chunk: chunk[0] // PIECES):
            added = await written_items(b"".join(data for _, data in pieces))
            items += [item for item in added if number >= deleted.get(item.id, 0)]
            await asyncio.sleep(0)  # others have their turn: an addition may have megabytes
        return items

    async def item(self, id: str, owner: str, item_id: str) -> WrittenItem:
        """One item. Raises RequestError 404."""
        for item in await self.items(id, owner):
            if item.id == item_id:
                return item
        text = f"Item with id {abbreviated(item_id)} not found in conversation {abbreviated(id)}."
        raise RequestError(404, text, param="item_id")

    async def delete_item(self, id: str, owner: str, item_id: str) -> ConversationObject:
        """The conversation without this item. Raises RequestError 404."""
        await self.item(id, owner, item_id)
        return await self._change(
            id, owner, lambda stored: replace(stored, deleted={**stored.deleted, item_id: stored.additions})
        )

    async def check_room(self, id: str, owner: str) -> int:
        """Returns the bytes that it has. Raises RequestError: 404 where it is not there, 400 where it is full."""
        found = await self.get(id, owner)
        _check_bounds(found.stored.items + 1, found.record.size)
        return found.record.size

    async def add(self, id: str, owner: str, items: Sequence[Item | msgspec.Raw], response: str | None = None) -> None:
        """Adds items; those of a `response` once. Raises RequestError: 404 where it is not there, 400 where it, or all
        that the key has, becomes too much."""
        encoded, number = msgspec.json.encode(items), 0
        if self._additions.begin(owner, len(encoded)):
            self._check_size((await self._database.usage(CONVERSATIONS, owner)).size)
            self._additions.looked(owner)
        self._additions.end(owner)

        def numbered(stored: StoredConversation) -> StoredConversation:
            nonlocal number
            if response is not None and response in stored.recent:
                number = stored.recent[response]
                return stored
            _check_bounds(stored.items + len(items), 0)
            number, recent = stored.additions, stored.recent
            if response is not None:
                recent = dict([*recent.items(), (response, number)][-MAX_RECENT:])
            return replace(stored, additions=number + 1, items=stored.items + len(items), recent=recent)

        await self._change(id, owner, numbered, len(encoded))
        starts = range(0, len(encoded), CHUNK_BYTES)
        chunks = {PIECES * number + i: encoded[start : start + CHUNK_BYTES] for i, start in enumerate(starts)}
        try:
            await self._database.add_chunks(CONVERSATIONS, id, chunks)
        except RecordUnknown:
            raise _unknown(id) from None

    async def _change(
        self, id: str, owner: str, change: Callable[[StoredConversation], StoredConversation], size: int = 0
    ) -> ConversationObject:
        """Writes the conversation with a change, over what others write meanwhile, too. `size`: bytes that an addition
        has."""
        while True:
            record, stored = await self.get(id, owner)
            changed = change(stored)
            if changed is stored:
                return ConversationObject(record, stored)
            if size:
                _check_bounds(0, record.size + size)
            written = await self._database.replace(
                record.changed(
                    value=msgspec.json.encode(changed),
                    size=record.size + size,
                    expires=self._clock() + self._limits.seconds,
                )
            )
            if written is not None:
                return ConversationObject(written, changed)

    def _check_size(self, size: int) -> None:
        if size >= self._limits.size:
            raise self._too_much(size)

    def _too_much(self, size: int) -> RequestError:
        text = f"{size} bytes of conversations are kept for this key, of {self._limits.size}; delete some"
        return RequestError(400, text, code="storage_exceeded")


def _check_bounds(items: int, size: int) -> None:
    """Raises RequestError 400 where a conversation of so many items and bytes is too large."""
    if items > MAX_ITEMS:
        raise invalid("conversation", f"it would have {items} items; at most {MAX_ITEMS} are allowed, deleted ones too")
    if size > MAX_BYTES:
        raise invalid("conversation", f"it would have {size} bytes; at most {MAX_BYTES} are allowed")


def _unknown(id: str) -> RequestError:
    return RequestError(404, f"Conversation with id {abbreviated(id)} not found.", param="conversation_id")
