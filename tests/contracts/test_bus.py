"""What every bus promises, held against the in-memory one and a real nats-server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared import topics
from shared.bus import Bus, EndpointError, NoResponders, PayloadTooLarge, ReplyTimeout, ReplyTooLarge, Undelivered
from shared.bus.codec import encode
from shared.bus.concurrent_requests import MAX_REQUESTS
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.gateway import RequestFailed
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import Decode, DecodeReply
from shared.topics import Topic
from tests.support.cluster.nats_server import NatsServer
from tests.support.gateway.fake_services import eventually

ENGINE = EngineId("engine-1")
CANCEL = Cancel(RequestId("r"), Attempt(1))
DEADLINE = 60


async def collect(bus: Bus, topic: Topic[object], count: int) -> asyncio.Future[list[object]]:
    heard: list[object] = []
    done: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()

    async def take(message: object) -> None:
        heard.append(message)
        if len(heard) == count and not done.done():
            done.set_result(heard)

    await bus.subscribe(topic, take)
    await bus.flush()
    return done


async def test_a_message_arrives_at_every_subscriber_in_the_order_sent(any_bus: Bus) -> None:
    topic = topics.engine_control(ENGINE)
    first, second = await collect(any_bus, topic, 20), await collect(any_bus, topic, 20)
    sent = [Cancel(RequestId(f"r{i}"), Attempt(i)) for i in range(20)]
    for message in sent:
        await any_bus.publish(topic, message)
    async with asyncio.timeout(DEADLINE):
        assert await first == await second == sent


async def test_a_flush_returns_after_everything_before_it_has_reached_the_server(own_nats: NatsServer) -> None:
    """A subscription made before it hears what another connection sends after it."""
    options = NatsOptions(servers=(own_nats.url,))
    hearing, sending = await connect(options), await connect(options)
    heard: asyncio.Queue[int] = asyncio.Queue()
    try:
        for number in range(100):
            topic = Topic(f"flushed.{number}", int)
            await hearing.subscribe(topic, heard.put)
            await hearing.flush()
            await sending.publish(topic, number)
            async with asyncio.timeout(DEADLINE):
                assert await heard.get() == number
    finally:
        await hearing.close()
        await sending.close()


async def test_what_was_delivered_is_not_kept(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that may come back undelivered may have megabytes."""
    monkeypatch.setattr("shared.bus.nats_bus.KEEP_SECONDS", 0.01)
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    try:
        heard = await collect(bus, topics.engine_control(ENGINE), 3)
        for _ in range(3):
            await bus.publish(topics.engine_control(ENGINE), CANCEL, confirm=True)
        async with asyncio.timeout(DEADLINE):
            await heard
        await eventually(lambda: not len(bus._unconfirmed))
        assert bus._forgetting is None
    finally:
        await bus.close()


async def test_what_is_published_has_left_before_anything_else_runs(own_nats: NatsServer) -> None:
    """A device waits for some messages, and nobody for what its sender does next."""
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    try:
        with socket.create_connection(("127.0.0.1", own_nats.port), timeout=DEADLINE) as hearing:
            hearing.sendall(b'CONNECT {"verbose": false}\r\nSUB baton.> 1\r\nPING\r\n')
            await asyncio.to_thread(_read_until, hearing, b"PONG\r\n")
            await bus.publish(topics.engine_control(ENGINE), CANCEL)
            _read_until(hearing, encode(CANCEL))  # which keeps the event loop from running
    finally:
        await bus.close()


def _read_until(connection: socket.socket, end: bytes) -> None:
    heard = b""
    while end not in heard:
        heard += connection.recv(65536)


async def test_messages_keep_their_order_where_they_come_sooner_than_the_socket_takes_them(any_bus: Bus) -> None:
    topic = Topic("many", bytes)
    heard = await collect(any_bus, topic, 300)
    sent = [bytes([number % 251]) * (10 if number % 3 else 40_000) for number in range(300)]
    for message in sent:
        await any_bus.publish(topic, message)
    async with asyncio.timeout(DEADLINE):
        assert await heard == sent


