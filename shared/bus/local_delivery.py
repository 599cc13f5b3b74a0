"""A shorter way between actors of one process: what one sends to another is handed over, and passes no server.

Only for subjects that one receiver alone hears, and that are named beforehand. All else, and all that others have to
hear (lifecycles, control, questions), goes over the bus as always. Knows no NATS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from shared.bus import Bus, Endpoint, Handler, Offer, Responder, Subscription, Tap, UndeliveredHandler
from shared.topics import Topic

M = TypeVar("M")


class _Receiver(NamedTuple):
    offer: Offer[Any]
    handler: Handler[Any]


class LocalReceivers:
    """Owns who in this process receives what is sent on each of some subjects."""

    def __init__(self, topics: Collection[Topic[Any]]) -> None:
        """`topics`: those that an actor of this process alone receives. Raises ValueError for one with a queue group,
        which others may share."""
        if shared := [topic.subject for topic in topics if topic.queue is not None]:
            raise ValueError(f"subjects of several receivers: {', '.join(shared)}")
        self._subjects = frozenset(topic.subject for topic in topics)
        self._receivers: dict[str, _Receiver] = {}

    def add(self, subject: str, offer: Offer[Any], handler: Handler[Any]) -> bool:
        """Takes a receiver, where its subject is one of those; whether it did."""
        if subject not in self._subjects:
            return False
        self._receivers[subject] = _Receiver(offer, handler)
        return True

    def remove(self, subject: str) -> None:
        """Nobody receives here any more: what is sent from now on goes over the bus, where that shows."""
        self._receivers.pop(subject, None)

    async def take(self, subject: str, message: Any) -> bool:
        """Hands a message over; False where nobody here receives it. Waits for a receiver whose inbox is full, so that
        nothing overtakes what waits."""
        receiver = self._receivers.get(subject)
        if receiver is None:
            return False
        if not receiver.offer(message):
            await receiver.handler(message)
        return True


class _LocalSubscription:
    """A subscription on the bus, whose receiver is known here as long as it runs."""

    def __init__(self, subscription: Subscription, subject: str, receivers: LocalReceivers) -> None:
        self._subscription, self._subject, self._receivers = subscription, subject, receivers

    async def stop(self) -> None:
        """See `Subscription.stop`."""
        self._receivers.remove(self._subject)
        await self._subscription.stop()


class LocalDeliveryBus:
    """One actor's connection to the bus, with the shorter way to `receivers`. A message is handed over as it is, so it
    has to be frozen, as all are. Taps do not hear of it."""

    def __init__(self, bus: Bus, receivers: LocalReceivers) -> None:
        self._bus, self._receivers = bus, receivers

    @property
    def connected(self) -> bool:
        """See `Bus.connected`."""
        return self._bus.connected

    @property
    def max_payload(self) -> int:
        """See `Bus.max_payload`; what is handed over may be larger."""
        return self._bus.max_payload

    def liveness_now(self) -> float:
        """See `Bus.liveness_now`."""
        return self._bus.liveness_now()

    def outage(self) -> float:
        """See `Bus.outage`."""
        return self._bus.outage()

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """See `Bus.publish`. While the bus is away, what has its receiver here still arrives."""
        if not await self._receivers.take(topic.subject, message):
            await self._bus.publish(topic, message, confirm=confirm)

    async def subscribe(self, topic: Topic[M], handler: Handler[M], *, offer: Offer[M] | None = None) -> Subscription:
        """See `Bus.subscribe`; with `offer`, also for what actors of this process send."""
        subscription = await self._bus.subscribe(topic, handler, offer=offer)
        if offer is None or not self._receivers.add(topic.subject, offer, handler):
            return subscription
        return _LocalSubscription(subscription, topic.subject, self._receivers)

    async def serve(self, topic: Topic[M], responder: Responder[M]) -> Subscription:
        """See `Bus.serve`."""
        return await self._bus.serve(topic, responder)

    async def tap(self, pattern: str, handler: Tap) -> Subscription:
        """See `Bus.tap`."""
        return await self._bus.tap(pattern, handler)

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """See `Bus.request`."""
        return await self._bus.request(topic, message, reply_type, timeout)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        """See `Bus.on_undelivered`."""
        self._bus.on_undelivered(handler)

    async def serve_micro(self, name: str, version: str, description: str, endpoints: Mapping[str, Endpoint]) -> None:
        """See `Bus.serve_micro`."""
        await self._bus.serve_micro(name, version, description, endpoints)

    async def request_raw(self, subject: str, body: bytes, timeout: float) -> bytes:
        """See `Bus.request_raw`."""
        return await self._bus.request_raw(subject, body, timeout)

    async def flush(self) -> None:
        """See `Bus.flush`."""
        await self._bus.flush()

    async def close(self) -> None:
        """See `Bus.close`."""
        await self._bus.close()
