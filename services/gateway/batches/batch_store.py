"""Batches in the database: made, shown, cancelled. Who answers their lines is the runner's business."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from services.gateway.api.batches.batch import BatchFields, BatchState
from services.gateway.api.errors import RequestError, not_allowed
from services.gateway.batches.file_store import FileObject, FileStore
from services.gateway.database.records import Database, Record, RecordLimits, RecordUnknown

BATCHES = "batch"
PAGE = 200
"""Batches that are read at once where only some of them are wanted."""


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
        self,
        database: Database,
        files: FileStore,
        max_batches: int,
        clock: Callable[[], float] = time.time,
        prefix: str = "batch_",
    ) -> None:
        """`max_batches`: of one API key. `clock`: seconds since the epoch. `prefix`: what the ids of its batches begin
        with; others do not exist here."""
        self._database, self._files, self._max_batches, self._clock = database, files, max_batches, clock
        self._prefix = prefix

    async def create(self, owner: str, fields: BatchFields, total: int = 0) -> BatchObject:
        """A new batch, which a gateway will claim. `total`: its requests, where that is known. Raises RequestError."""
        window = fields.window_seconds()
        try:
            file = await self._files.get(owner, fields.input_file_id)
        except RequestError:
            raise not_allowed("input_file_id", fields.input_file_id, "the id of one of the files is expected") from None
        if file.file.purpose != "batch":
            raise not_allowed("input_file_id", fields.input_file_id, "the file must have the purpose batch")
        now = self._clock()
        expires = fields.output_expires_after
        state = BatchState(
            input_file_id=fields.input_file_id,
            endpoint=fields.endpoint,
            completion_window=fields.completion_window,
            metadata=fields.metadata,
            output_expires_after=None if expires is None else expires.seconds,
            expires_at=int(now + window),
            total=total,
        )
        record = Record(
            kind=BATCHES,
            id=f"{self._prefix}{secrets.token_hex(12)}",
            owner=owner,
            created=now,
            expires=now + window + self._files.limits.retention,
            value=msgspec.json.encode(state),
            due=now,
        )
        usage = await self._database.insert_within(record, RecordLimits(self._max_batches))
        if usage is not None:
            text = f"{usage.records} batches are kept for this key, which is the limit; they go with time"
            raise RequestError(429, text, code="too_many_batches")
        return BatchObject(record, state)

    async def get(self, owner: str, id: str) -> BatchObject:
        """One of the owner's batches. Raises RequestError 404."""
        record = await self._database.get(BATCHES, id)
        if record is None or record.owner != owner or not id.startswith(self._prefix):
            raise RequestError(404, f"No such Batch object: {id[:80]}", param="id")
        return batch_of(record)

    async def page(
        self, owner: str, *, limit: int, after: str | None, newest_first: bool = True
    ) -> tuple[list[BatchObject], bool]:
        """The owner's batches in order, and whether there are more. Raises RequestError where `after` is none of
        them."""
        found: list[Record] = []
        while len(found) <= limit:
            try:
                records = await self._database.page(BATCHES, owner, limit=PAGE, after=after, newest_first=newest_first)
            except RecordUnknown:
                raise not_allowed("after", after, "the id of one of the batches is expected") from None
            found += [record for record in records if record.id.startswith(self._prefix)]
            if len(records) < PAGE:
                break
            after = records[-1].id
        return [batch_of(record) for record in found[:limit]], len(found) > limit

    async def source(self, batch: BatchObject) -> FileObject | None:
        """The file with a batch's requests; None where it is gone."""
        try:
            return await self._files.get(batch.record.owner, batch.state.input_file_id)
        except RequestError:
            return None

    async def delete(self, batch: BatchObject) -> None:
        """Removes a batch that has ended, with its requests and results."""
        if await self.source(batch) is not None:
            await self._files.delete(batch.record.owner, batch.state.input_file_id)
        await self._files.delete_results(batch.record.id)
        await self._database.delete(BATCHES, batch.record.id)

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
