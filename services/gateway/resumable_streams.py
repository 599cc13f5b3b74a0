"""Resumable streams: keeps records of them, sends copies to another gateway, and takes streams over. ADR 27."""

from __future__ import annotations

import logging
import secrets

from services.gateway.api.errors import RequestError
from services.gateway.api.response import GenerationResponse, ResponseOutcome
from services.gateway.core.stream_records import GatewayRun, StreamRecord, StreamRecords
from services.gateway.metrics import RECORD_BYTES, RESUMED
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import GatewayId
from shared.messages.gateway import (
    ForgetStream,
    KeepStream,
    StreamCopy,
    StreamMessage,
    StreamOpening,
    StreamsGrown,
    StreamUnknown,
    TakeStream,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2**20
"""Of the request of a resumable stream, as it is copied."""


class ResumableStreams:
    """Owns who has copies of this gateway's streams; the records themselves are the request table's."""

    def __init__(self, bus: Bus, own: GatewayRun, peers: GatewayPeers, table: RequestTable) -> None:
        self._bus, self._own, self._peers, self._table = bus, own, peers, table
        self._records: StreamRecords = table.records

    # For the endpoints.

    async def open(self, opening: StreamOpening) -> StreamRecord:
        """Makes the record of a new stream, and a copy elsewhere. Raises RequestError: 413 for a body too large to be
        copied, 503 where there is no room."""
        if len(opening.body) > MAX_BODY_BYTES:
            text = f"body: {len(opening.body)} bytes; at most {MAX_BODY_BYTES} are allowed for a resumable stream"
            raise RequestError(413, text, param="stream_options.resumable", code="too_large")
        record = self._records.open(opening, self._bus.liveness_now())
        if record is None:
            raise _no_room()
        await self.copy_to_peer(record)
        return record

    async def take(self, stream: str, key: str) -> StreamRecord:
        """Returns the record of a stream, of which this gateway is the owner then. Another client that reads it is cut
        off. Raises RequestError: 404 where no gateway knows it for that key, 503 where there is no room."""
        record = self._own_record(stream, key)
        if record is None:
            request = TakeStream(self._own.gateway, self._own.incarnation, stream, key)
            answers = await self._peers.ask_all(request, StreamCopy | StreamUnknown)
            record = self._own_record(stream, key) or self._adopt(stream, key, list(answers.values()))
            await self.copy_to_peer(record)
        record.used_at = self._bus.liveness_now()
        return record

    async def leave(
        self, record: StreamRecord, response: GenerationResponse, outcome: ResponseOutcome, *, known_to_client: bool
    ) -> None:
        """Closes a response with a record. Generating goes on while the client may come back: not after an error, and
        not where it has read no event, as it cannot know the stream's id (`known_to_client`)."""
        stream = record.opening.stream
        if outcome == "failed" or not known_to_client:
            self._records.forget(stream)
        record.readers -= 1
        kept = self._records.get(stream) is record
        await self._table.close(response, outcome, resumable=kept and record.owned)
        await self.replicate()

    def _own_record(self, stream: str, key: str) -> StreamRecord | None:
        record = self._records.get(stream)
        if record is None or not record.owned or not _may(record, key):
            return None
        RESUMED.labels("here").inc()
        return record

    def _adopt(self, stream: str, key: str, answers: list[StreamCopy | StreamUnknown]) -> StreamRecord:
        """Takes over the best copy there is: its owner's, otherwise the longest, which may be this gateway's."""
        copies = [answer for answer in answers if isinstance(answer, StreamCopy)]
        own = self._records.get(stream)
        if own is not None and _may(own, key):
            copies.append(own.copy())
        if not copies:
            text = "Last-Event-ID: this stream is not known, or not to this key, or it ended too long ago"
            raise RequestError(404, text, param="Last-Event-ID", code="stream_not_found")
        best = max(copies, key=lambda copy: (copy.owned, sum(len(delta.tokens) for delta in copy.deltas)))
        record = self._records.adopt(best, self._bus.liveness_now())
        if record is None:
            raise _no_room()
        RESUMED.labels("handed over" if best.owned else "taken over").inc()
        log.warning("stream taken over", extra={"request": stream, "tokens": record.progress, "given": best.owned})
        return record

    # For the actor.

    async def handle(self, message: StreamMessage) -> None:
        """Takes what another gateway sends of its streams."""
        now = self._bus.liveness_now()
        match message:
            case KeepStream():
                self._records.keep(message, now)
            case StreamsGrown():
                self._records.grow(message, now)
            case ForgetStream():
                record = self._records.get(message.stream)
                if record is not None and record.owner is not None and record.owner.gateway == message.owner:
                    self._records.forget(message.stream)

    async def answer(self, request: TakeStream) -> StreamCopy | StreamUnknown:
        """Gives what is known of a stream to the gateway whose client resumes it, and gives the stream up."""
        record = self._records.get(request.stream)
        if record is None or not _may(record, request.key):
            return StreamUnknown()
        copy = record.copy()
        if record.owned:
            self._records.hand_over(record, GatewayRun(request.taker, request.incarnation), self._bus.liveness_now())
            await self._table.abandon(record.choices)
            await self.replicate()
        return copy

    async def replicate(self) -> None:
        """Sends copies what has been added to streams. To be called after each message with output."""
        for peer, grown in self._records.take_grown(self._own.gateway).items():
            await self._send(peer, grown)
        for peer, stream in self._records.take_forgotten():
            await self._send(peer, ForgetStream(self._own.gateway, stream))

    async def copy_to_peer(self, record: StreamRecord) -> None:
        """Sends a whole stream to a gateway that has no copy, if there is another gateway."""
        peers = self._peers.ready()
        if not peers:
            return
        record.copied_to = secrets.choice(peers)
        copy = record.copy()
        peer, own = record.copied_to.gateway, self._own
        await self._send(peer, KeepStream(own.gateway, own.incarnation, copy.opening))
        if copy.opened or copy.deltas:
            await self._send(peer, StreamsGrown(own.gateway, copy.opened, copy.deltas))

    async def tick(self) -> None:
        """Forgets streams that nobody resumes."""
        if self._records.choices:
            for record in self._records.expire(self._peers.lives(), self._bus.liveness_now()):
                await self._table.abandon(record.choices)
            await self.find_keepers()
        if self._records.to_send:
            await self.replicate()
        RECORD_BYTES.set(self._records.bytes)

    async def find_keepers(self) -> None:
        """Copies those streams of which there is no copy, or whose copy died with its keeper."""
        alive = self._peers.lives()
        for record in list(self._records.owned()):
            if record.copied_to not in alive:
                await self.copy_to_peer(record)

    async def _send(self, peer: GatewayId, message: StreamMessage) -> None:
        try:
            await self._bus.publish(topics.gateway_inbox(peer), message)
        except BusError as error:
            log.warning("copy not sent", extra={"to": peer, "error": str(error)})


def _may(record: StreamRecord, key: str) -> bool:
    return record.opening.key == key  # names, which are no secrets


def _no_room() -> RequestError:
    text = "stream_options.resumable: the streams that can be resumed leave no room for this one"
    return RequestError(503, text, param="stream_options.resumable", retry_after=1.0)
