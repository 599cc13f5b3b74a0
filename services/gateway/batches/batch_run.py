"""One batch in the hands of one gateway: from its claim to its end, or until its lease is lost.

Every answer is a chunk of the batch's results at the position of its line, and a position is taken once. A gateway
that goes on where another one stopped, or was taken for dead, replaces the record of the results before it reads them:
from then on the other one, which names the version before, adds nothing. So each line is in the files once, and what
was counted is what they have, whoever else writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.batches.batch import BatchLineError, BatchState, BatchStatus
from services.gateway.api.batches.lines import (
    BadLine,
    BatchAnswer,
    BatchRequest,
    answered_line,
    refused_line,
)
from services.gateway.api.errors import FIELDS, RequestError
from services.gateway.batches.batch_input import BatchInput
from services.gateway.batches.batch_store import BatchObject, batch_of
from services.gateway.batches.file_store import RESULTS, BatchPart, FileStore, mark
from services.gateway.batches.window import BatchWindow
from services.gateway.core.api_keys import KeyName
from services.gateway.database.records import Database, DatabaseUnavailable, Record, RecordUnknown
from shared.error_groups import innermost
from shared.reliability.retry import Backoff

log = logging.getLogger(__name__)

AnswerLine = Callable[[BatchRequest, KeyName], Awaitable[BatchAnswer]]
"""Answers one request for a key, or raises what ends the process."""

BATCH_PRIORITY = 2**30
"""Of requests that do not say one: behind all others that wait. Lower goes first."""
BUSY = (429, 503)
"""Statuses that say: not now."""
RETRY = Backoff(first=0.25, longest=15.0)
DATABASE_RETRY = Backoff(first=0.1, longest=2.0)
EXPIRED = b'"response":null,"error":{"code":"batch_expired"'
"""In the results of a line that has expired; in texts quotes are escaped."""
MAX_WRITTEN = 64
"""Answers that are written in one transaction."""


class LeaseLost(Exception):
    """Another gateway has the batch, or it is gone."""


class BatchLimits(NamedTuple):
    """What bounds batches."""

    max_lines: int
    max_line: int
    """Bytes of a line."""
    concurrency: int
    """Lines of one gateway under way."""
    lease: float
    """Seconds after which another gateway goes on with the batches of one that says nothing."""
    retention: float
    """Seconds that the files of a batch stay."""


@dataclass(slots=True)
class BatchPartCount:
    """How much of a batch's results is in one of its files."""

    lines: int = 0
    size: int = 0
    """Bytes."""
    expired: int = 0
    """Lines that say so."""


class _WindowEnded(Exception):
    """The batch has expired."""


class _BatchCancelled(Exception):
    """The client cancels the batch."""


class _InputUnusable(Exception):
    """The batch's input cannot be used."""

    def __init__(self, *errors: BatchLineError) -> None:
        self.errors = errors


