"""Files in the database: written in chunks as they arrive, seen by the API key that wrote them alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.batches.files import ExpiresAfter, FilePurpose
from services.gateway.api.errors import RequestError, not_allowed
from services.gateway.database.records import CHUNK_BYTES, Database, Record, RecordLimits, RecordUnknown

FILES = "file"
RESULTS = "batch-results"
"""Records with the answers of a batch: each is a chunk, whose position is the number of its line."""
UPLOAD_SECONDS = 3600.0
"""After which an upload that nobody has finished is removed."""
PAGE = 200
"""Files that are read at once where only some of them are wanted."""


class FileLimits(NamedTuple):
    """What one API key may keep."""

    max_file: int
    """Bytes of one file."""
    max_files: int
    max_stored: int
    """Bytes of all its files."""
    retention: float
    """Seconds until a file goes that does not say when."""


class BatchPart(Struct, frozen=True):
    """The lines of a batch's results that are one of its files."""

    batch: str
    failed: bool
    """Whether they are those that could not be served."""


class StoredFile(Struct, frozen=True):
    """What a file's record says."""

    filename: str
    purpose: FilePurpose
    uploading: bool = False
    """Whether it is not whole yet; then nobody sees it."""
    part: BatchPart | None = None
    """Where its contents lie, if they are not its own."""


