"""Responses in the background: generated without their clients, and taken up by another gateway where theirs ends.

What there is of one is in the database: its request, and its events as they come. A gateway has it for `LEASE` seconds
from each time it says so. Whoever takes it up generates it again by the same seed, and stores only events that are new.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import SEED_MASK, GenerationRequest
from services.gateway.api.response import ChoiceState, GenerationResponse, ResponseHeader, ResponseWriter
from services.gateway.api.responses.answer import response_object
from services.gateway.api.responses.events import LAST, ResponseEvents
from services.gateway.api.responses.request import ResponseRequest, again, job_body
from services.gateway.database.records import Record
from services.gateway.http.access import AccessControl, KeyAdmission
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.parsing.answer_parts import Event
from services.gateway.request_table import RequestTable
from services.gateway.response_store import ENDED, ResponseStore, StoredResponse
from shared.messages.gateway import Delta

log = logging.getLogger(__name__)

LEASE = 15.0
RENEW_EVERY = 2.0
"""Seconds; after so many a gateway also knows that another one has cancelled what it generates."""
STORE_EVERY = 0.25
"""Seconds between two writes of events."""
CLAIM_EVERY = 5.0
MAX_ATTEMPTS = 5
"""Gateways that may end under a response before it fails."""


class BackgroundWriter(ResponseWriter):
    """Owns the events that are not stored yet."""

    def __init__(self, events: ResponseEvents) -> None:
        self.events = events
        self.waiting: list[Event] = []

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        self.waiting += self.events.output(choice, delta)
        return True


@dataclass(eq=False)
class BackgroundJob:
    """One response that this gateway generates."""

    record: Record
    stored: StoredResponse
    generation: GenerationRequest
    admission: KeyAdmission | None
    """None: it was admitted by another gateway."""
    writer: BackgroundWriter
    response: GenerationResponse | None = None
    renewed_at: float = -math.inf
    lost: bool = False
    """Whether somebody else has cancelled, deleted or taken it."""


class BackgroundResponses:
    """Owns the responses that this gateway generates in the background."""

    def __init__(
        self,
        gateway: str,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        store: ResponseStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`gateway`: its name. `clock`: seconds since the epoch."""
        self._gateway, self._table, self._parser, self._access = gateway, table, parser, access
        self.store, self._clock = store, clock
        self._jobs: dict[str, tuple[BackgroundJob, asyncio.Task[None]]] = {}

    async def start(
        self, call: Call, body: bytes, asked: ResponseRequest, generation: GenerationRequest, header: ResponseHeader
    ) -> dict[str, Any]:
        """Begins a response that was admitted as `generation`, and returns it as it is now. Raises RequestError where
        it cannot be stored."""
        queued = response_object(header, asked.echoed, "queued")
        with_seed = self._seeded(generation, None)
        stored = StoredResponse(
            response=queued,
            items_size=len(asked.items),
            body=job_body(body),
            added=asked.added,
            seed=with_seed.seed or 0,
        )
        record = self.store.record(call.key.name, stored).changed(due=self._clock() + LEASE, holder=self._gateway)
        await self.store.insert(record, asked.items)
        writer = BackgroundWriter(ResponseEvents(header, asked.echoed))
        self._run(BackgroundJob(record, stored, with_seed, self._access.detach(call), writer))
        return queued

    async def cancel(self, id: str, owner: str) -> dict[str, Any]:
        """Ends a response, and returns it as it is then. Raises RequestError: 404 where it is not there, 400 where it
        did not run in the background."""
        while True:
            record, stored = await self.store.find(id, owner)
            if stored.body is None:
                raise RequestError(400, "Cannot cancel a synchronous response.", param="response_id")
            if stored.status in ENDED:
                return stored.response
            cancelled = replace(stored, response=stored.response | {"status": "cancelled"})
            if await self.store.write(record, cancelled, due=None) is not None:
                break
        if (found := self._jobs.get(id)) is not None:
            self._give_up(found[0])
        return cancelled.response

    async def run(self) -> None:
        """Takes up what other gateways have left, until it is cancelled."""
        while True:
            await asyncio.sleep(CLAIM_EVERY)
            try:
                while self._can_take() and (found := await self.store.claim(self._gateway, LEASE)) is not None:
                    await self._take_up(*found)
            except RequestError as error:
                log.warning("no response was taken up", extra={"error": error.message})

    async def release(self) -> None:
        """Leaves everything to other gateways: this one ends."""
        jobs = list(self._jobs.values())
        for _, task in jobs:
            task.cancel()
        await asyncio.gather(*(task for _, task in jobs), return_exceptions=True)
        for job, _ in jobs:
            if job.record.due is not None and not job.lost:
                await self._put_back(job.record, job.stored)

    def _can_take(self) -> bool:
        return self._table.accepting and self._table.free > 0 and self._table.not_serving() is None

    async def _take_up(self, record: Record, stored: StoredResponse) -> None:
        """Goes on with what another gateway has begun."""
        stored = replace(stored, attempts=stored.attempts + 1)
        try:
            generation, asked = await self._read_again(record, stored)
            former = await self.store.all_events(record.id)
        except RequestError as error:
            if error.status in (429, 503):
                await self._put_back(record, stored, CLAIM_EVERY)
                return
            failed = ResponseEvents(_header(stored), {}).failed(error)
            ending = {name: failed[name] for name in ("status", "error")}
            await self.store.write(record, replace(stored, response=stored.response | ending), due=None)
            return
        if former and former[-1]["type"] in LAST:  # only its record does not say so yet
            try:
                await self._end(record, stored, former[-1]["response"])
            except RequestError:
                await self._put_back(record, stored, CLAIM_EVERY)
            return
        echoed = {name: stored.response.get(name, value) for name, value in asked.echoed.items()}
        log.info("response taken up", extra={"request": record.id, "attempt": stored.attempts, "events": len(former)})
        self._run(
            BackgroundJob(
                record, stored, generation, None, BackgroundWriter(ResponseEvents(_header(stored), echoed, former))
            )
        )

    async def _read_again(self, record: Record, stored: StoredResponse) -> tuple[GenerationRequest, ResponseRequest]:
        """What the response was asked for. Raises RequestError."""
        key = self._access.key_named(record.owner)
        if key is None:
            raise RequestError(403, "the API key of this response is not valid any more")
        if stored.attempts > MAX_ATTEMPTS or stored.body is None:
            raise RequestError(500, f"{stored.attempts - 1} gateways ended while they generated this response")
        items = await self.store.items(record.id, stored)
        asked: ResponseRequest = await self._parser.read("responses", again(stored.body, items))
        generation = self._access.bound(asked.generation, key)
        self._table.admit(1, generation.model.name)
        generation = await self._table.images.filled(generation)
        return self._seeded(generation, stored.seed), asked

    async def _put_back(self, record: Record, stored: StoredResponse, seconds: float = 0.0) -> None:
        """A gateway may take it up in so many seconds."""
        try:
            due = self._clock() + seconds
            await self.store.write(record, replace(stored, attempts=stored.attempts - 1), due=due)
        except RequestError:
            return  # the lease ends by itself

    @staticmethod
    def _seeded(generation: GenerationRequest, seed: int | None) -> GenerationRequest:
        """The request as it is generated here: whole, and the same again where that is needed."""
        drawn = secrets.randbits(63) if seed is None else seed
        return replace(
            generation, stream=None, seed=(drawn if generation.seed is None else generation.seed) & SEED_MASK
        )

    def _run(self, job: BackgroundJob) -> None:
        task = asyncio.create_task(self._generate(job), name=f"background {job.record.id}")
        self._jobs[job.record.id] = job, task
        task.add_done_callback(lambda ended: self._ended(job, ended))

    def _ended(self, job: BackgroundJob, task: asyncio.Task[None]) -> None:
        del self._jobs[job.record.id]
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("bug in a background response", exc_info=bug, extra={"request": job.record.id})

    async def _generate(self, job: BackgroundJob) -> None:
        response = job.response = await self._table.open(job.generation, _header(job.stored), job.writer, [])
        job.stored = replace(job.stored, response=job.stored.response | {"status": "in_progress"})
        try:
            while not response.ended.done():
                await asyncio.wait([response.ended], timeout=STORE_EVERY)
                await self._store_events(job)
            if not job.lost:
                await self._finish(job, response)
        finally:
            outcome = response.ended.result() if response.ended.done() else "taken over"
            await self._table.close(response, outcome)
            if job.admission is not None:
                [choice] = response.choices
                self._access.settle(job.admission, choice.prompt_tokens + choice.tokens)

    async def _store_events(self, job: BackgroundJob) -> None:
        """Stores what has come, and says from time to time that this gateway still has the job. A database that is away
        is asked again the next time."""
        try:
            if events := list(job.writer.waiting):
                if not await self.store.add_events(job.record.id, events):
                    self._give_up(job)
                    return
                del job.writer.waiting[: len(events)]
            if time.monotonic() - job.renewed_at >= RENEW_EVERY:
                await self._write(job, job.stored)
        except RequestError:
            return

    async def _write(self, job: BackgroundJob, stored: StoredResponse) -> None:
        """Raises RequestError."""
        job.renewed_at = time.monotonic()
        record = await self.store.write(job.record, stored, self._clock() + LEASE, self._gateway)
        if record is None:
            self._give_up(job)
        else:
            job.record, job.stored = record, stored

    async def _finish(self, job: BackgroundJob, response: GenerationResponse) -> None:
        """Stores how it ended. A database that stays away leaves it to the gateway that takes it up."""
        events = job.writer.events
        ended = events.finished(response.choices[0]) if response.error is None else events.failed(response.error)
        job.writer.waiting += events.end(ended)
        deadline = time.monotonic() + self._table.timeout
        while not job.lost and time.monotonic() < deadline:
            await self._store_events(job)
            try:
                if not job.writer.waiting and not job.lost:
                    written = await self._end(job.record, job.stored, ended)
                    job.lost = True
                    if written is None:
                        log.warning("response ended elsewhere", extra={"request": job.record.id})
                    return
            except RequestError:
                pass
            await asyncio.sleep(1.0)

    async def _end(self, record: Record, stored: StoredResponse, ended: dict[str, Any]) -> Record | None:
        """Writes how a response has ended, in its conversation first; see `ResponseStore.write`. Raises
        RequestError."""
        if ended.get("conversation") is not None:
            items = await self.store.items(record.id, stored)
            if not await self.store.add_to_conversation(ended, items, stored.added, record.owner):
                ended = ended | {"conversation": None}
        return await self.store.write(record, replace(stored, response=ended), due=None)

    def _give_up(self, job: BackgroundJob) -> None:
        job.lost = True
        if job.response is not None:
            job.response.end("client left")


def _header(stored: StoredResponse) -> ResponseHeader:
    response = stored.response
    return ResponseHeader("responses", response["id"], response["created_at"], response["model"])