async def test_a_queue_group_shares_its_messages(any_bus: Bus) -> None:
    topic = Topic("shared", Cancel, queue="group")
    heard: list[tuple[int, Cancel]] = []
    everything = asyncio.Event()

    def member(number: int):  # type: ignore[no-untyped-def]
        async def take(message: Cancel) -> None:
            heard.append((number, message))
            if len(heard) == 60:
                everything.set()

        return take

    for number in range(3):
        await any_bus.subscribe(topic, member(number))
    await any_bus.flush()
    sent = [Cancel(RequestId(f"r{i}"), Attempt(1)) for i in range(60)]
    for message in sent:
        await any_bus.publish(topic, message)
    async with asyncio.timeout(DEADLINE):
        await everything.wait()
    assert sorted(m.request for _, m in heard) == sorted(m.request for m in sent)
    assert {number for number, _ in heard} == {0, 1, 2}


async def test_a_wildcard_subscription_hears_every_instance(any_bus: Bus) -> None:
    heard = await collect(any_bus, Topic("lifecycle.*.*", Cancel), 2)
    await any_bus.publish(Topic("lifecycle.gateway.a", Cancel), CANCEL)
    await any_bus.publish(Topic("lifecycle.scheduler.b", Cancel), CANCEL)
    async with asyncio.timeout(DEADLINE):
        assert len(await heard) == 2


async def test_a_tap_hears_subjects_and_bytes_of_all_that_matches(any_bus: Bus) -> None:
    heard: list[tuple[str, bytes]] = []
    enough = asyncio.Event()

    async def take(subject: str, payload: bytes) -> None:
        heard.append((subject, payload))
        if len(heard) == 3:
            enough.set()

    await any_bus.tap("engine.>", take)
    await any_bus.tap("lifecycle.*.b", take)
    await any_bus.flush()
    for subject in ("engine.engine-1.control", "lifecycle.gateway.a", "other", "lifecycle.scheduler.b", "engine.x"):
        await any_bus.publish(Topic(subject, Cancel), CANCEL)
    async with asyncio.timeout(DEADLINE):
        await enough.wait()
    await any_bus.flush()
    expected = {"engine.engine-1.control", "lifecycle.scheduler.b", "engine.x"}
    assert {subject for subject, _ in heard} == expected
    assert {payload for _, payload in heard} == {encode(CANCEL)}


async def test_a_confirmed_message_without_subscriber_comes_back(any_bus: Bus) -> None:
    returned: asyncio.Queue[Undelivered] = asyncio.Queue()
    any_bus.on_undelivered(returned.put)
    topic = topics.engine_control(EngineId("nobody"))
    await any_bus.publish(topic, CANCEL, confirm=True)
    async with asyncio.timeout(DEADLINE):
        assert await returned.get() == Undelivered(topic, CANCEL)


async def test_a_confirmed_message_with_a_subscriber_does_not_come_back(any_bus: Bus) -> None:
    returned: list[Undelivered] = []

    async def take(message: Undelivered) -> None:
        returned.append(message)

    any_bus.on_undelivered(take)
    heard = await collect(any_bus, topics.engine_control(ENGINE), 1)
    await any_bus.publish(topics.engine_control(ENGINE), CANCEL, confirm=True)
    async with asyncio.timeout(DEADLINE):
        await heard
        await any_bus.flush()
    assert returned == []


async def test_a_stopped_subscription_takes_no_more(any_bus: Bus) -> None:
    heard: list[Cancel] = []

    async def take(message: Cancel) -> None:
        heard.append(message)

    subscription = await any_bus.subscribe(topics.engine_control(ENGINE), take)
    await any_bus.flush()
    await subscription.stop()
    probe = await collect(any_bus, topics.gateway_inbox(GatewayId("g")), 1)
    await any_bus.publish(topics.engine_control(ENGINE), CANCEL)
    await any_bus.publish(topics.gateway_inbox(GatewayId("g")), RequestFailed(RequestId("r"), Attempt(1), "x"))
    async with asyncio.timeout(DEADLINE):
        await probe
    assert heard == []


