"""`/v1/messages/batches`, in Anthropic's shapes: batches whose input is in the body, and whose results are one list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from services.gateway.api.batches.message_batch import (
    batch_fields,
    input_lines,
    message_batch,
    read_message_batch,
    result_line,
    unanswered_line,
)
from services.gateway.api.errors import RequestError, invalid
from services.gateway.batches.batch_input import BatchInput
from services.gateway.batches.batch_store import BatchObject, BatchStore
from services.gateway.batches.file_store import FileStore
from services.gateway.database.records import CHUNK_BYTES, DatabaseUnavailable
from services.gateway.http.apis.files import kept, limit_of, query
from services.gateway.http.call import Call

MAX_LIMIT, LIMIT = 1000, 20
"""Batches in one list, as Anthropic has it."""


class MessageBatchEndpoints:
    """Makes and shows batches of messages; it has no state."""

    def __init__(
        self,
        store: BatchStore | None,
        files: FileStore | None,
        wake: Callable[[], None],
        max_requests: int,
        read_timeout: float,
    ) -> None:
        """`store`, `files`: None: nothing is kept. `wake`: called where there is a new batch. `read_timeout`: seconds
        that a client may take to read a piece of the results."""
        self._store, self._files, self._wake = store, files, wake
        self._max_requests, self._read_timeout = max_requests, read_timeout

    async def create(self, call: Call) -> None:
        """`POST /v1/messages/batches`. Raises RequestError."""
        store, files = kept(self._store), kept(self._files)
        body = await call.body()
        requests = read_message_batch(body, self._max_requests)
        writer = await files.create(call.key.name, "messages.jsonl", len(body))
        try:
            for i, line in enumerate(input_lines(requests)):
                await writer.write(line)
                if i % 64 == 0:
                    await asyncio.sleep(0)  # streams have their turn
            file = await writer.finish("batch", None)
            batch = await store.create(call.key.name, batch_fields(file.record.id), total=len(requests))
        except BaseException:
            await writer.discard()
            raise
        self._wake()
        await call.respond_json(_shown(batch))

    async def list(self, call: Call) -> None:
        """`GET /v1/messages/batches`. Raises RequestError."""
        store = kept(self._store)
        asked = query(call, {"after_id", "before_id", "limit"})
        after, before = asked.get("after_id"), asked.get("before_id")
        if after is not None and before is not None:
            raise invalid("before_id", "not allowed together with after_id")
        limit = limit_of(asked, LIMIT, MAX_LIMIT)
        batches, more = await store.page(call.key.name, limit=limit, after=after or before, newest_first=before is None)
        data = [_shown(batch) for batch in (batches if before is None else reversed(batches))]
        ids = [each["id"] for each in data]
        ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
        await call.respond_json({"data": data, "has_more": more, **ends})

    async def retrieve(self, call: Call) -> None:
        """`GET /v1/messages/batches/NAME`. Raises RequestError 404."""
        await call.respond_json(_shown(await self._named(call)))

    async def cancel(self, call: Call) -> None:
        """`POST /v1/messages/batches/NAME/cancel`. Raises RequestError."""
        batch = await self._named(call)
        if batch.state.status != "finalizing":  # all of it is answered then
            batch = await kept(self._store).cancel(call.key.name, batch.record.id)
        await call.respond_json(_shown(batch))

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/messages/batches/NAME`, with its requests and results. Raises RequestError."""
        batch = await self._ended(call, "be deleted; cancel it first")
        await kept(self._store).delete(batch)
        await call.respond_json({"id": batch.record.id, "type": "message_batch_deleted"})

    async def results(self, call: Call) -> None:
        """`GET /v1/messages/batches/NAME/results`. Raises RequestError. Where the database is lost, or the client does
        not read, the connection ends before the results do."""
        batch = await self._ended(call, "show its results")
        await call.start(200, b"application/x-jsonl", [])
        piece = bytearray()
        try:
            async for line in self._lines(batch):
                piece += line
                if len(piece) >= CHUNK_BYTES:
                    await self._send(call, bytes(piece))
                    piece.clear()
                if call.connection.is_closing():
                    return
            await self._send(call, bytes(piece))
        except (DatabaseUnavailable, TimeoutError):
            call.connection.abort()
            return
        await call.end()

    async def _send(self, call: Call, piece: bytes) -> None:
        async with asyncio.timeout(self._read_timeout):
            await call.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _lines(self, batch: BatchObject) -> AsyncIterator[bytes]:
        """The results: what was answered, in the order of the requests, then what was not."""
        files, answered = kept(self._files), set[int]()
        async for number, line in files.results(batch.record.id):
            answered.add(number)
            yield result_line(line)
        if len(answered) == batch.state.total:
            return
        file = await kept(self._store).source(batch)
        if file is None:
            return
        async for number, line in BatchInput(files, file, batch.state.endpoint, file.record.size).lines():
            if number not in answered:
                yield unanswered_line(line, cancelled=batch.state.status == "cancelled")

    async def _named(self, call: Call) -> BatchObject:
        return await kept(self._store).get(call.key.name, call.scope["path_params"]["name"])

    async def _ended(self, call: Call, what: str) -> BatchObject:
        batch = await self._named(call)
        if not batch.state.ended:
            raise RequestError(400, f"id: a batch that has not ended cannot {what}", param="id")
        return batch


def _shown(batch: BatchObject) -> dict[str, Any]:
    return message_batch(batch.record.id, batch.record.created, batch.state)
