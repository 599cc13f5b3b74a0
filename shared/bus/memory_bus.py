"""The bus within one process: same interface, same encoding, same delivery rules, no server."""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from shared.bus import (
    Endpoint,
    Handler,
    NoResponders,
    PayloadTooLarge,
    ReplyError,
    ReplyTimeout,
    Responder,
    Tap,
    Undelivered,
    UndeliveredHandler,
)
from shared.bus.codec import Undecodable, decode, decode_received, encode
from shared.bus.concurrent_requests import ConcurrentRequests
from shared.topics import Topic

M = TypeVar("M")
log = logging.getLogger(__name__)

PENDING_LIMIT = 65_536
"""The most messages that a subscription queues; further ones are dropped, as NATS does with a slow consumer."""

MAX_SUBJECTS = 4096
"""Subjects whose subscribers are remembered; above it all are looked up again."""

_Reply = Callable[[Any], None]
_Deliver = Callable[[str, bytes, _Reply | None], Awaitable[None]]


class MemorySubscription:
    """Owns one subscriber's queue and the task that empties it."""

    def __init__(self, topic: Topic[Any], deliver: _Deliver) -> None:
        self.topic = topic
        self._deliver = deliver
        self._queue: asyncio.Queue[tuple[str, bytes, _Reply | None] | None] = asyncio.Queue(PENDING_LIMIT)
        self._task = asyncio.create_task(self._run())
        self.open = True

    def offer(self, subject: str, payload: bytes, reply: _Reply | None) -> None:
        """Queues one message; drops it, and says so in the log, where the subscriber is too slow."""
        if not self._queue.full():
            self._queue.put_nowait((subject, payload, reply))
        else:
            log.error("slow consumer, message dropped", extra={"subject": self.topic.subject})

    async def _run(self) -> None:
        while (item := await self._queue.get()) is not None:
            await self._deliver(*item)

    async def stop(self) -> None:
        """Takes no more messages; those in the queue are still handed over."""
        if self.open:
            self.open = False
            await self._queue.put(None)

    async def join(self) -> None:
        """Ends the task that hands messages over, whatever is left."""
        await self.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _Members:
    """Owns what all connections of one bus share."""

    def __init__(self) -> None:
        self.subscriptions: list[MemorySubscription] = []
        self.matching: dict[str, list[MemorySubscription]] = {}
        """By subject, as far as looked up since the last new subscription; also those that have stopped since."""
        self.turn: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self.endpoints: dict[str, Endpoint] = {}
        self.requests: list[ConcurrentRequests] = []

    def add(self, subscription: MemorySubscription) -> None:
        self.subscriptions.append(subscription)
        self.matching.clear()


