"""`/v1/batches`, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.gateway.api.batches.batch import BatchFields
from services.gateway.api.errors import decode_body
from services.gateway.batches.batch_store import BatchStore
from services.gateway.http.apis.files import kept, limit_of, listed, query
from services.gateway.http.call import Call

MAX_LIMIT, LIMIT = 100, 20
"""Batches in one list, as OpenAI has it."""

_FIELDS = msgspec.json.Decoder(BatchFields)


class BatchEndpoints:
    """Makes and shows batches; it has no state."""

    def __init__(self, store: BatchStore | None, wake: Callable[[], None]) -> None:
        """`store`: None: nothing is kept. `wake`: called where there is a new batch."""
        self._store, self._wake = store, wake

    async def create(self, call: Call) -> None:
        """`POST /v1/batches`. Raises RequestError."""
        store = kept(self._store)
        batch = await store.create(call.key.name, decode_body(await call.small_body(), _FIELDS))
        self._wake()
        await call.respond_json(batch.body())

    async def list(self, call: Call) -> None:
        """`GET /v1/batches`. Raises RequestError."""
        store = kept(self._store)
        asked = query(call, {"after", "limit"})
        batches, more = await store.page(
            call.key.name, limit=limit_of(asked, LIMIT, MAX_LIMIT), after=asked.get("after")
        )
        await call.respond_json(listed([batch.body() for batch in batches], more))

    async def retrieve(self, call: Call) -> None:
        """`GET /v1/batches/NAME`. Raises RequestError 404."""
        batch = await kept(self._store).get(call.key.name, call.scope["path_params"]["name"])
        await call.respond_json(batch.body())

    async def cancel(self, call: Call) -> None:
        """`POST /v1/batches/NAME/cancel`. Raises RequestError."""
        batch = await kept(self._store).cancel(call.key.name, call.scope["path_params"]["name"])
        await call.respond_json(batch.body())
