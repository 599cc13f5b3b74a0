"""What a gateway keeps of resumable streams: its own, and copies of those of other gateways. Pure: time is an argument.

A gateway owns the streams that it supervises, and sends what they grow by to one other gateway, which keeps a copy. A
copy may be behind: its missing end is generated again, the same, by whoever takes the stream over. ADR 27.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from services.gateway.core.open_request import choice_requests
from shared.ids import FIRST_ATTEMPT, Attempt, GatewayId, Incarnation, RequestId
from shared.messages.gateway import (
    Delta,
    KeepStream,
    PositionLogprobs,
    StreamCopy,
    StreamOpened,
    StreamOpening,
    StreamsGrown,
)
from shared.messages.generation import FinishReason

MAX_STREAM_BYTES = 4 * 2**20
"""Memory of one stream, with its request: as a message it is smaller, and must fit the bus's largest (8 MiB)."""
RECORD_BYTES = 1024
"""Memory of a record and its choices without their contents; with the next two an estimate on the safe side."""
TOKEN_BYTES = 8
LOGPROB_BYTES = 400
PIECES = 256
"""Pieces of text that are joined from time to time."""


class GatewayRun(NamedTuple):
    """One run of a gateway's process."""

    gateway: GatewayId
    incarnation: Incarnation


class ChoiceRecord:
    """Owns the output of one choice as far as it was generated."""

    def __init__(self, request: RequestId) -> None:
        self.request = request
        self.opened: StreamOpened | None = None
        self.attempt = FIRST_ATTEMPT
        self.tokens = array("I")
        self.chars = 0
        self.finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._texts: list[str] = []
        self._logprobs: list[PositionLogprobs] = []

    def open(self, opened: StreamOpened) -> None:
        """Notes where the text begins; only the first time counts, as clients get it once."""
        self.attempt = max(self.attempt, opened.attempt)
        self.opened = self.opened or opened

    def append(self, delta: Delta) -> int:
        """Appends what continues the output; anything else is dropped. Returns the bytes that it takes."""
        if delta.position != len(self.tokens) or self.finish is not None:
            return 0
        self.attempt = max(self.attempt, delta.attempt)
        self.tokens.extend(delta.tokens)
        self.chars += len(delta.text)
        self._texts.append(delta.text)
        if len(self._texts) > PIECES:
            self._texts = ["".join(self._texts)]
        logprobs = delta.logprobs or ()
        self._logprobs += logprobs
        self.finish, self._stop_reason = delta.finish, delta.stop_reason
        tops = sum(1 + len(position.top) for position in logprobs)
        return TOKEN_BYTES * len(delta.tokens) + 4 * len(delta.text) + LOGPROB_BYTES * tops

    def delta(self) -> Delta | None:
        """Returns all of it at once; None where there is nothing."""
        if not self.tokens and not self.chars and self.finish is None:
            return None
        return Delta(
            self.request,
            self.attempt,
            0,
            tuple(self.tokens),
            "".join(self._texts),
            self.finish,
            self._stop_reason,
            tuple(self._logprobs) or None,
        )


class StreamRecord:
    """Owns what is kept of one stream."""

    def __init__(self, opening: StreamOpening, owner: GatewayRun | None, now: float) -> None:
        """`owner`: the gateway that supervises it; None: this one."""
        self.opening, self.owner = opening, owner
        self.choices = {request: ChoiceRecord(request) for request in choice_requests(opening.stream, opening.choices)}
        self.bytes = RECORD_BYTES * (1 + opening.choices) + len(opening.body)
        self.begun = False
        """Whether its requests were dispatched once, here or elsewhere."""
        self.billed = 0
        """Output tokens that audit lines and limits of the key have counted."""
        self.readers = 0
        """Connections that read it here; two while a client comes back before its former connection is closed."""
        self.made_at = self.used_at = now
        """When it was last of use for certain."""
        self.copied_to: GatewayRun | None = None
        """Who has been sent a copy, and all that was added since."""

    @property
    def owned(self) -> bool:
        """Whether this gateway supervises its requests."""
        return self.owner is None

    @property
    def finished(self) -> bool:
        """Whether all of its output is there."""
        return all(choice.finish is not None for choice in self.choices.values())

    @property
    def progress(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices.values())

    def copy(self) -> StreamCopy:
        """Returns all of it, for another gateway."""
        choices = self.choices.values()
        opened = tuple(choice.opened for choice in choices if choice.opened is not None)
        deltas = tuple(delta for choice in choices if (delta := choice.delta()) is not None)
        return StreamCopy(self.opening, opened, deltas, self.owned)


