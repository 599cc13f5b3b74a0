"""`/v1/conversations`, in OpenAI's shapes."""

from __future__ import annotations

from services.gateway.api.responses.conversation import ConversationRequest
from services.gateway.conversations.conversation_store import ConversationStore
from services.gateway.http.apis.files import kept, listed
from services.gateway.http.apis.stored.item_page import ItemPage, read_query
from services.gateway.http.body_parser import BodyKind, BodyParser
from services.gateway.http.call import Call


class ConversationEndpoints:
    """Makes, shows and changes the conversations of a call's key; of others it does not learn that they exist."""

    def __init__(self, store: ConversationStore | None, parser: BodyParser) -> None:
        """`store`: None: nothing is kept."""
        self._store, self._parser = store, parser

    async def create(self, call: Call) -> None:
        """`POST /v1/conversations`. Raises RequestError."""
        store, asked = await self._asked(call, "conversation")
        made = await store.create(call.key.name, asked.items, asked.metadata)
        await call.respond_json(made.body())

    async def retrieve(self, call: Call) -> None:
        """`GET /v1/conversations/{id}`. Raises RequestError."""
        store, id = self._named(call)
        await call.respond_json((await store.get(id, call.key.name)).body())

    async def update(self, call: Call) -> None:
        """`POST /v1/conversations/{id}`. Raises RequestError."""
        (store, id), (_, asked) = self._named(call), await self._asked(call, "conversation_update")
        await call.respond_json((await store.set_metadata(id, call.key.name, asked.metadata)).body())

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/conversations/{id}`. Raises RequestError."""
        store, id = self._named(call)
        await store.delete(id, call.key.name)
        await call.respond_json({"id": id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, call: Call) -> None:
        """`POST /v1/conversations/{id}/items`. Raises RequestError."""
        read_query(call, "include")
        (store, id), (_, asked) = self._named(call), await self._asked(call, "conversation_items")
        await store.add(id, call.key.name, asked.items)
        await call.respond_json(listed(asked.items, more=False))

    async def items(self, call: Call) -> None:
        """`GET /v1/conversations/{id}/items`. Raises RequestError."""
        page, (store, id) = ItemPage(call), await self._held(call)
        await call.respond_json(page.of(await store.items(id, call.key.name)))

    async def item(self, call: Call) -> None:
        """`GET /v1/conversations/{id}/items/{name}`. Raises RequestError."""
        read_query(call, "include")
        store, id = await self._held(call)
        await call.respond_json((await store.item(id, call.key.name, call.scope["path_params"]["name"])).json)

    async def delete_item(self, call: Call) -> None:
        """`DELETE /v1/conversations/{id}/items/{name}`. Raises RequestError."""
        store, id = await self._held(call)
        changed = await store.delete_item(id, call.key.name, call.scope["path_params"]["name"])
        await call.respond_json(changed.body())

    async def _asked(self, call: Call, kind: BodyKind) -> tuple[ConversationStore, ConversationRequest]:
        store = kept(self._store)
        return store, await self._parser.read(kind, await call.body())

    async def _held(self, call: Call) -> tuple[ConversationStore, str]:
        """The conversation that is named, once there is room for all its items."""
        store, id = self._named(call)
        await call.hold((await store.get(id, call.key.name)).record.size)
        return store, id

    def _named(self, call: Call) -> tuple[ConversationStore, str]:
        return kept(self._store), call.scope["path_params"]["id"]