class BatchRun:
    """Owns a batch's record and results for as long as its lease holds."""

    def __init__(
        self,
        database: Database,
        files: FileStore,
        window: BatchWindow,
        answer: AnswerLine,
        limits: BatchLimits,
        batch: BatchObject,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`batch`: as it was claimed. `clock`: seconds since the epoch."""
        self._database, self._files, self._window, self._answer = database, files, window, answer
        self._limits, self._clock = limits, clock
        self._record, self._state = batch
        self._saving = asyncio.Lock()
        self._results: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(limits.concurrency)
        self._parts = {failed: BatchPartCount() for failed in (False, True)}
        self._results_version: int | None = None
        """Of the record of the results, as this gateway took it; None: they were not read yet, and nothing counted."""

    async def run(self) -> None:
        """Ends with the batch, or quietly where another gateway has it. Cancelling it gives it to the next one."""
        extra = {"batch": self._record.id}
        log.info("batch claimed", extra={**extra, "status": self._state.status})
        try:
            await self._run()
            log.info("batch ended", extra={**extra, "status": self._state.status})
        except (LeaseLost, RecordUnknown):
            log.warning("batch lost to another gateway", extra=extra)
        except DatabaseUnavailable as error:
            log.warning("batch given up for now", extra={**extra, "error": str(error)})
            await self._release()
        except asyncio.CancelledError:
            await self._release()
            raise

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self._keep())
                await self._work()
                keeping.cancel()
        except BaseExceptionGroup as errors:
            match innermost(errors):
                case _BatchCancelled():
                    await self._read_results()
                    await self._end("cancelled")
                case _WindowEnded():
                    await self._expire()
                    await self._end("expired")
                case _InputUnusable() as unusable:
                    await self._read_results()
                    await self._end("failed", errors=unusable.errors)
                case LeaseLost() | RecordUnknown() | DatabaseUnavailable() as error:
                    raise error from None
                case error:  # one batch must not end the streams of all clients
                    log.error("bug in a batch", exc_info=error, extra={"batch": self._record.id})
                    await self._read_results()
                    await self._end("failed", errors=(BatchLineError("internal_error", "internal error"),))

    # The lease.

    async def _keep(self) -> None:
        """Renews the lease, and says how far the batch is. Raises LeaseLost, _BatchCancelled, _WindowEnded."""
        while True:
            await asyncio.sleep(min(1.0, self._limits.lease / 4))
            await self._patiently(lambda: self._save(lambda state: state))
            self._check()

    def _check(self) -> None:
        if self._state.status == "cancelling":
            raise _BatchCancelled
        if self._clock() >= self._state.expires_at and self._state.status in ("validating", "in_progress"):
            raise _WindowEnded

    async def _save(self, change: Callable[[BatchState], BatchState], **fields: Any) -> None:
        """Writes the batch with a change, and renews its lease. Where a client's cancel came first that is adopted, and
        nothing changed. Raises LeaseLost, DatabaseUnavailable."""
        async with self._saving:
            if self._state.ended:
                return
            state = change(self._state)
            if self._results_version is not None:
                failed = self._parts[True]
                counts = {"completed": self._parts[False].lines, "failed": failed.lines, "expired": failed.expired}
                state = msgspec.structs.replace(state, **counts)
            due = self._clock() + self._limits.lease
            changed = {"value": msgspec.json.encode(state), "due": due, **fields}
            written = await self._database.replace(self._record.changed(**changed))
            if written is not None:
                self._record, self._state = written, state
                return
            found = await self._database.get(self._record.kind, self._record.id)
            if found is None or found.holder != self._record.holder:
                raise LeaseLost
            self._record, self._state = batch_of(found)

    async def _release(self) -> None:
        """Lets the next gateway go on at once."""
        with suppress(DatabaseUnavailable, RecordUnknown, LeaseLost):
            await self._save(lambda state: state, due=self._clock(), holder="")

    async def _patiently(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Tries again while the database is away, until the lease has ended. Raises LeaseLost."""
        tries = 0
        while True:
            try:
                return await operation()
            except DatabaseUnavailable as error:
                if self._record.due is not None and self._clock() >= self._record.due:
                    raise LeaseLost from None
                log.warning("batch waits for the database", extra={"batch": self._record.id, "error": str(error)})
            await asyncio.sleep(DATABASE_RETRY.pause(tries))
            tries += 1

    # The lines.

    async def _work(self) -> None:
        self._check()
        if self._state.status == "finalizing":
            await self._read_results()
        else:
            source = await self._source()
            if source is None:
                raise _InputUnusable(_INPUT_GONE)
            if self._state.status == "validating":
                await self._validate(source)
            await self._answer_all(source)
            if sum(part.lines for part in self._parts.values()) < self._state.total:
                raise _InputUnusable(_INPUT_GONE)  # while it was read
            await self._move(lambda state: state.moved("finalizing", self._clock()))
        await self._end("completed")

    async def _source(self) -> BatchInput | None:
        """The input; None where it is gone."""
        try:
            file = await self._files.get(self._record.owner, self._state.input_file_id)
        except RequestError:
            return None
        return BatchInput(self._files, file, self._state.endpoint, self._limits.max_line)

    async def _validate(self, source: BatchInput) -> None:
        report = await source.validate(self._limits.max_lines)
        if report.errors:
            raise _InputUnusable(*report.errors)
        await self._move(lambda state: state.moved("in_progress", self._clock(), total=report.requests))

    async def _move(self, change: Callable[[BatchState], BatchState]) -> None:
        """Raises _BatchCancelled where the client was first."""
        await self._patiently(lambda: self._save(change))
        self._check()

    async def _answer_all(self, source: BatchInput) -> None:
        answered = await self._read_results()
        slots = asyncio.Semaphore(self._limits.concurrency)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write())
            async with asyncio.TaskGroup() as lines:
                async for number, request in source.requests():
                    if number not in answered:
                        await slots.acquire()
                        lines.create_task(self._answer_line(number, request, slots))
            await self._results.put(None)
            await writing

    async def _read_results(self) -> set[int]:
        """The lines that have an answer; counts them anew. Nobody who took the results before adds to them any more:
        no other gateway, and no writing of this one that was given up. Raises LeaseLost."""
        version = await self._take_results()
        parts = {failed: BatchPartCount() for failed in (False, True)}
        answered: set[int] = set()
        position = -1
        while chunks := await self._database.chunks(RESULTS, self._record.id, position):
            for position, data in chunks:
                answered.add(position)
                _count(parts, data)
        self._parts, self._results_version = parts, version
        return answered

    async def _take_results(self) -> int:
        """Makes the record of the results, or replaces the one of who had the batch before; returns its version."""
        made = Record(
            kind=RESULTS,
            id=self._record.id,
            owner=self._record.owner,
            created=self._clock(),
            expires=self._record.expires,
            value=b"",
        )
        await self._database.insert(made)
        taken = None
        while taken is None:
            found = await self._database.get(RESULTS, self._record.id)
            if found is None:
                raise RecordUnknown(self._record.id)
            # The lease is looked at between both, so that a gateway that has lost it takes nothing from its follower.
            await self._save(lambda state: state)
            taken = await self._database.replace(found)
        return taken.version

    async def _answer_line(self, number: int, request: BatchRequest, slots: asyncio.Semaphore) -> None:
        try:
            asked = request._replace(body=_with_priority(request.body))
            tries = 0
            while True:
                async with self._window.line():
                    answer = await self._answer(asked, KeyName(self._record.owner))
                if answer.status not in BUSY:
                    break
                await asyncio.sleep(RETRY.pause(tries))
                tries += 1
            failed = answer.status != 200
            await self._results.put((number, mark(failed=failed) + answered_line(request, answer)))
        finally:
            slots.release()

    async def _write(self) -> None:
        """Writes answers as they come, together where many do."""
        while (result := await self._results.get()) is not None:
            results = dict([result])
            while len(results) < MAX_WRITTEN and not self._results.empty():
                if (more := self._results.get_nowait()) is None:
                    self._results.put_nowait(None)
                    break
                results[more[0]] = more[1]
            await self._patiently(partial(self._add, results))
            for data in results.values():
                _count(self._parts, data)

    async def _add(self, results: dict[int, bytes]) -> None:
        await self._database.add_chunks(RESULTS, self._record.id, results, self._results_version)

    # The end.

    async def _expire(self) -> None:
        """Every line without an answer gets an error in place of one."""
        source = None if self._state.status == "validating" else await self._source()
        answered = await self._read_results()
        if source is None:
            return
        async for number, request in source.requests():
            if number not in answered:
                bad = BadLine(request.id, request.custom_id, "batch_expired", "the completion window has ended")
                data = mark(failed=True) + refused_line(bad)
                await self._add({number: data})
                _count(self._parts, data)

    async def _end(self, status: BatchStatus, errors: tuple[BatchLineError, ...] = ()) -> None:
        """Makes the files of what was answered, and ends the batch; as cancelled, where the client has cancelled it
        meanwhile. Raises LeaseLost."""
        await self._patiently(lambda: self._finish(status, errors))
        if not self._state.ended:
            await self._patiently(lambda: self._finish("cancelled", ()))

    async def _finish(self, status: BatchStatus, errors: tuple[BatchLineError, ...]) -> None:
        given = self._state.output_expires_after
        seconds = self._limits.retention if given is None else given
        expires = self._clock() + max(self._limits.retention, seconds)
        results = await self._database.get(RESULTS, self._record.id)
        if results is not None:
            await self._database.replace(results.changed(expires=expires))
        ids: dict[bool, str | None] = {False: None, True: None}
        for failed in ids:
            if self._parts[failed].lines:
                part, size = BatchPart(self._record.id, failed), self._parts[failed].size
                ids[failed] = await self._files.add_part(self._record.owner, part, size, seconds)
        now = self._clock()
        await self._save(
            lambda state: state.moved(status, now, errors=errors, output_file_id=ids[False], error_file_id=ids[True]),
            due=None,
            holder="",
            expires=expires,
        )


_INPUT_GONE = BatchLineError("input_file_gone", "the input file is not there any more", param="input_file_id")


def _count(parts: dict[bool, BatchPartCount], data: bytes) -> None:
    """Counts one line of the results in its part."""
    part = parts[data[:1] == mark(failed=True)]
    part.lines += 1
    part.size += len(data) - 1
    part.expired += EXPIRED in data


def _with_priority(body: bytes) -> bytes:
    """A request's body with the priority of batches, unless it has one."""
    fields = FIELDS.decode(body)
    if "priority" in fields:
        return body
    return msgspec.json.encode({**fields, "priority": BATCH_PRIORITY})
