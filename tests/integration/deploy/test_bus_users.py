"""What a nats-server with our users lets each of them do, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from deploy.supervisor.servers.nats_config import authorization, make_passwords
from shared import topics
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, InstanceId, ModelName, RequestId
from shared.messages.lifecycle import NameClaim
from shared.messages.scheduler import Probe, ProbeReply
from shared.permissions import TABLE, USERS, User
from tests.support.cluster.nats_server import NatsServer, nats_server

DEADLINE = 60.0
NAMESPACE = "baton"
PASSWORDS = make_passwords()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats"), more=authorization(NAMESPACE, PASSWORDS)) as running:
        yield running


class RawClient:
    """A connection as one of the users that may try anything, and what the server refused it."""

    def __init__(self, client: Client, refusals: list[str]) -> None:
        self.client, self.refusals = client, refusals

    async def refused(self) -> list[str]:
        """After everything said so far was judged."""
        for _ in range(2):  # the first PING may overtake what was not written yet
            await self.client.flush(timeout=60)
        await asyncio.sleep(0)  # the callbacks of errors run beside
        return self.refusals


@contextlib.asynccontextmanager
async def raw(server: NatsServer, user: User, inbox: str | None = None) -> AsyncIterator[RawClient]:
    refusals: list[str] = []

    async def on_error(error: Exception) -> None:
        refusals.append(str(error).lower())

    prefix = inbox or topics.inbox_prefix(user)
    client = await nats.connect(
        server.url, user=user, password=PASSWORDS[user], error_cb=on_error, inbox_prefix=prefix.encode()
    )
    try:
        yield RawClient(client, refusals)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def bus_of(server: NatsServer, user: User) -> AsyncIterator[NatsBus]:
    bus = await connect(NatsOptions(servers=(server.url,), user=user, password=PASSWORDS[user], name=user))
    try:
        yield bus
    finally:
        await bus.close()


async def eventually(refusals: list[str]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not refusals:
            await asyncio.sleep(0.01)


async def test_every_right_in_the_table_is_one_on_the_server(server: NatsServer) -> None:
    """Each publisher of each topic reaches each of its subscribers."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {user: await stack.enter_async_context(raw(server, user)) for user in USERS}
        for row in TABLE:
            subject = f"{NAMESPACE}.{row.subject.replace('*', 'x1')}"
            hearing = row.subscribers or ("operator",)
            subscriptions = [await clients[user].client.subscribe(subject) for user in hearing]
            for user in hearing:
                assert await clients[user].refused() == []
            for user in row.publishers:
                await clients[user].client.publish(subject, user.encode())
                assert await clients[user].refused() == []
                for subscription in subscriptions:
                    assert (await subscription.next_msg(timeout=DEADLINE)).data == user.encode()
            for subscription in subscriptions:
                await subscription.unsubscribe()


async def test_requests_are_answered_and_undeliverable_messages_come_back(server: NatsServer) -> None:
    probe = Probe(request=RequestId("r"), attempt=Attempt(1))
    async with bus_of(server, "gateway") as gateway, bus_of(server, "scheduler") as scheduler:

        async def answer(_: Probe) -> ProbeReply:
            return ProbeReply(state="running", produced=7)

        topic = topics.engine_probes(EngineId("e1"))
        await scheduler.serve(topic, answer)
        await scheduler.flush()
        assert await gateway.request(topic, probe, ProbeReply, DEADLINE) == ProbeReply(state="running", produced=7)
        back: asyncio.Queue[object] = asyncio.Queue()

        async def undelivered(message: object) -> None:
            await back.put(message)

        gateway.on_undelivered(undelivered)  # type: ignore[arg-type]
        await gateway.publish(topics.engine_probes(EngineId("nobody")), probe, confirm=True)
        async with asyncio.timeout(DEADLINE):
            await back.get()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("worker", topics.route().subject),
        ("worker", topics.lifecycle_of("scheduler", InstanceId("e1")).subject),
        ("worker", topics.gateway_inbox(GatewayId("gateway-1")).subject),
        ("worker", topics.engine_steps(EngineId("e2")).subject),
        ("tokenizer", topics.engine_requests(EngineId("e1")).subject),
        ("detokenizer", topics.detokenizer_tokens(DetokenizerId("d1")).subject),
        ("gateway", topics.instance_control(InstanceId("e1")).subject),
        ("gateway", topics.route().subject),
        ("gateway", f"{topics.ADMIN}.list"),
        ("kvstore", topics.tokenize(ModelName("m")).subject),
        ("operator", topics.scaling().subject),
    ],
)
async def test_what_is_not_a_users_to_say_is_not_delivered(server: NatsServer, user: User, subject: str) -> None:
    async with raw(server, "operator") as listener, raw(server, user) as speaker:
        heard = await listener.client.subscribe(f"{NAMESPACE}.>")
        await listener.refused()
        await speaker.client.publish(f"{NAMESPACE}.{subject}", b"forged")
        await speaker.refused()
        await eventually(speaker.refusals)
        assert "permissions violation for publish" in speaker.refusals[0]
        with pytest.raises(nats.errors.TimeoutError):
            await heard.next_msg(timeout=0.05)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("worker", f"{topics.inbox_prefix('gateway')}.>"),
        ("worker", f"{topics.inbox_prefix('gateway')}.r4nd0m.*"),
        ("worker", "_INBOX.>"),
        ("worker", "_INBOX.r4nd0m.*"),
        ("worker", ">"),
        ("worker", f"{NAMESPACE}.>"),
        ("worker", f"{NAMESPACE}.engine.*.requests"),
        ("tokenizer", f"{NAMESPACE}.gateway.*.deltas"),
        ("gateway", f"{NAMESPACE}.tokenize.*"),
        ("operator", f"{topics.inbox_prefix('scheduler')}.>"),
        ("operator", "elsewhere.>"),
        ("gateway", "elsewhere.>"),
    ],
)
async def test_what_is_not_a_users_to_hear_is_refused(server: NatsServer, user: User, subject: str) -> None:
    async with raw(server, user) as listener:
        await listener.client.subscribe(subject)
        await listener.refused()
        await eventually(listener.refusals)
        assert "permissions violation for subscription" in listener.refusals[0]