class MemoryBus:
    """One connection. Services under test share one; in a process of several services each has its own (`connection`),
    as undelivered messages come back to the connection that sent them."""

    def __init__(
        self,
        max_payload: int = 8 * 2**20,
        liveness: Callable[[], float] = time.monotonic,
        members: _Members | None = None,
    ) -> None:
        self._members = _Members() if members is None else members
        self._undelivered: UndeliveredHandler | None = None
        self._max_payload = max_payload
        self._liveness = liveness

    def connection(self) -> MemoryBus:
        """Another connection to the same bus."""
        return MemoryBus(self._max_payload, self._liveness, self._members)

    @property
    def connected(self) -> bool:
        """Always true: this bus is never away."""
        return True

    @property
    def max_payload(self) -> int:
        """The limit in bytes that the bus was made with."""
        return self._max_payload

    def liveness_now(self) -> float:
        """The clock that was given; the bus is never away."""
        return self._liveness()

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """See `Bus.publish`; the message is encoded, so a receiver never shares an object with the sender."""
        if not self._send(topic, message, None) and confirm:
            await self._report(Undelivered(topic, message))

    async def _report(self, undelivered: Undelivered) -> None:
        if self._undelivered is not None:
            await self._undelivered(undelivered)
        else:
            log.warning("no subscriber", extra={"subject": undelivered.topic.subject})

    def _send(self, topic: Topic[Any], message: Any, reply: _Reply | None) -> bool:
        payload = encode(message)
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(topic.subject, len(payload), self._max_payload)
        receivers = self._receivers(topic.subject)
        for receiver in receivers:
            receiver.offer(topic.subject, payload, reply)
        return bool(receivers)

    def _receivers(self, subject: str) -> list[MemorySubscription]:
        members = self._members
        matching = members.matching.get(subject)
        if matching is None:
            if len(members.matching) >= MAX_SUBJECTS:
                members.matching.clear()
            matching = [each for each in members.subscriptions if fnmatch.fnmatchcase(subject, each.topic.subject)]
            members.matching[subject] = matching
        everyone: list[MemorySubscription] = []
        groups: defaultdict[str, list[MemorySubscription]] = defaultdict(list)
        for subscription in matching:
            if subscription.open:
                queue = subscription.topic.queue
                (everyone if queue is None else groups[queue]).append(subscription)
        for group in groups.values():
            everyone.append(group[next(members.turn[subject]) % len(group)])
        return everyone

    async def subscribe(self, topic: Topic[M], handler: Handler[M]) -> MemorySubscription:
        """See `Bus.subscribe`; each subscription has a task of its own."""

        async def deliver(subject: str, payload: bytes, reply: _Reply | None) -> None:
            try:
                message = decode_received(payload, topic)
            except Undecodable:
                return
            await handler(message)

        return self._add(topic, deliver)

    async def serve(self, topic: Topic[M], responder: Responder[M]) -> MemorySubscription:
        """See `Bus.serve`."""
        requests = ConcurrentRequests()
        self._members.requests.append(requests)

        async def answer(message: M, reply: _Reply | None) -> None:
            answered = await responder(message)
            if reply is not None:
                reply(encode(answered))

        async def deliver(subject: str, payload: bytes, reply: _Reply | None) -> None:
            try:
                message = decode_received(payload, topic)
            except Undecodable as error:
                if reply is not None:
                    reply(ReplyError(str(error)))
                return
            await requests.start(answer(message, reply))

        return self._add(topic, deliver)

    async def tap(self, pattern: str, handler: Tap) -> MemorySubscription:
        """See `Bus.tap`; counts as a subscriber, too."""

        async def deliver(subject: str, payload: bytes, reply: _Reply | None) -> None:
            await handler(subject, payload)

        return self._add(Topic(pattern.replace(">", "*"), bytes), deliver)

    def _add(self, topic: Topic[Any], deliver: _Deliver) -> MemorySubscription:
        subscription = MemorySubscription(topic, deliver)
        self._members.add(subscription)
        return subscription

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """See `Bus.request`; the first reply counts."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def resolve(value: Any) -> None:
            if not reply.done():
                reply.set_result(value)

        if not self._send(topic, message, resolve):
            raise NoResponders(topic.subject)
        try:
            answer = await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            raise ReplyTimeout(topic.subject) from None
        if isinstance(answer, ReplyError):
            raise answer
        return decode(answer, reply_type)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        """See `Bus.on_undelivered`, for this connection."""
        self._undelivered = handler

    async def serve_micro(self, name: str, version: str, description: str, endpoints: Mapping[str, Endpoint]) -> None:
        """See `Bus.serve_micro`; of two endpoints on one subject the later one serves."""
        self._members.endpoints.update(endpoints)

    async def request_raw(self, subject: str, body: bytes, timeout: float) -> bytes:
        """See `Bus.request_raw`."""
        endpoint = self._members.endpoints.get(subject)
        if endpoint is None:
            raise NoResponders(subject)
        try:
            return await asyncio.wait_for(endpoint(body), timeout)
        except TimeoutError:
            raise ReplyTimeout(subject) from None

    async def publish_raw(self, subject: str, payload: bytes) -> None:
        """Bytes as they came from elsewhere: from another bus, or, in tests, of no message of ours."""
        for receiver in self._receivers(subject):
            receiver.offer(subject, payload, None)

    async def flush(self) -> None:
        """Lets other tasks run once; there is no server to wait for."""
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Closes every connection of this bus."""
        for subscription in self._members.subscriptions:
            await subscription.join()
        for requests in self._members.requests:
            await requests.cancel()
        self._members.subscriptions.clear()
        self._members.matching.clear()