class StreamRecords:
    """Owns the records of streams, `max_bytes` at most. Each is forgotten `seconds` after it was last of use: an owned
    one when its client has left, a copy when its stream has finished or its owner has died, or after `max_age`."""

    def __init__(self, max_bytes: int, seconds: float, max_age: float = math.inf) -> None:
        """`max_age`: seconds that a stream may take in all."""
        self.choices: dict[RequestId, tuple[StreamRecord, ChoiceRecord]] = {}
        """By request: output of others is none of `record`'s business."""
        self._max_bytes, self._seconds, self._max_age = max_bytes, seconds, max_age
        self._records: dict[str, StreamRecord] = {}
        """The one that was used longest ago first, roughly."""
        self._grown: list[StreamOpened | Delta] = []
        """Output of owned streams that has not been copied yet."""
        self._forgotten: list[tuple[GatewayId, str]] = []
        """Whose copies of which streams are of no use any more."""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, stream: str) -> StreamRecord | None:
        """Returns what is kept of a stream."""
        return self._records.get(stream)

    def owned(self) -> Iterator[StreamRecord]:
        """Yields the streams that this gateway supervises."""
        return (record for record in self._records.values() if record.owned)

    @property
    def to_send(self) -> bool:
        """Whether `take_grown` or `take_forgotten` may have something for other gateways."""
        return bool(self._grown or self._forgotten)

    # Records come and go.

    def open(self, opening: StreamOpening, now: float) -> StreamRecord | None:
        """Makes a record of a new stream of this gateway; None where there is no room for it."""
        record = StreamRecord(opening, None, now)
        return record if self._add(record) else None

    def keep(self, message: KeepStream, now: float) -> None:
        """Makes a copy of another gateway's stream, unless there is no room, or it was taken over here meanwhile."""
        known = self._records.get(message.opening.stream)
        if known is not None and known.owned:
            return
        self.forget(message.opening.stream)
        self._add(StreamRecord(message.opening, GatewayRun(message.owner, message.incarnation), now))

    def adopt(self, copy: StreamCopy, now: float) -> StreamRecord | None:
        """Makes this gateway the owner of a stream, with the copy's output; None where there is no room for it."""
        self.forget(copy.opening.stream)
        record = self.open(copy.opening, now)
        for opened in copy.opened:
            self._open_choice(opened)
        for delta in copy.deltas:
            self._append(delta)
        if record is not None:
            record.begun, record.billed = True, record.progress
        return record

    def hand_over(self, record: StreamRecord, owner: GatewayRun, now: float) -> None:
        """Makes an owned stream the copy of one that `owner` goes on with."""
        record.owner, record.used_at = owner, now
        self._forget_copy(record)

    def forget(self, stream: str) -> None:
        """Drops a record, if there is one."""
        record = self._records.pop(stream, None)
        if record is None:
            return
        for request in record.choices:
            del self.choices[request]
        self.bytes -= record.bytes
        self._forget_copy(record)

    def _forget_copy(self, record: StreamRecord) -> None:
        if record.copied_to is not None:
            self._forgotten.append((record.copied_to.gateway, record.opening.stream))
            record.copied_to = None

    def _add(self, record: StreamRecord) -> bool:
        if record.bytes > MAX_STREAM_BYTES or not self._make_room(record.bytes):
            return False
        self._records[record.opening.stream] = record
        self.choices |= {choice.request: (record, choice) for choice in record.choices.values()}
        self.bytes += record.bytes
        return True

    def _make_room(self, size: int) -> bool:
        """Forgets finished streams that nobody reads, the oldest first. Returns whether there is room then."""
        if self.bytes + size > self._max_bytes:
            for record in [r for r in self._records.values() if r.finished and not r.readers]:
                self.forget(record.opening.stream)
                if self.bytes + size <= self._max_bytes:
                    break
        return self.bytes + size <= self._max_bytes

    # Output.

    def record(self, output: StreamOpened | Delta) -> None:
        """Takes what this gateway's supervisor has accepted, and drops what is not of `choices`."""
        entry = self.choices.get(output.request)
        if entry is None or not entry[0].owned:
            return
        if isinstance(output, StreamOpened):
            self._open_choice(output)
        else:
            self._append(output)
        self._grown.append(output)

    def grow(self, message: StreamsGrown, now: float) -> None:
        """Takes what copies have grown by. What does not continue one is dropped: the copy stays behind."""
        outputs: list[StreamOpened | Delta] = [*message.opened, *message.deltas]
        for output in outputs:
            entry = self.choices.get(output.request)
            if entry is None or entry[0].owner is None or entry[0].owner.gateway != message.owner:
                continue
            entry[0].used_at = now
            if isinstance(output, StreamOpened):
                self._open_choice(output)
            else:
                self._append(output)

    def _open_choice(self, opened: StreamOpened) -> None:
        if (entry := self.choices.get(opened.request)) is not None:
            entry[1].open(opened)

    def _append(self, delta: Delta) -> None:
        """A stream that grows too large is forgotten: it goes on, and cannot be resumed any more."""
        if (entry := self.choices.get(delta.request)) is None:
            return
        record, choice = entry
        size = choice.append(delta)
        record.bytes += size
        self.bytes += size
        if record.bytes > MAX_STREAM_BYTES or not self._make_room(0):
            self.forget(record.opening.stream)

    def fail(self, request: RequestId) -> None:
        """A request was given up, and its stream ends with an error."""
        if (entry := self.choices.get(request)) is not None and entry[0].owned:
            self.forget(entry[0].opening.stream)

    # Copies at other gateways.

    def take_grown(self, owner: GatewayId) -> dict[GatewayId, StreamsGrown]:
        """Returns what `owner`, this gateway, is to send to those who keep copies, since the last call."""
        opened: dict[GatewayId, list[StreamOpened]] = {}
        deltas: dict[GatewayId, list[Delta]] = {}
        grown, self._grown = self._grown, []
        for output in grown:
            entry = self.choices.get(output.request)
            if entry is None or entry[0].copied_to is None:
                continue
            peer = entry[0].copied_to.gateway
            if isinstance(output, StreamOpened):
                opened.setdefault(peer, []).append(output)
            else:
                deltas.setdefault(peer, []).append(output)
        return {
            peer: StreamsGrown(owner, tuple(opened.get(peer, ())), tuple(deltas.get(peer, ())))
            for peer in {*opened, *deltas}
        }

    def take_forgotten(self) -> list[tuple[GatewayId, str]]:
        """Returns whose copies of which streams have become useless since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def expire(self, alive: Collection[GatewayRun], now: float) -> list[StreamRecord]:
        """Forgets what nobody has come back for in time. Returns those that this gateway supervised."""
        expired: list[StreamRecord] = []
        for record in list(self._records.values()):
            if record.owned:
                of_use = record.readers > 0
            else:
                of_use = record.owner in alive and not record.finished and now - record.made_at < self._max_age
            if of_use:
                record.used_at = now
            elif now - record.used_at > self._seconds:
                self.forget(record.opening.stream)
                if record.owned:
                    expired.append(record)
        return expired


def newest_attempt(record: StreamRecord) -> Attempt:
    """Returns the newest attempt of any choice that the record knows of."""
    return max(choice.attempt for choice in record.choices.values())