async def test_a_reply_goes_to_nobody_but_who_asked_and_only_as_a_reply(server: NatsServer) -> None:
    async with raw(server, "gateway") as gateway, raw(server, "worker") as worker:
        inbox = gateway.client.new_inbox()
        replies = await gateway.client.subscribe(inbox)
        await gateway.refused()
        await worker.client.publish(inbox, b"forged")
        await worker.refused()
        await eventually(worker.refusals)
        with pytest.raises(nats.errors.TimeoutError):
            await replies.next_msg(timeout=0.05)


async def test_the_operator_hears_no_reply_to_another(server: NatsServer) -> None:
    async with raw(server, "operator") as operator, bus_of(server, "gateway") as gateway:
        heard = await operator.client.subscribe("_INBOX.>")
        await operator.refused()

        async def answer(_: Probe) -> ProbeReply:
            return ProbeReply(state="running", produced=7)

        async with bus_of(server, "scheduler") as scheduler:
            topic = topics.engine_probes(EngineId("e7"))
            await scheduler.serve(topic, answer)
            await scheduler.flush()
            await gateway.request(topic, Probe(request=RequestId("r"), attempt=Attempt(1)), ProbeReply, DEADLINE)
        await operator.refused()
        with pytest.raises(nats.errors.TimeoutError):
            await heard.next_msg(timeout=0.05)


async def test_a_password_opens_its_own_user_only(server: NatsServer) -> None:
    for user, password in (("scheduler", PASSWORDS["worker"]), ("nobody", PASSWORDS["worker"]), ("worker", "")):
        client = Client()
        try:
            with pytest.raises(nats.errors.Error, match="Authorization Violation"):
                await client.connect(server.url, user=user, password=password, allow_reconnect=False)
        finally:
            await client.close()


async def test_the_operators_tools_need_no_prefix(server: NatsServer) -> None:
    """As the `nats` command asks: with NATS's own inboxes."""
    async with raw(server, "operator", inbox="_INBOX") as operator, raw(server, "coordinator") as coordinator:

        async def answer(message: nats.aio.msg.Msg) -> None:
            await message.respond(b"listed")

        await coordinator.client.subscribe(f"{NAMESPACE}.{topics.ADMIN}.list", cb=answer)
        await coordinator.refused()
        reply = await operator.client.request(f"{NAMESPACE}.{topics.ADMIN}.list", b"", timeout=DEADLINE)
        assert (reply.data, await operator.refused()) == (b"listed", [])


async def test_an_adopted_server_learns_new_rights_and_those_of_a_former_release_live_on(tmp_path: Path) -> None:
    """A new supervisor writes its own release's rights over those that the server was started with."""
    claim = topics.name_claims(InstanceId("e1"))
    row = f'"{NAMESPACE}.{claim.subject.replace("e1", "*")}"'
    former = authorization(NAMESPACE, PASSWORDS, shared_inboxes=True).replace(f", {row}", "")
    assert row not in former
    with nats_server(tmp_path, more=former) as server:
        async with raw(server, "scheduler", inbox="_INBOX") as old, raw(server, "gateway") as gateway:
            question = f"{NAMESPACE}.{topics.engine_probes(EngineId('e1')).subject}"
            asked = f"{NAMESPACE}.kvstore.n1.ask"

            async def answer(message: nats.aio.msg.Msg) -> None:
                await message.respond(b"here")

            await old.client.subscribe(question, cb=answer)
            async with raw(server, "kvstore") as store:
                await store.client.subscribe(asked, cb=answer)
                await store.refused()
                await old.refused()
                connected = id(old.client._transport)
                assert (await old.client.request(asked, b"", timeout=DEADLINE)).data == b"here"
                assert not await _may_claim(server, claim)
                server.reconfigure(authorization(NAMESPACE, PASSWORDS, shared_inboxes=True))
                async with asyncio.timeout(DEADLINE):
                    while not await _may_claim(server, claim):
                        await asyncio.sleep(0.05)
                assert (await old.client.request(asked, b"", timeout=DEADLINE)).data == b"here"
                assert (await gateway.client.request(question, b"", timeout=DEADLINE)).data == b"here"
                assert (id(old.client._transport), old.refusals, gateway.refusals) == (connected, [], [])


async def _may_claim(server: NatsServer, claim: topics.Topic[NameClaim]) -> bool:
    async with raw(server, "worker") as worker:
        await worker.client.publish(f"{NAMESPACE}.{claim.subject}", b"")
        return await worker.refused() == []
