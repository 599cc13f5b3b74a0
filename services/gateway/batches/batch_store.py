"""Batches in the database: made, shown, cancelled. Who answers their lines is the runner's business."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from services.gateway.api.batches.batch import BatchFields, BatchState
from services.gateway.api.errors import RequestError, not_allowed
from services.gateway.batches.file_store import FileStore
from services.gateway.database.records import Database, Record, RecordUnknown

BATCHES = "batch"


class BatchObject(NamedTuple):
    """A batch and its record."""

    record: Record
    state: BatchState

    def body(self) -> dict[str, object]:
        """OpenAI's batch object."""
        return self.state.body(self.record.id, self.record.created)


class BatchStore:
    """Reads and writes batches; all state is the database's."""

    def __init__(
        self, database: Database, files: FileStore, max_batches: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`max_batches`: of one API key. `clock`: seconds since the epoch."""
        self._database, self._files, self._max_batches, self._clock = database, files, max_batches, clock

    async def create(self, owner: str, fields: BatchFields) -> BatchObject:
        """A new batch, which a gateway will claim. Raises RequestError."""
        window = fields.window_seconds()
        try:
            file = await self._files.get(owner, fields.input_file_id)
        except RequestError:
            raise not_allowed("input_file_id", fields.input_file_id, "the id of one of the files is expected") from None
        if file.file.purpose != "batch":
            raise not_allowed("input_file_id", fields.input_file_id, "the file must have the purpose batch")
        usage = await self._database.usage(BATCHES, owner)
        if usage.records >= self._max_batches:
            text = f"{usage.records} batches are kept for this key, which is the limit; they go with time"
            raise RequestError(429, text, code="too_many_batches")
        now = self._clock()
        expires = fields.output_expires_after
        state = BatchState(
            input_file_id=fields.input_file_id,
            endpoint=fields.endpoint,
            completion_window=fields.completion_window,
            metadata=fields.metadata,
            output_expires_after=None if expires is None else expires.seconds,
            expires_at=int(now + window),
        )
        record = Record(
            kind=BATCHES,
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            created=now,
            expires=now + window + self._files.limits.retention,
            value=msgspec.json.encode(state),
            due=now,
        )
        await self._database.insert(record)
        return BatchObject(record, state)

    async def get(self, owner: str, id: str) -> BatchObject:
        """One of the owner's batches. Raises RequestError 404."""
        record = await self._database.get(BATCHES, id)
        if record is None or record.owner != owner:
            raise RequestError(404, f"No such Batch object: {id[:80]}", param="id")
        return batch_of(record)

    async def page(self, owner: str, *, limit: int, after: str | None) -> tuple[list[BatchObject], bool]:
        """The owner's batches, the newest first, and whether there are more. Raises RequestError where `after` is none
        of them."""
        try:
            records = await self._database.page(BATCHES, owner, limit=limit + 1, after=after)
        except RecordUnknown:
            raise not_allowed("after", after, "the id of one of the batches is expected") from None
        return [batch_of(record) for record in records[:limit]], len(records) > limit

    async def cancel(self, owner: str, id: str) -> BatchObject:
        """The batch, which its gateway is about to end. Raises RequestError: 404, or 400 where it is over already."""
        while True:
            batch = await self.get(owner, id)
            if batch.state.status in ("cancelling", "cancelled"):
                return batch
            if batch.state.status not in ("validating", "in_progress"):
                text = f"id: a batch with the status {batch.state.status} cannot be cancelled"
                raise RequestError(400, text, param="id")
            state = batch.state.moved("cancelling", self._clock())
            written = await self._database.replace(batch.record.changed(value=msgspec.json.encode(state)))
            if written is not None:
                return BatchObject(written, state)


_DECODER = msgspec.json.Decoder(BatchState)


def batch_of(record: Record) -> BatchObject:
    """What a record says."""
    return BatchObject(record, _DECODER.decode(record.value))
