"""`/v1/files`, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, TypeVar

import msgspec

from services.gateway.api.batches.files import MAX_FILENAME, ExpiresAfter
from services.gateway.api.errors import RequestError, invalid, not_allowed
from services.gateway.batches.file_store import FileObject, FileStore, FileWriter
from services.gateway.database.records import DatabaseUnavailable
from services.gateway.http.apis.multipart import FORM_BYTES, FileBegin, FormField, FormReader, unknown_field
from services.gateway.http.call import Call

MAX_UPLOADS = 32
"""Files that arrive at the same time at one gateway."""
KEY_SHARE = 0.75
"""Of them that one API key may have: who sends slowly leaves others some."""
MAX_LIMIT = 10_000
"""Files in one list, as OpenAI has it."""
S = TypeVar("S")

NO_DATABASE = "nothing is kept here, as the gateway has no database; the server's --database names one"


class FileEndpoints:
    """Owns the number of uploads under way."""

    def __init__(self, store: FileStore | None, read_timeout: float) -> None:
        """`store`: None: nothing is kept. `read_timeout`: seconds that a client may take to read a piece of a file."""
        self._store, self._read_timeout = store, read_timeout
        self._uploads: Counter[str] = Counter()
        """By API key."""

    async def create(self, call: Call) -> None:
        """`POST /v1/files`. Raises RequestError."""
        store, key = kept(self._store), call.key.name
        of_key = int(KEY_SHARE * MAX_UPLOADS)
        if self._uploads.total() >= MAX_UPLOADS or self._uploads[key] >= of_key:
            text = f"{self._uploads.total()} files are being uploaded, {self._uploads[key]} of them with this key; of "
            text += f"{MAX_UPLOADS} that are allowed a key may have {of_key}"
            raise RequestError(429, text, retry_after=1.0)
        self._uploads[key] += 1
        try:
            file = await Upload(call, store).read()
        finally:
            self._uploads[key] -= 1
            if not self._uploads[key]:
                del self._uploads[key]
        await call.respond_json(file.body())

    async def list(self, call: Call) -> None:
        """`GET /v1/files`. Raises RequestError."""
        store = kept(self._store)
        asked = query(call, {"after", "limit", "order", "purpose"})
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise not_allowed("order", order, "asc or desc is expected")
        files, more = await store.page(
            call.key.name,
            limit=limit_of(asked, MAX_LIMIT, MAX_LIMIT),
            after=asked.get("after"),
            newest_first=order == "desc",
            purpose=asked.get("purpose"),
        )
        await call.respond_json(listed([file.body() for file in files], more))

    async def retrieve(self, call: Call) -> None:
        """`GET /v1/files/NAME`. Raises RequestError 404."""
        file = await kept(self._store).get(call.key.name, call.scope["path_params"]["name"])
        await call.respond_json(file.body())

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/files/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        await kept(self._store).delete(call.key.name, name)
        await call.respond_json({"id": name, "object": "file", "deleted": True})

    async def content(self, call: Call) -> None:
        """`GET /v1/files/NAME/content`. Raises RequestError 404. Where the database is lost, or the client does not
        read, the connection ends before the contents do."""
        store = kept(self._store)
        file = await store.get(call.key.name, call.scope["path_params"]["name"])
        length = (b"content-length", str(file.record.size).encode())
        await call.start(200, b"application/octet-stream", [length])
        try:
            async for piece in store.contents(file):
                async with asyncio.timeout(self._read_timeout):
                    await call.send({"type": "http.response.body", "body": piece, "more_body": True})
                if call.connection.is_closing():
                    return
        except (DatabaseUnavailable, TimeoutError):
            call.connection.abort()
            return
        await call.end()


class Upload:
    """One form on its way into the store."""

    def __init__(self, call: Call, store: FileStore) -> None:
        self._call, self._store = call, store
        self._fields: dict[str, str] = {}
        self._writer: FileWriter | None = None

    async def read(self) -> FileObject:
        """The file, once the form has arrived. Raises RequestError, and keeps nothing then."""
        try:
            return await self._read()
        except BaseException:
            if self._writer is not None:
                await self._writer.discard()
            raise

    async def _read(self) -> FileObject:
        call = self._call
        form = FormReader(call.headers.get(b"content-type", b""))
        async for event in form.events(call.pieces(self._store.limits.max_file + FORM_BYTES)):
            match event:
                case FormField():
                    self._add(event)
                case FileBegin():
                    await self._begin(event)
                case _:
                    assert self._writer is not None
                    await self._writer.write(event)
        if self._writer is None:
            raise invalid("file", "this field is required")
        expires_after = self._expires_after()
        if "purpose" not in self._fields:
            raise invalid("purpose", "this field is required")
        return await self._writer.finish("batch", expires_after)

    def _add(self, field: FormField) -> None:
        if field.name not in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise (
                invalid("file", "a file with a name is expected") if field.name == "file" else unknown_field(field.name)
            )
        if field.name in self._fields:
            raise invalid(field.name, "this field is there twice")
        if field.name == "purpose" and field.value != "batch":
            raise not_allowed("purpose", field.value, "batch is expected")
        self._fields[field.name] = field.value

    async def _begin(self, begin: FileBegin) -> None:
        if begin.name != "file":
            raise unknown_field(begin.name)
        if self._writer is not None:
            raise invalid("file", "this field is there twice")
        if not 0 < len(begin.filename) <= MAX_FILENAME:
            raise not_allowed("file", begin.filename, f"a name of 1 to {MAX_FILENAME} characters is expected")
        length = self._call.headers.get(b"content-length", b"")
        limit = self._store.limits.max_file
        size = min(int(length[:20]), limit) if length.isdigit() else limit
        self._writer = await self._store.create(self._call.key.name, begin.filename, size)

    def _expires_after(self) -> ExpiresAfter | None:
        given = {name[14:-1]: value for name, value in self._fields.items() if name.startswith("expires_after[")}
        if not given:
            return None
        try:
            return msgspec.convert(given, ExpiresAfter, strict=False)
        except msgspec.ValidationError as error:
            text = str(error)
            raise invalid("expires_after", f"{text[:1].lower()}{text[1:]}") from None


def kept(store: S | None) -> S:
    """The store. Raises RequestError 404 where there is none."""
    if store is None:
        raise RequestError(404, NO_DATABASE)
    return store


def query(call: Call, known: set[str]) -> dict[str, str]:
    """The parameters behind the path. Raises RequestError for others than the known ones."""
    pairs = call.query()
    for name, _ in pairs:
        if name not in known:
            raise unknown_field(name)
    return dict(pairs)


def limit_of(asked: dict[str, str], default: int, most: int) -> int:
    """How many objects a list may have. Raises RequestError."""
    text = asked.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise not_allowed("limit", text, f"1 to {most} is expected")
    return int(text)


def listed(objects: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's list of objects."""
    ids = [each["id"] for each in objects]
    return {
        "object": "list",
        "data": objects,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": more,
    }
