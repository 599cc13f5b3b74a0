"""`/v1/responses/{id}` and what is below it: responses that were stored."""

from __future__ import annotations

import asyncio
import time

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.responses.written_items import written_items
from services.gateway.http.apis.background import BackgroundResponses
from services.gateway.http.apis.stored.item_page import ItemPage, number_of, read_query
from services.gateway.http.call import Call
from services.gateway.http.generation import EVENT_STREAM, STREAM_HEADERS, StreamSettings
from services.gateway.http.streaming import KEEP_ALIVE, event_frame
from services.gateway.response_store import ENDED, ResponseStore

POLL_EVERY = 0.25
"""Seconds between two looks at whether there are further events."""


class StoredResponseEndpoints:
    """Answers what clients ask about the responses of their key; of others they do not learn that they exist."""

    def __init__(self, background: BackgroundResponses | None, settings: StreamSettings, timeout: float) -> None:
        """`background`: None: nothing is stored. `timeout`: seconds that a response may take."""
        self._background, self._settings, self._timeout = background, settings, timeout

    async def get(self, call: Call) -> None:
        """`GET /v1/responses/{id}`; with `stream` its events. Raises RequestError."""
        query = read_query(call, "include", "stream", "starting_after", "include_obfuscation")
        for name in ("stream", "include_obfuscation"):
            if query.get(name, "false") not in ("true", "false"):
                raise not_allowed(name, query[name], "'true' or 'false' is")
        if query.get("include_obfuscation") == "true":
            raise unsupported("include_obfuscation", "obfuscation")
        after = number_of(query, "starting_after", 0, 10**11, -1)
        background, id = self._named(call)
        if query.get("stream") != "true":
            if "starting_after" in query:
                raise invalid("starting_after", "only allowed when stream is true")
            await call.respond((await background.store.written(id, call.key.name, call.hold)).json)
            return
        if not (await background.store.written(id, call.key.name)).in_background:
            raise invalid("stream", "only a response that was made with background is streamed again")
        await follow_events(call, background.store, id, after, self._settings, self._timeout)

    async def cancel(self, call: Call) -> None:
        """`POST /v1/responses/{id}/cancel`. Raises RequestError."""
        background, id = self._named(call)
        await call.respond_json(await background.cancel(id, call.key.name))

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/responses/{id}`. Raises RequestError."""
        background, id = self._named(call)
        await background.store.delete(id, call.key.name)
        await call.respond_json({"id": id, "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> None:
        """`GET /v1/responses/{id}/input_items`: all items that it went on from. Raises RequestError."""
        page = ItemPage(call)
        background, id = self._named(call)
        stored = await background.store.written(id, call.key.name)
        await call.hold(stored.items_size)
        await call.respond_json(page.of(await written_items(await background.store.items(id, stored))))

    def _named(self, call: Call) -> tuple[BackgroundResponses, str]:
        id: str = call.scope["path_params"]["id"]
        if self._background is None:
            text = f"Response with id {abbreviated(id)} not found: nothing is stored here."
            raise RequestError(404, text, param="response_id")
        return self._background, id


async def follow_events(
    call: Call, store: ResponseStore, id: str, after: int, settings: StreamSettings, timeout: float
) -> None:
    """Responds with the stored events of a response behind the number `after`, and with those that come within
    `timeout` seconds, whichever gateway makes them. Raises RequestError as long as no response was started."""
    await store.written(id, call.key.name)
    await call.start(200, EVENT_STREAM, STREAM_HEADERS)
    began = written = time.monotonic()
    while not call.connection.is_closing():
        try:
            stored = await store.written(id, call.key.name)
            events = await store.events(id, after)
        except RequestError as error:
            if error.status == 404:
                break
            stored, events = None, []
        now = time.monotonic()
        if events:
            after, written = events[-1]["sequence_number"], now
            if not await _sent(call, b"".join(map(event_frame, events)), settings):
                return
        elif (stored is not None and stored.status in ENDED) or now - began > timeout:
            break
        else:
            if now - written >= settings.keep_alive:
                written = now
                if not await _sent(call, KEEP_ALIVE, settings):
                    return
            await asyncio.sleep(POLL_EVERY)
    await call.end()


async def _sent(call: Call, data: bytes, settings: StreamSettings) -> bool:
    """Sends a part of a body; False where the client does not read it, and is cut off."""
    try:
        async with asyncio.timeout(settings.read_timeout):
            await call.send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        call.connection.abort()
        return False
    return True
