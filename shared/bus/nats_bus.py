"""The bus over NATS. With `nats_client`, from which it has the library, the only module that knows `nats`.

Core NATS, no JetStream. "No responders" comes back at once because messages that need a receiver carry a
reply subject; `max_payload` is read from the server and checked before each publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
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
    Client,
    EncryptedClient,
    Msg,
    NatsNativeSubscription,
    PromptClient,
    Request,
    nats,
)
from shared.bus.nats_wire import DirectReceivers
from shared.bus.unconfirmed import Unconfirmed
from shared.telemetry.metrics import BUS_CONNECTED, BUS_DROPPED
from shared.topics import Topic, inbox_prefix

M = TypeVar("M")
log = logging.getLogger(__name__)

PENDING_BYTES = 32 * 2**20
"""Bytes buffered for sending while the server is unreachable; publishing beyond them raises."""
CANCEL_AGAIN = 0.1
"""Seconds from one cancellation to the next of a task that goes on."""
RECONNECT_WAIT = 0.1
ANSWER_SECONDS = 2
"""For the first answer of a server that has let us in."""
GRACE_AFTER_RECONNECT = 2.0
SAME_ERROR_PAUSE = 60.0
"""Seconds in which an error that comes again is not logged again: each attempt to connect has one."""
ERROR_REPLY = "Baton-Error"


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bus is and who we are there."""

    servers: tuple[str, ...]
    namespace: str = "baton"
    name: str = ""
    """Shown in the server's monitoring; the instance."""
    user: str | None = None
    password: str | None = None
    credentials: Path | None = None
    """A NATS .creds file."""
    tls_ca: Path | None = None
    """What the server's certificate is checked with, in place of the system's authorities."""
    connect_timeout: float = 10.0
    """Seconds until a first connection is given up."""
    refused_timeout: float | None = None
    """Seconds until it is given up where nobody listens, or the server does not know us; default: `connect_timeout`."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the server must offer TLS: an authority or a `tls://` URL says so."""
        return self.tls_ca is not None or any(server.startswith("tls://") for server in self.servers)


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
        subject = self._prefix + topic.subject
        try:
            if not self._client.publish_at_once(subject, payload, reply):
                await self._client.publish(subject, payload, reply)
        except nats.errors.OutboundBufferLimitError:
            BUS_DROPPED.labels("buffer_full").inc()
            log.error("bus away and its buffer full, message dropped", extra={"subject": topic.subject})

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
                await self._client.publish(reply, encode(answered))

        async def received(msg: Msg) -> None:
            try:
                message = decode_received(msg.data, topic)
            except Undecodable as error:
                if msg.reply:
                    await self._client.publish(msg.reply, b"", headers={ERROR_REPLY: str(error)[:200]})
                return
            await requests.start(answer(message, msg.reply))

        return await self._subscribe(topic, received)

    async def _subscribe(self, topic: Topic[Any], received: Callable[[Msg], Awaitable[None]]) -> NatsSubscription:
        subject = self._prefix + topic.subject
        return NatsSubscription(await self._client.subscribe(subject, queue=topic.queue or "", cb=received))

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """See `Bus.request`."""
        msg = await self._request(self._prefix + topic.subject, self._payload(topic, message), timeout)
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


def _allow_websockets() -> None:
    """Raises BusError where aiohttp is not installed."""
    transport: Any = nats.aio.transport
    try:
        transport.aiohttp = importlib.import_module("aiohttp")
        transport.multidict = importlib.import_module("multidict")
    except ImportError:
        raise BusError("a NATS server's WebSocket needs aiohttp, which is not installed") from None


class _ClosedAtOnce(Exception):
    """The server has closed a connection right behind the handshake; the text is why."""


async def connect(options: NatsOptions) -> NatsBus:
    """A bus on the first server that answers. Raises BusError, naming the servers, when none does in time.

    A server that takes over other users just now may let a client in and close the connection in the next moment:
    then it is tried again for as long as where the server does not know us."""
    if any(server.startswith(("ws://", "wss://")) for server in options.servers):
        _allow_websockets()
    until = time.monotonic() + (options.refused_timeout or options.connect_timeout)
    while True:
        try:
            return await _connect_once(options)
        except _ClosedAtOnce as closed:
            if time.monotonic() >= until:
                raise BusError(f"no NATS server at {', '.join(options.servers)}: {closed}") from None
            await asyncio.sleep(RECONNECT_WAIT)


