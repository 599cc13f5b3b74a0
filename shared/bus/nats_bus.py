"""The bus over NATS. With `nats_connection`, which opens it, and `nats_client`, from which both have the
library, the only module that knows `nats`.

Core NATS, no JetStream. "No responders" comes back at once because messages that need a receiver carry a
reply subject; `max_payload` is read from the server and checked before each publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shared.bus import (
    BusError,
    Endpoint,
    EndpointError,
    Handler,
    NoResponders,
    Offer,
    PayloadTooLarge,
    ReplyError,
    ReplyTimeout,
    ReplyTooLarge,
    Responder,
    Tap,
    UndeliveredHandler,
)
from shared.bus.codec import Undecodable, decode, decode_received, encode
from shared.bus.concurrent_requests import ConcurrentRequests
from shared.bus.liveness import LivenessClock
from shared.bus.nats_client import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    Msg,
    NatsNativeSubscription,
    PromptClient,
    Request,
    nats,
)
from shared.bus.nats_wire import DirectReceivers
from shared.bus.unconfirmed import KEEP_SECONDS, Unconfirmed
from shared.telemetry.metrics import BUS_DROPPED
from shared.topics import Topic

M = TypeVar("M")
log = logging.getLogger(__name__)

ERROR_REPLY = "Baton-Error"
TOO_LARGE_REPLY = "Baton-Reply-Bytes"


class NatsSubscription:
    """A subscription of the NATS client, stopped without an error where the connection has gone before."""

    def __init__(self, native: NatsNativeSubscription) -> None:
        self._native = native
        self._direct: DirectReceivers | None = None

    def receive_directly(self, topic: Topic[M], offer: Offer[M], direct: DirectReceivers) -> None:
        """Has messages taken by `offer` as they are read, where none before them waits for the handler."""
        native = self._native

        def receive(payload: bytes) -> bool:
            if native._pending_queue._unfinished_tasks:  # type: ignore[attr-defined]
                return False
            try:
                return offer(decode_received(payload, topic))
            except Undecodable:
                return True

        direct.add(native._id, receive)
        self._direct = direct

    async def stop(self) -> None:
        """Unsubscribes; messages that the client has already received are still handed over."""
        try:
            with _heeding_cancellation():
                await self._native.drain()  # type: ignore[no-untyped-call]
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError, nats.errors.Error):
            log.debug("subscription was gone before it was stopped")
        finally:
            if self._direct is not None:
                self._direct.remove(self._native._id)


class NatsBus:
    """Owns one connection. It reconnects for ever and without errors; `liveness_now` is paused meanwhile."""

    def __init__(self, client: PromptClient, namespace: str, liveness: LivenessClock) -> None:
        self._client = client
        self._prefix = f"{namespace}."
        self._liveness = liveness
        self._undelivered: UndeliveredHandler | None = None
        self._confirm_prefix = client.new_inbox()
        self._unconfirmed = Unconfirmed()
        self._forgetting: asyncio.TimerHandle | None = None
        """While there are unconfirmed messages."""
        self._requests: list[ConcurrentRequests] = []

    @property
    def connected(self) -> bool:
        """Whether the client has a server at this moment."""
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes; the server's limit, as it said at the connect."""
        return self._client.max_payload

    def liveness_now(self) -> float:
        """See `Bus.liveness_now`; the clock is also paused for `GRACE_AFTER_RECONNECT` seconds after a reconnect."""
        return self._liveness.now()

    def outage(self) -> float:
        """See `Bus.outage`; a return for less than `GRACE_AFTER_RECONNECT` seconds ends none."""
        return self._liveness.outage()

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """See `Bus.publish`; up to `PENDING_BYTES` are buffered while the server is away."""
        payload = self._payload(topic, message)
        reply = f"{self._confirm_prefix}.{self._unconfirmed.add(topic, payload)}" if confirm else ""
        if confirm and self._forgetting is None:
            self._forget_later()
        subject = self._prefix + topic.subject
        try:
            if not self._client.publish_at_once(subject, payload, reply):
                await self._client.publish(subject, payload, reply)
        except nats.errors.OutboundBufferLimitError:
            BUS_DROPPED.labels("buffer_full").inc()
            log.error("bus away and its buffer full, message dropped", extra={"subject": topic.subject})

    def _forget_later(self) -> None:
        self._forgetting = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self._unconfirmed.forget_old(away=self._liveness.outage() > 0.0)
        if len(self._unconfirmed):
            self._forget_later()

    def _payload(self, topic: Topic[Any], message: Any) -> bytes:
        payload = encode(message)
        if len(payload) > self._client.max_payload:
            raise PayloadTooLarge(topic.subject, len(payload), self._client.max_payload)
        return payload

    async def listen_for_undelivered(self) -> None:
        """Subscribes to the inbox where the server reports confirmed messages that had no subscriber. Called once."""

        async def returned(msg: Msg) -> None:
            ticket = msg.subject.rpartition(".")[2]
            message = self._unconfirmed.take(int(ticket)) if ticket.isdecimal() else None
            if message is None or not _is_no_responders(msg):
                return
            if self._undelivered is not None:
                await self._undelivered(message)
            else:
                log.warning("no subscriber", extra={"subject": message.topic.subject})

        await self._client.subscribe(f"{self._confirm_prefix}.*", cb=returned)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        """See `Bus.on_undelivered`."""
        self._undelivered = handler

    async def subscribe(
        self, topic: Topic[M], handler: Handler[M], *, offer: Offer[M] | None = None
    ) -> NatsSubscription:
        """See `Bus.subscribe`, in the topic's queue group if it has one."""

        async def received(msg: Msg) -> None:
            try:
                message = decode_received(msg.data, topic)
            except Undecodable:
                return
            await handler(message)

        subscription = await self._subscribe(topic, received)
        if offer is not None:
            subscription.receive_directly(topic, offer, self._client.direct)
        return subscription

    async def tap(self, pattern: str, handler: Tap) -> NatsSubscription:
        """See `Bus.tap`, in no queue group."""

        async def received(msg: Msg) -> None:
            await handler(msg.subject.removeprefix(self._prefix), msg.data)

        return NatsSubscription(await self._client.subscribe(self._prefix + pattern, cb=received))

    async def serve(self, topic: Topic[M], responder: Responder[M]) -> NatsSubscription:
        """See `Bus.serve`. A request that does not decode is answered with the header `Baton-Error`."""
        requests = ConcurrentRequests()
        self._requests.append(requests)

        async def answer(message: M, reply: str) -> None:
            answered = await responder(message)
            if reply:
                await self._reply(reply, encode(answered))

        async def received(msg: Msg) -> None:
            try:
                message = decode_received(msg.data, topic)
            except Undecodable as error:
                if msg.reply:
                    await self._client.publish(msg.reply, b"", headers={ERROR_REPLY: str(error)[:200]})
                return
            await requests.start(answer(message, msg.reply))

        return await self._subscribe(topic, received)

    async def _reply(self, subject: str, payload: bytes) -> None:
        """One that is too large is not waited for: whoever asked is told so, and earlier releases that it failed."""
        if (size := len(payload)) > self._client.max_payload:
            headers = {ERROR_REPLY: f"the reply has {size} bytes", TOO_LARGE_REPLY: str(size)}
            await self._client.publish(subject, b"", headers=headers)
        else:
            await self._client.publish(subject, payload)

    async def _subscribe(self, topic: Topic[Any], received: Callable[[Msg], Awaitable[None]]) -> NatsSubscription:
        subject = self._prefix + topic.subject
        return NatsSubscription(await self._client.subscribe(subject, queue=topic.queue or "", cb=received))

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """See `Bus.request`."""
        msg = await self._request(self._prefix + topic.subject, self._payload(topic, message), timeout)
        if msg.headers and TOO_LARGE_REPLY in msg.headers:
            raise ReplyTooLarge(int(msg.headers[TOO_LARGE_REPLY]), self._client.max_payload)
        if msg.headers and ERROR_REPLY in msg.headers:
            raise ReplyError(f"{topic.subject}: {msg.headers[ERROR_REPLY]}")
        try:
            return decode(msg.data, reply_type)
        except Undecodable as error:
            raise ReplyError(f"{topic.subject}: {error}") from None

    async def request_raw(self, subject: str, body: bytes, timeout: float) -> bytes:
        """See `Bus.request_raw`."""
        msg = await self._request(self._prefix + subject, body, timeout)
        if msg.headers and ERROR_CODE_HEADER in msg.headers:
            raise EndpointError(int(msg.headers[ERROR_CODE_HEADER]), msg.headers.get(ERROR_HEADER, ""))
        return bytes(msg.data)

    async def _request(self, subject: str, body: bytes, timeout: float) -> Msg:
        try:
            with _heeding_cancellation():
                return await self._client.request(subject, body, timeout=timeout)
        except nats.errors.NoRespondersError:
            raise NoResponders(subject) from None
        except (nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError):
            raise ReplyTimeout(subject) from None
        except nats.errors.ConnectionClosedError:
            raise BusError(f"{subject}: the connection is closed") from None

    async def serve_micro(self, name: str, version: str, description: str, endpoints: Mapping[str, Endpoint]) -> None:
        """See `Bus.serve_micro`, listed and monitored by NATS as a service."""
        service = await nats.micro.add_service(self._client, name=name, version=version, description=description)
        for subject, endpoint in endpoints.items():
            await service.add_endpoint(
                name=subject.replace(".", "-"),
                subject=self._prefix + subject,
                handler=_micro_handler(endpoint),
            )

    async def flush(self) -> None:
        """See `Bus.flush`."""
        try:
            for _ in range(2):  # the client's first PING overtakes what its own writer has not written yet
                with _heeding_cancellation():
                    await self._client.flush(timeout=2)
        except nats.errors.Error as error:
            raise ReplyTimeout(f"flush: {error}") from None

    async def close(self) -> None:
        """Ends the connection. Safe to call again, and where the server has ended before."""
        for requests in self._requests:
            await requests.cancel()
        if self._forgetting is not None:
            self._forgetting.cancel()
        if not self._client.is_closed:
            with contextlib.suppress(ConnectionError):  # the server has ended before, and takes no farewell
                await self._client.close()


@contextlib.contextmanager
def _heeding_cancellation() -> Iterator[None]:
    """Raises CancelledError where the task was cancelled inside and nothing came of it: before Python 3.12,
    `asyncio.wait_for`, with which the client waits, loses a cancellation that comes with the answer. A task that asks
    again and again would go on for ever, and who waits for its end, too."""
    task = asyncio.current_task()
    assert task is not None, "only tasks use the bus"
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


def _is_no_responders(msg: Msg) -> bool:
    return not msg.data and (msg.headers or {}).get("Status") == "503"


def _micro_handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[None]]:
    async def handle(request: Request) -> None:
        try:
            body = await endpoint(request.data)
        except EndpointError as error:
            body = msgspec.json.encode({"error": {"code": error.code, "message": error.text}})
            await request.respond_error(str(error.code), error.text, data=body)
        else:
            await request.respond(body)

    return handle
