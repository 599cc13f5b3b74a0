"""Chats that were stored: `GET /v1/chat/completions` and what is below it, in OpenAI's shapes."""

from __future__ import annotations

import re

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed
from services.gateway.api.fields.stored_chat import read_chat_update
from services.gateway.conversations.chat_store import ChatFilter, ChatPage, ChatStore
from services.gateway.http.apis.stored.item_page import DEFAULT_LISTED, MAX_LISTED, number_of
from services.gateway.http.call import Call

_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


class StoredChatEndpoints:
    """Shows and changes the stored chats of a call's key; of others it does not learn that they exist."""

    def __init__(self, store: ChatStore | None) -> None:
        """`store`: None: nothing is kept."""
        self._store = store

    async def list(self, call: Call) -> None:
        """`GET /v1/chat/completions`. Raises RequestError."""
        asked = _ListQuery(call, filters=True)
        if self._store is None:
            await _respond_page(call, ChatPage([], [], more=False))
            return
        page = self._store.page(
            *(call.key.name, asked.filter, call.hold),
            limit=asked.limit,
            after=asked.after,
            newest_first=asked.newest_first,
        )
        await _respond_page(call, await call.unless_left(page))

    async def get(self, call: Call) -> None:
        """`GET /v1/chat/completions/{id}`. Raises RequestError."""
        store, id = self._named(call)
        await call.respond_json(await store.get(id, call.key.name, call.hold))

    async def update(self, call: Call) -> None:
        """`POST /v1/chat/completions/{id}`. Raises RequestError."""
        store, id = self._named(call)
        metadata = read_chat_update(await call.small_body())
        await call.respond_json(await store.set_metadata(id, call.key.name, metadata, call.hold))

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/chat/completions/{id}`. Raises RequestError."""
        store, id = self._named(call)
        await store.delete(id, call.key.name)
        await call.respond_json({"id": id, "object": "chat.completion.deleted", "deleted": True})

    async def messages(self, call: Call) -> None:
        """`GET /v1/chat/completions/{id}/messages`: what it was asked. Raises RequestError."""
        (store, id), asked = self._named(call), _ListQuery(call)
        page = await store.messages(
            *(id, call.key.name, call.hold),
            limit=asked.limit,
            after=asked.after,
            newest_first=asked.newest_first,
        )
        await _respond_page(call, page)

    def _named(self, call: Call) -> tuple[ChatStore, str]:
        id: str = call.scope["path_params"]["id"]
        if self._store is None:
            text = f"Chat completion with id {abbreviated(id)} not found: nothing is stored here."
            raise RequestError(404, text, param="completion_id")
        return self._store, id


class _ListQuery:
    """Which part of a list a call asks for."""

    def __init__(self, call: Call, *, filters: bool = False) -> None:
        """`filters`: whether it may name a model and metadata. Raises RequestError 400."""
        query, metadata = dict[str, str](), dict[str, str]()
        for name, value in call.query():
            if filters and (found := _METADATA.fullmatch(name)) is not None:
                metadata[found[1]] = value
            elif name in ("limit", "order", "after") or (filters and name == "model"):
                query[name] = value
            else:
                raise invalid(abbreviated(name)[1:-1] or "query", "this parameter is not known")
        self.limit, self.after = number_of(query, "limit", 1, MAX_LISTED, DEFAULT_LISTED), query.get("after")
        order = query.get("order", "asc")
        if order not in ("asc", "desc"):
            raise not_allowed("order", order, "'asc' or 'desc' is")
        self.newest_first = order == "desc"
        self.filter = ChatFilter(query.get("model"), metadata)


async def _respond_page(call: Call, page: ChatPage) -> None:
    ends = (page.ids[0], page.ids[-1]) if page.ids else (None, None)
    body = {"object": "list", "data": page.objects, "first_id": ends[0], "last_id": ends[1], "has_more": page.more}
    await call.respond_json(body)
