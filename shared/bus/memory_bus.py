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
    Offer,
    PayloadTooLarge,
    ReplyError,
    ReplyTimeout,
    ReplyTooLarge,
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


class MemorySubscription:
    """Owns one subscriber's queue and the task that empties it. `tap`: the handler takes subject and bytes. `serves`:
    what the handler returns is the reply, and requests are answered beside each other."""

    def __init__(
        self, topic: Topic[Any], handler: Callable[..., Awaitable[Any]], *, serves: bool = False, tap: bool = False
    ) -> None:
        self.topic = topic
        self.queue: asyncio.Queue[tuple[str, bytes, _Reply | None] | None] = asyncio.Queue(PENDING_LIMIT)
        """Messages to be handed over; None: no more will come."""
        self.open = True
        self._handler = handler
        self._requests = ConcurrentRequests() if serves else None
        self._tap = tap
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (item := await self.queue.get()) is not None:
            subject, payload, reply = item
            if self._tap:
                await self._handler(subject, payload)
                continue
            try:
                message = decode_received(payload, self.topic)
            except Undecodable as error:
                if self._requests is not None and reply is not None:
                    reply(ReplyError(str(error)))
                continue
            if self._requests is None:
                await self._handler(message)
            else:
                await self._requests.start(self._answer(message, reply))

    async def _answer(self, message: Any, reply: _Reply | None) -> None:
        answer = await self._handler(message)
        if reply is not None:
            reply(encode(answer))

    async def stop(self) -> None:
        """Takes no more messages; those in the queue are still handed over."""
        if self.open:
            self.open = False
            await self.queue.put(None)

    async def join(self) -> None:
        """Ends the task that hands messages over, whatever is left."""
        await self.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._requests is not None:
            await self._requests.cancel()


class _Members:
    """Owns what all connections of one bus share."""

    def __init__(self) -> None:
        self.subscriptions: list[MemorySubscription] = []
        self.matching: dict[str, list[MemorySubscription]] = {}
        """By subject, as far as looked up since the last new subscription; also those that have stopped since."""
        self.turn: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self.endpoints: dict[str, Endpoint] = {}

    def add(self, subscription: MemorySubscription) -> MemorySubscription:
        self.subscriptions.append(subscription)
        self.matching.clear()
        return subscription


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
        self.liveness_now = liveness
        """The clock that was given; the bus is never away."""

    def connection(self) -> MemoryBus:
        """Another connection to the same bus."""
        return MemoryBus(self._max_payload, self.liveness_now, self._members)

    @property
    def connected(self) -> bool:
        """Always true: this bus is never away."""
        return True

    def outage(self) -> float:
        """Always 0.0: this bus is never away."""
        return 0.0

    @property
    def max_payload(self) -> int:
        """The limit in bytes that the bus was made with."""
        return self._max_payload

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """See `Bus.publish`; the message is encoded, so a receiver never shares an object with the sender."""
        if self._send(topic.subject, encode(message), None) or not confirm:
            return
        if self._undelivered is not None:
            await self._undelivered(Undelivered(topic, message))
        else:
            log.warning("no subscriber", extra={"subject": topic.subject})

    def _send(self, subject: str, payload: bytes, reply: _Reply | None) -> bool:
        """Queues a message for all that subscribe, and for one of each queue group; whether there is anyone. It is
        dropped, and the log says so, where a subscriber is too slow. Raises PayloadTooLarge."""
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(subject, len(payload), self._max_payload)
        members = self._members
        matching = members.matching.get(subject)
        if matching is None:
            if len(members.matching) >= MAX_SUBJECTS:
                members.matching.clear()
            matching = [each for each in members.subscriptions if fnmatch.fnmatchcase(subject, each.topic.subject)]
            members.matching[subject] = matching
        receivers: list[MemorySubscription] = []
        groups: defaultdict[str, list[MemorySubscription]] = defaultdict(list)
        for subscription in matching:
            if subscription.open:
                queue = subscription.topic.queue
                (receivers if queue is None else groups[queue]).append(subscription)
        for group in groups.values():
            receivers.append(group[next(members.turn[subject]) % len(group)])
        for receiver in receivers:
            if receiver.queue.full():
                log.error("slow consumer, message dropped", extra={"subject": receiver.topic.subject})
            else:
                receiver.queue.put_nowait((subject, payload, reply))
        return bool(receivers)

    async def subscribe(
        self, topic: Topic[M], handler: Handler[M], *, offer: Offer[M] | None = None
    ) -> MemorySubscription:
        """See `Bus.subscribe`; each subscription has a task of its own, and offers nothing."""
        return self._members.add(MemorySubscription(topic, handler))

    async def serve(self, topic: Topic[M], responder: Responder[M]) -> MemorySubscription:
        """See `Bus.serve`."""
        return self._members.add(MemorySubscription(topic, responder, serves=True))

    async def tap(self, pattern: str, handler: Tap) -> MemorySubscription:
        """See `Bus.tap`; counts as a subscriber, too."""
        return self._members.add(MemorySubscription(Topic(pattern.replace(">", "*"), bytes), handler, tap=True))

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """See `Bus.request`; the first reply counts."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def resolve(value: Any) -> None:
            if not reply.done():
                reply.set_result(value)

        if not self._send(topic.subject, encode(message), resolve):
            raise NoResponders(topic.subject)
        try:
            async with asyncio.timeout(timeout):
                answer = await reply
        except TimeoutError:
            raise ReplyTimeout(topic.subject) from None
        if isinstance(answer, ReplyError):
            raise answer
        if len(answer) > self._max_payload:
            raise ReplyTooLarge(len(answer), self._max_payload)
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
            async with asyncio.timeout(timeout):
                return await endpoint(body)
        except TimeoutError:
            raise ReplyTimeout(subject) from None

    async def publish_raw(self, subject: str, payload: bytes) -> None:
        """Bytes as they came from elsewhere: from another bus, or, in tests, of no message of ours."""
        self._send(subject, payload, None)

    async def flush(self) -> None:
        """Lets other tasks run once; there is no server to wait for."""
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Closes every connection of this bus."""
        for subscription in self._members.subscriptions:
            await subscription.join()
        self._members.subscriptions.clear()
        self._members.matching.clear()
