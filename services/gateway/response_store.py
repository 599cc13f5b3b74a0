"""Stored responses: what a response said, and all the items that it went on from. They lie in the database, so any
gateway finds them, and each belongs to the API key that asked for it."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, abbreviated, invalid
from services.gateway.api.responses.item_references import MAX_REFERENCED, response_of, unknown_item
from services.gateway.api.responses.written_items import joined, written_items
from services.gateway.conversations.conversation_store import ConversationLimits, ConversationStore
from services.gateway.database.oldest_first import OldestFirst
from services.gateway.database.records import (
    CHUNK_BYTES,
    Database,
    DatabaseUnavailable,
    Hold,
    Record,
    RecordLimits,
    RecordUnknown,
)

log = logging.getLogger(__name__)

KIND = "response"
ENDED = ("completed", "incomplete", "failed", "cancelled")
CONTINUED = ("completed", "incomplete")
"""What responses can be gone on from."""
EVENTS = 2**20
"""Position of the first event among a record's contents; the items come before."""

Response = dict[str, Any]
Event = dict[str, Any]


class ResponseLimits(NamedTuple):
    """What is kept for one API key; the oldest go first."""

    responses: int
    """0: nothing is stored."""
    size: int
    """Bytes."""
    seconds: float


class StoredResponse(Struct, frozen=True, kw_only=True):
    """What a record says."""

    response: Response
    items_size: int
    """Bytes of the items, which are the record's first contents."""
    body: str | None = None
    """The JSON that asked for it, without its input, where it runs in the background."""
    added: int = 0
    """How many of the items, the last ones, the request itself has brought."""
    seed: int = 0
    """By which it draws then."""
    attempts: int = 1
    """Gateways that have begun it."""

    @property
    def status(self) -> str:
        """OpenAI's status of a response."""
        status: str = self.response["status"]
        return status


class WrittenResponse(NamedTuple):
    """A stored response that is only passed on: read as objects it would take 0.3 s and many times its size for each
    MiB, as log-probabilities are."""

    json: bytes
    items_size: int
    in_background: bool

    @property
    def status(self) -> str:
        """OpenAI's status of a response."""
        return _status.decode(self.json).status

    @property
    def output(self) -> bytes:
        """Its items, a JSON array."""
        return bytes(_output.decode(self.json).output)


class _Status(Struct):
    status: str


class _Output(Struct):
    output: msgspec.Raw


class _Behind(Struct):
    """What a record says behind the response."""

    items_size: int
    body: str | None = None