async def test_questions_are_answered(any_bus: Bus) -> None:
    async def answer(question: Probe) -> ProbeReply:
        return ProbeReply("running", len(question.request))

    await any_bus.serve(topics.engine_probes(ENGINE), answer)
    await any_bus.flush()
    question = Probe(RequestId("four"), Attempt(1))
    assert await any_bus.request(topics.engine_probes(ENGINE), question, ProbeReply, DEADLINE) == ProbeReply(
        "running", 4
    )


async def test_a_question_that_nobody_hears_fails_at_once(any_bus: Bus) -> None:
    with pytest.raises(NoResponders):
        await any_bus.request(topics.engine_probes(ENGINE), Probe(RequestId("r"), Attempt(1)), ProbeReply, 60)


async def test_a_question_that_is_not_answered_times_out(any_bus: Bus) -> None:
    async def never(question: Probe) -> ProbeReply:
        await asyncio.sleep(0.5)
        return ProbeReply("unknown", 0)

    await any_bus.serve(topics.engine_probes(ENGINE), never)
    await any_bus.flush()
    with pytest.raises(ReplyTimeout):
        await any_bus.request(topics.engine_probes(ENGINE), Probe(RequestId("r"), Attempt(1)), ProbeReply, 0.05)


async def test_a_request_whose_answer_takes_long_holds_up_no_other(any_bus: Bus) -> None:
    begun: list[str] = []
    released = asyncio.Event()

    async def answer(question: Probe) -> ProbeReply:
        begun.append(question.request)
        if question.request == "slow":
            await released.wait()
        return ProbeReply("running", len(begun))

    topic = topics.engine_probes(ENGINE)
    await any_bus.serve(topic, answer)
    await any_bus.flush()
    slow = asyncio.create_task(any_bus.request(topic, Probe(RequestId("slow"), Attempt(1)), ProbeReply, DEADLINE))
    while not begun:
        await asyncio.sleep(0.001)
    quick = await any_bus.request(topic, Probe(RequestId("quick"), Attempt(1)), ProbeReply, DEADLINE)
    assert quick == ProbeReply("running", 2)
    assert not slow.done()
    released.set()
    assert await slow == ProbeReply("running", 2)


async def test_requests_begin_in_their_order_and_only_so_many_at_a_time(any_bus: Bus) -> None:
    begun: list[str] = []
    released = asyncio.Event()

    async def answer(question: Probe) -> ProbeReply:
        begun.append(question.request)
        await released.wait()
        return ProbeReply("running", 0)

    topic = topics.engine_probes(ENGINE)
    await any_bus.serve(topic, answer)
    await any_bus.flush()
    sent = [f"r{i}" for i in range(MAX_REQUESTS + 10)]
    asked = [
        asyncio.create_task(any_bus.request(topic, Probe(RequestId(name), Attempt(1)), ProbeReply, DEADLINE))
        for name in sent
    ]
    while len(begun) < MAX_REQUESTS:
        await asyncio.sleep(0.001)
    await any_bus.flush()
    assert begun == sent[:MAX_REQUESTS]
    released.set()
    await asyncio.gather(*asked)
    assert begun == sent


async def test_a_request_that_fails_is_no_end_of_the_others(any_bus: Bus) -> None:
    async def answer(question: Probe) -> ProbeReply:
        if question.request == "bad":
            raise ValueError("of this one")
        return ProbeReply("running", 0)

    topic = topics.engine_probes(ENGINE)
    await any_bus.serve(topic, answer)
    await any_bus.flush()
    with pytest.raises(ReplyTimeout):
        await any_bus.request(topic, Probe(RequestId("bad"), Attempt(1)), ProbeReply, 0.2)
    good = Probe(RequestId("good"), Attempt(1))
    assert await any_bus.request(topic, good, ProbeReply, DEADLINE) == ProbeReply("running", 0)


async def test_a_message_over_the_limit_is_a_named_error(any_bus: Bus) -> None:
    too_large = RequestFailed(RequestId("r"), Attempt(1), "x" * 2**20)
    with pytest.raises(PayloadTooLarge) as error:
        await any_bus.publish(topics.gateway_inbox(GatewayId("g")), too_large)
    assert error.value.limit == 2**20
    assert error.value.size > 2**20