async def _connect_once(options: NatsOptions) -> NatsBus:
    """Raises _ClosedAtOnce, BusError."""
    liveness = LivenessClock(time.monotonic, GRACE_AFTER_RECONNECT)
    last_error: list[Exception] = []
    refusals: set[bool] = set()
    closed = asyncio.Event()
    said, said_at = "", -math.inf

    async def failed(error: Exception) -> None:
        nonlocal said, said_at
        last_error[:] = [error]
        refusals.add(_is_refusal(error))
        if isinstance(error, nats.errors.SlowConsumerError):
            BUS_DROPPED.labels("slow_consumer").inc()
        refused = "permissions violation" in str(error).lower()
        if refused or repr(error) != said or time.monotonic() - said_at >= SAME_ERROR_PAUSE:
            said, said_at = repr(error), time.monotonic()
            log.log(logging.ERROR if refused else logging.WARNING, "bus error", extra={"error": said})

    async def ended() -> None:
        closed.set()

    callbacks: dict[str, Any] = {"error_cb": failed, "closed_cb": ended, **_outages(liveness)}
    client = EncryptedClient() if options.is_encrypted else PromptClient()
    try:
        connecting = client.connect(**_arguments(options), **callbacks)
        await _in_time(connecting, options.connect_timeout, options.refused_timeout, lambda: refusals == {True})
    except (OSError, TimeoutError, nats.errors.Error) as error:
        await client.close()
        why = last_error[0] if last_error and isinstance(error, TimeoutError) else error
        said = str(why) or f"no answer within {options.connect_timeout:g} s; does it hang, or is its machine too busy?"
        raise BusError(f"no NATS server at {', '.join(options.servers)}: {said}") from None
    bus = NatsBus(client, options.namespace, liveness)
    with contextlib.suppress(nats.errors.ConnectionClosedError):
        await bus.listen_for_undelivered()
        await _heard(client, closed)
    if client.is_closed:
        raise _ClosedAtOnce(str(client.last_error or "it has closed the connection"))
    BUS_CONNECTED.set(1)
    return bus


async def _heard(client: Client, closed: asyncio.Event) -> None:
    """Returns once the server has answered behind the handshake, or the connection is `closed`; and after
    ANSWER_SECONDS, as a server that is slow is none that refuses."""
    answered = asyncio.create_task(client.flush(timeout=ANSWER_SECONDS))
    ending = asyncio.create_task(closed.wait())
    try:
        await asyncio.wait({answered, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (answered, ending):
            task.cancel()
        await asyncio.gather(answered, ending, return_exceptions=True)


def _outages(liveness: LivenessClock) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """What the client calls when it has lost the server, and when it is back."""

    async def disconnected() -> None:
        liveness.disconnected()
        BUS_CONNECTED.set(0)
        log.warning("bus away")

    async def reconnected() -> None:
        liveness.reconnected()
        BUS_CONNECTED.set(1)
        log.warning("bus back")

    return {"disconnected_cb": disconnected, "reconnected_cb": reconnected}


def _arguments(options: NatsOptions) -> dict[str, Any]:
    """What the client is told, but for its callbacks."""
    return {
        "servers": list(options.servers),
        "name": options.name,
        "user": options.user,
        "password": options.password,
        "inbox_prefix": inbox_prefix(options.user),
        "user_credentials": str(options.credentials) if options.credentials else None,
        "tls": ssl.create_default_context(cafile=str(options.tls_ca)) if options.tls_ca else None,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_WAIT,
        "connect_timeout": 2,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        "pending_size": PENDING_BYTES,
    }


def _is_refusal(error: Exception) -> bool:
    """Whether trying on changes little: nobody listens, or we are not let in. A server that is slow gives no answer."""
    if isinstance(error, TimeoutError):
        return False
    return isinstance(error, OSError) or "authorization" in str(error).lower()


async def _in_time(
    connecting: Coroutine[Any, Any, None],
    seconds: float,
    refused_seconds: float | None = None,
    refused: Callable[[], bool] = lambda: False,
) -> None:
    """Ends when the client has connected, or after that time: after `refused_seconds` where it is `refused` then.
    Raises TimeoutError.

    The client may take a cancellation for one of its own tasks' and go on trying: it is cancelled until it ends.
    """
    task = asyncio.create_task(connecting)
    first = seconds if refused_seconds is None else min(seconds, refused_seconds)
    try:
        done, _ = await asyncio.wait({task}, timeout=first)
        if not done and first < seconds and not refused():
            done, _ = await asyncio.wait({task}, timeout=seconds - first)
        if not done:
            raise TimeoutError
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN)
        if not task.cancelled():
            task.exception()  # seen, where it is not raised below
    await task