_BEFORE, _BEHIND = b'{"response":', b',"items_size":'
"""What is around the response in a record. The latter stands nowhere behind it once more: quotes within a text have a
backslash before them."""
_status = msgspec.json.Decoder(_Status)
_output = msgspec.json.Decoder(_Output)
_behind = msgspec.json.Decoder(_Behind)
_decoder = msgspec.json.Decoder(StoredResponse)
_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class ResponseStore:
    """Reads and writes stored responses. Its operations raise RequestError: 503 where the database does not answer."""

    def __init__(self, database: Database, limits: ResponseLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self.database, self._limits, self._clock = database, limits, clock
        self.conversations = ConversationStore(database, ConversationLimits(*limits), clock)
        self._oldest_first = OldestFirst(database, KIND, RecordLimits(limits.responses, limits.size))

    def record(self, owner: str, stored: StoredResponse) -> Record:
        """Returns the record of a new response."""
        now, value = self._clock(), msgspec.json.encode(stored)
        return Record(
            kind=KIND,
            id=stored.response["id"],
            owner=owner,
            created=now,
            expires=now + self._limits.seconds,
            value=value,
            size=len(value) + stored.items_size,
        )

    async def insert(self, record: Record, items: bytes) -> None:
        """Stores a response with its items, a JSON array. Raises RequestError."""
        parts = range(0, len(items), CHUNK_BYTES)
        try:
            await self.database.insert(record)
            chunks = {i: items[start : start + CHUNK_BYTES] for i, start in enumerate(parts)}
            await self.database.add_chunks(KIND, record.id, chunks)
            await self._oldest_first.added(record.owner, record.size)
        except RecordUnknown:
            return  # deleted meanwhile
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None

    async def find(self, id: str, owner: str) -> tuple[Record, StoredResponse]:
        """Returns a response that `owner` has stored. Raises RequestError 404."""
        record = await self._record(id, owner)
        return record, _decoder.decode(record.value)

    async def written(self, id: str, owner: str, hold: Hold | None = None) -> WrittenResponse:
        """Returns a response that `owner` has stored, as it was written; `hold` is asked for room for it before it is
        read. Raises RequestError 404."""
        if hold is not None:
            try:
                await hold(await self.database.value_size(KIND, id))
            except DatabaseUnavailable as error:
                raise _unavailable(error) from None
        return _as_written(await self._record(id, owner))

    async def _record(self, id: str, owner: str) -> Record:
        try:
            record = await self.database.get(KIND, id)
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        if record is None or record.owner != owner:
            raise RequestError(404, f"Response with id {abbreviated(id)} not found.", param="response_id")
        return record

    async def items(self, id: str, stored: StoredResponse | WrittenResponse) -> bytes:
        """Returns all items that a response went on from, as a JSON array. Raises RequestError 404 where they are not
        all there."""
        parts = b""
        try:
            while len(parts) < stored.items_size:
                chunks = await self.database.chunks(KIND, id, after=-(-len(parts) // CHUNK_BYTES) - 1)
                found = b"".join(data for position, data in chunks if position < EVENTS)
                if not found:
                    break
                parts += found
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        if len(parts) < stored.items_size:
            raise RequestError(404, f"Response with id {abbreviated(id)} not found.", param="response_id")
        return parts[: stored.items_size]

    async def history(self, id: str, owner: str, hold: Hold) -> bytes:
        """Returns what goes on from a response begins with: its items and its output, as a JSON array; `hold` is asked
        for room for it first. Raises RequestError 400 where it is not known, or has not ended well."""
        field = "previous_response_id"
        try:
            record = await self._record(id, owner)
            stored = _as_written(record)
            await hold(len(record.value) + stored.items_size)
            items = await self.items(id, stored)
        except RequestError as error:
            if error.status != 404:
                raise
            text = f"{field}: Previous response with id {abbreviated(id)} not found."
            raise RequestError(400, text, param=field, code="previous_response_not_found") from None
        if stored.status not in CONTINUED:
            text = f"{field}: {abbreviated(id)} is {stored.status}; one that is completed or incomplete is allowed"
            raise RequestError(400, text, param=field)
        return joined(items, stored.output)

    async def referenced(self, ids: Sequence[str], owner: str, hold: Hold) -> bytes:
        """Returns stored items by their ids, as a JSON object; `hold` is asked for room for what is looked through.
        Raises RequestError: 404 where one is not there, 400 where too much is to be looked through for them."""
        found: dict[str, msgspec.Raw] = {}
        left = MAX_REFERENCED
        for response in dict.fromkeys(map(response_of, ids)):
            wanted = {id for id in ids if response_of(id) == response}
            if response is not None:
                left -= await self._find_items(response, owner, wanted, found, left, hold)
            if missing := wanted - found.keys():
                raise unknown_item(min(missing))
        return msgspec.json.encode(found)

    async def _find_items(
        self, response: str, owner: str, wanted: set[str], found: dict[str, msgspec.Raw], most: int, hold: Hold
    ) -> int:
        """Adds the items of a response that are `wanted` to `found`; how many bytes it has looked through for them."""
        try:
            record = await self._record(response, owner)
            stored = _as_written(record)
            output = await written_items(stored.output)
            found |= {item.id: item.json for item in output if item.id in wanted}
            all_found = wanted <= found.keys()
            size = len(record.value) + (0 if all_found else stored.items_size)
            if size > most:
                rule = f"the responses that are referred to have more than {MAX_REFERENCED} bytes"
                raise invalid("input", f"{rule}; go on from one by previous_response_id")
            await hold(size)
            if all_found:
                return size
            items = await written_items(await self.items(response, stored))
        except RequestError as error:
            if error.status == 404:
                return 0
            raise
        found |= {item.id: item.json for item in items if item.id in wanted}
        return size

    async def conversation(self, id: str, owner: str, hold: Hold) -> bytes:
        """Returns what goes on in a conversation begins with: its items, as a JSON array; `hold` is asked for room for
        it first. Raises RequestError: 404 where it is not known, 400 where it is full."""
        try:
            await hold(await self.conversations.check_room(id, owner))
            return msgspec.json.encode([item.json for item in await self.conversations.items(id, owner)])
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None

    async def add_to_conversation(self, response: Response, items: bytes, added: int, owner: str) -> bool:
        """Adds to a response's conversation, if it has one and has ended well, once: the last `added` of the `items`
        that it went on from, and its output. False where the conversation does not take that any more. Raises
        RequestError 503."""
        if response.get("conversation") is None or response["status"] not in CONTINUED:
            return True
        id = response["conversation"]["id"]
        asked = await written_items(items)
        new = [*(item.json for item in asked[len(asked) - added :]), *response["output"]]
        try:
            await self.conversations.add(id, owner, new, response["id"])
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        except RequestError as error:
            log.warning("conversation takes no more", extra={"conversation": id, "error": error.message})
            return False
        return True

    async def write(self, record: Record, stored: StoredResponse, due: float | None, holder: str = "") -> Record | None:
        """Writes what a response says now, and returns its next version; None where somebody else has written it.
        `due`: from when on another gateway may take it up. Raises RequestError."""
        value = msgspec.json.encode(stored)
        size = len(value) + stored.items_size
        try:
            return await self.database.replace(record.changed(value=value, size=size, due=due, holder=holder))
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None

    async def claim(self, holder: str, lease: float) -> tuple[Record, StoredResponse] | None:
        """Returns a response that is to be generated and that no gateway has; None where there is none. Raises
        RequestError."""
        if self.database.untouched:
            return None
        try:
            record = await self.database.claim(KIND, holder, lease)
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        return None if record is None else (record, _decoder.decode(record.value))

    async def add_events(self, id: str, events: list[Event]) -> bool:
        """Stores the next events of a response; False where it is not there any more. Raises RequestError."""
        position = EVENTS + events[0]["sequence_number"]
        try:
            await self.database.add_chunks(KIND, id, {position: _encoder.encode_lines(events)})
        except RecordUnknown:
            return False
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        return True

    async def events(self, id: str, after: int) -> list[Event]:
        """Returns stored events behind the number `after`, not all at once; empty where there are none yet. Raises
        RequestError."""
        try:
            places = [place for place in await self.database.positions(KIND, id) if place >= EVENTS]
            i = bisect_right(places, EVENTS + after + 1) - 1
            if not places:
                return []
            chunks = await self.database.chunks(KIND, id, after=places[max(i, 0)] - 1)
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None
        events = [event for _, data in chunks for event in _events.decode_lines(data)]
        return [event for event in events if event["sequence_number"] > after]

    async def all_events(self, id: str) -> list[Event]:
        """Returns all stored events. Raises RequestError."""
        events: list[Event] = []
        while more := await self.events(id, events[-1]["sequence_number"] if events else -1):
            events += more
        return events

    async def delete(self, id: str, owner: str) -> None:
        """Forgets a response. Raises RequestError 404."""
        await self._record(id, owner)
        try:
            await self.database.delete(KIND, id)
        except DatabaseUnavailable as error:
            raise _unavailable(error) from None


def _as_written(record: Record) -> WrittenResponse:
    value = record.value
    end = value.rindex(_BEHIND)
    behind = _behind.decode(b"{" + value[end + 1 :])
    return WrittenResponse(value[len(_BEFORE) : end], behind.items_size, behind.body is not None)


def _unavailable(error: DatabaseUnavailable) -> RequestError:
    log.warning("the database does not answer", extra={"error": str(error)})
    return RequestError(503, "the database of stored responses does not answer; try again", retry_after=1.0)