async def test_who_asked_is_told_that_the_answer_is_over_the_limit(any_bus: Bus) -> None:
    topic = topics.tokenizer_requests(ModelName("m"))

    async def answer(request: Decode) -> DecodeReply:
        return DecodeReply("x" * 2**20)

    await any_bus.serve(topic, answer)
    with pytest.raises(ReplyTooLarge, match=r"the answer has 1048[0-9]{3} bytes, the bus takes 1048576 at most"):
        await any_bus.request(topic, Decode(b""), DecodeReply, DEADLINE)


async def test_garbage_harms_nobody(any_bus: Bus) -> None:
    topic = topics.engine_control(ENGINE)
    heard = await collect(any_bus, topic, 1)
    for garbage in (b"", b"\xc1", b"\x93\x01", b'{"a":1}', bytes(range(256))):
        if isinstance(any_bus, NatsBus):
            await any_bus._client.publish(f"baton.{topic.subject}", garbage)
        else:
            await any_bus.publish_raw(topic.subject, garbage)  # type: ignore[attr-defined]
    await any_bus.publish(topic, CANCEL)
    async with asyncio.timeout(DEADLINE):
        assert await heard == [CANCEL]


async def test_a_micro_service_answers_and_refuses(any_bus: Bus) -> None:
    async def echo(body: bytes) -> bytes:
        if not body:
            raise EndpointError(400, "an empty body; anything else is allowed")
        return body

    await any_bus.serve_micro("test", "1.0.0", "a test", {"admin.echo": echo})
    await any_bus.flush()
    assert await any_bus.request_raw("admin.echo", b"hello", DEADLINE) == b"hello"
    with pytest.raises(EndpointError) as error:
        await any_bus.request_raw("admin.echo", b"", DEADLINE)
    assert error.value.code == 400
    assert "empty body" in error.value.text
    with pytest.raises(NoResponders):
        await any_bus.request_raw("admin.nothing", b"", DEADLINE)


async def test_messages_may_be_offered_first_and_those_that_are_refused_come_by_the_handler_in_order(
    any_bus: Bus,
) -> None:
    """Whatever way each message takes, a receiver hears them as they were sent, and nothing behind its stop."""
    topic = topics.engine_control(ENGINE)
    heard: list[Cancel] = []
    last = asyncio.Event()

    def offer(message: Cancel) -> bool:
        if message.attempt % 5 == 0:
            return False
        heard.append(message)
        return True

    async def handle(message: Cancel) -> None:
        await asyncio.sleep(0.001)
        heard.append(message)
        if message.attempt == 100:
            last.set()

    subscription = await any_bus.subscribe(topic, handle, offer=offer)
    await any_bus.flush()
    sent = [Cancel(RequestId(f"r{i}" * (i % 7) * 500), Attempt(i)) for i in range(1, 101)]
    for message in sent:
        await any_bus.publish(topic, message)
    async with asyncio.timeout(DEADLINE):
        await last.wait()
    assert heard == sent
    await subscription.stop()
    probe = await collect(any_bus, topics.gateway_inbox(GatewayId("g")), 1)
    await any_bus.publish(topic, CANCEL)
    await any_bus.publish(topics.gateway_inbox(GatewayId("g")), RequestFailed(RequestId("r"), Attempt(1), "x"))
    async with asyncio.timeout(DEADLINE):
        await probe
    assert heard == sent


async def test_what_is_offered_and_does_not_decode_is_skipped(any_bus: Bus) -> None:
    heard: list[Cancel] = []
    received = asyncio.Event()

    def offer(message: Cancel) -> bool:
        heard.append(message)
        received.set()
        return True

    async def handle(message: Cancel) -> None:
        offer(message)

    await any_bus.subscribe(topics.engine_control(ENGINE), handle, offer=offer)
    await any_bus.flush()
    await any_bus.publish(Topic(topics.engine_control(ENGINE).subject, str), "no cancel")
    await any_bus.publish(topics.engine_control(ENGINE), CANCEL)
    async with asyncio.timeout(DEADLINE):
        await received.wait()
    assert heard == [CANCEL]