class FileObject(NamedTuple):
    """A file and its record."""

    record: Record
    file: StoredFile

    def body(self) -> dict[str, object]:
        """OpenAI's file object."""
        record = self.record
        return {
            "id": record.id,
            "object": "file",
            "bytes": record.size,
            "created_at": int(record.created),
            "expires_at": None if record.expires is None else int(record.expires),
            "filename": self.file.filename,
            "purpose": self.file.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileWriter:
    """Owns the record of a file that arrives, until it is finished or discarded."""

    def __init__(self, database: Database, record: Record, limits: FileLimits) -> None:
        self._database, self._record, self._limits = database, record, limits
        self._buffer = bytearray()
        self._chunks = self._size = 0

    async def write(self, data: bytes) -> None:
        """Adds to the file. Raises RequestError 413 where it becomes too large."""
        self._size += len(data)
        if self._size > self._limits.max_file:
            text = f"file: larger than the {self._limits.max_file} bytes that are allowed"
            raise RequestError(413, text, param="file", code="too_large")
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            await self._add(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def finish(self, purpose: FilePurpose, expires_after: ExpiresAfter | None) -> FileObject:
        """The file is whole. Raises RequestError 503 where its upload took so long that it has been removed."""
        if self._buffer:
            await self._add(bytes(self._buffer))
        file = msgspec.structs.replace(_DECODER.decode(self._record.value), purpose=purpose, uploading=False)
        seconds = self._limits.retention if expires_after is None else expires_after.seconds
        whole = self._record.changed(
            value=msgspec.json.encode(file), size=self._size, expires=self._record.created + seconds
        )
        written = await self._database.replace(whole)
        if written is None:
            raise _removed()
        return FileObject(written, file)

    async def discard(self) -> None:
        """Nobody wants it."""
        await self._database.delete(FILES, self._record.id)

    async def _add(self, chunk: bytes) -> None:
        try:
            await self._database.add_chunks(FILES, self._record.id, {self._chunks: chunk})
        except RecordUnknown:
            raise _removed() from None
        self._chunks += 1


class FileStore:
    """Reads and writes files; all state is the database's."""

    def __init__(self, database: Database, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self.limits = limits
        self._database, self._clock = database, clock

    async def create(self, owner: str, filename: str, size: int) -> FileWriter:
        """Makes room for a file of about `size` bytes. Raises RequestError where the key has too many, or too much."""
        now = self._clock()
        file = StoredFile(filename, "batch", uploading=True)
        record = Record(
            kind=FILES,
            id=new_file_id(),
            owner=owner,
            created=now,
            expires=now + UPLOAD_SECONDS,
            value=msgspec.json.encode(file),
            size=size,
        )
        limits = RecordLimits(self.limits.max_files, self.limits.max_stored)
        usage = await self._database.insert_within(record, limits)
        if usage is not None and usage.records >= limits.records:
            text = f"file: {usage.records} files are kept for this key, which is the limit; delete some"
            raise RequestError(400, text, param="file", code="too_many_files")
        if usage is not None:
            text = f"file: {usage.size} bytes are kept for this key, of {limits.size}; delete some files"
            raise RequestError(400, text, param="file", code="storage_exceeded")
        return FileWriter(self._database, record, self.limits)

    async def get(self, owner: str, id: str) -> FileObject:
        """One of the owner's files. Raises RequestError 404."""
        record = await self._database.get(FILES, id)
        found = None if record is None or record.owner != owner else _file(record)
        if found is None or found.file.uploading:
            raise _unknown(id)
        return found

    async def page(
        self, owner: str, *, limit: int, after: str | None, newest_first: bool, purpose: str | None
    ) -> tuple[list[FileObject], bool]:
        """The owner's files in order, and whether there are more. Raises RequestError where `after` is none of them."""
        files: list[FileObject] = []
        while len(files) <= limit:
            try:
                records = await self._database.page(FILES, owner, limit=PAGE, after=after, newest_first=newest_first)
            except RecordUnknown:
                raise not_allowed("after", after, "the id of one of the files is expected") from None
            found = [_file(record) for record in records]
            files += [each for each in found if not each.file.uploading and purpose in (None, each.file.purpose)]
            if len(records) < PAGE:
                break
            after = records[-1].id
        return files[:limit], len(files) > limit

    async def contents(self, file: FileObject) -> AsyncIterator[bytes]:
        """Yields the file from its beginning, in pieces."""
        part = file.file.part
        kind, id = (FILES, file.record.id) if part is None else (RESULTS, part.batch)
        position = -1
        while chunks := await self._database.chunks(kind, id, position):
            for _, data in chunks:
                if part is None:
                    yield data
                elif data[:1] == mark(failed=part.failed):
                    yield data[1:]
            position = chunks[-1][0]

    async def results(self, batch: str) -> AsyncIterator[tuple[int, bytes]]:
        """Yields all results of a batch with the numbers of their lines, in order."""
        position = -1
        while chunks := await self._database.chunks(RESULTS, batch, position):
            for position, data in chunks:
                yield position, data[1:]

    async def delete_results(self, batch: str) -> None:
        """Removes the results of a batch, and the files that show them."""
        for failed in (False, True):
            await self._database.delete(FILES, part_id(BatchPart(batch, failed)))
        await self._database.delete(RESULTS, batch)

    async def delete(self, owner: str, id: str) -> None:
        """With both files of a batch its results go. Raises RequestError 404."""
        part = (await self.get(owner, id)).file.part
        if not await self._database.delete(FILES, id):
            raise _unknown(id)
        if part is not None:
            other = part_id(BatchPart(part.batch, not part.failed))
            if await self._database.get(FILES, other) is None:
                await self._database.delete(RESULTS, part.batch)

    async def add_part(self, owner: str, part: BatchPart, size: int, seconds: float) -> str:
        """Makes a file of a part of a batch's results, unless there is one; its id."""
        now = self._clock()
        name = f"{part.batch}_{'error' if part.failed else 'output'}.jsonl"
        record = Record(
            kind=FILES,
            id=part_id(part),
            owner=owner,
            created=now,
            expires=now + seconds,
            value=msgspec.json.encode(StoredFile(name, "batch_output", part=part)),
            size=size,
        )
        await self._database.insert(record)
        return record.id


_DECODER = msgspec.json.Decoder(StoredFile)


def part_id(part: BatchPart) -> str:
    """The id of a batch's file, which nobody can guess who does not know the batch's."""
    name = f"{part.batch} {'error' if part.failed else 'output'}".encode()
    return f"file-{blake2b(name, digest_size=12).hexdigest()}"


def mark(*, failed: bool) -> bytes:
    """What a chunk of a batch's results begins with: which of both files has the line."""
    return b"-" if failed else b"+"


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(12)}"


def _file(record: Record) -> FileObject:
    return FileObject(record, _DECODER.decode(record.value))


def _unknown(id: str) -> RequestError:
    return RequestError(404, f"No such File object: {id[:80]}", param="id")


def _removed() -> RequestError:
    return RequestError(503, "the upload took too long, and what had come of it is gone; try again")
