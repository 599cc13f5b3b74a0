"""Spoilt messages on every subject of a running stack: each is dropped, logged and counted, and no process ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any, get_args

import httpx2
import msgspec
import pytest

from shared import topics
from shared.bus import EndpointError
from shared.bus.codec import Undecodable, decode, encode
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, ModelName, NodeId
from shared.messages.lifecycle import Drain, Lifecycle, Standby, Undrain
from shared.messages.scheduler import PauseGeneration, SleepEngine
from shared.messages.supervisor import RankAssignment, Scale, StrikeProcess
from shared.messages.worker import StepPlan
from shared.topics import Topic
from tests.contracts.test_golden_messages import MESSAGES
from tests.fuzz.mutations import mutated, spoilt_bytes
from tests.support.cluster.conversations import DEADLINE, client_of, stream_chat
from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.stack import RunningStack, running_stack

EACH = 2000
"""Spoilt messages on each subject."""
BATCH = 100
COMMANDS = (
    *(Lifecycle, Drain, Undrain, Standby, RankAssignment, Scale, StrikeProcess, StepPlan),
    *(PauseGeneration, SleepEngine),
)
"""Where one that decodes is no spoilt message but an order or a claim, however strange, and is obeyed: a plan of step
0, for example, begins a new epoch, and a rank that cannot follow it ends. On a stack's own bus only one user may send
it."""


def subjects(stack: RunningStack, node: NodeId) -> list[Topic[Any]]:
    """All that processes of the stack listen to."""
    model, engine, gateway = ModelName(stack.model), EngineId("engine-1"), GatewayId("gateway-1")
    names = [InstanceId(member.instance) for member in stack.state.members]
    return [
        topics.tokenize(model),
        topics.tokenizer_requests(model),
        topics.route(),
        topics.withdrawals(),
        topics.placements(),
        topics.engine_requests(engine),
        topics.engine_steps(engine),
        topics.engine_results(engine),
        topics.engine_control(engine),
        topics.engine_probes(engine),
        topics.kvstore_requests(node),
        topics.kvstore_releases(node),
        topics.kvstore_prefetches(node),
        topics.prefill_pulls(),
        topics.kv_events(InstanceId("engine-1")),
        topics.kv_dump_requests(InstanceId("engine-1")),
        topics.kv_dump_requests(InstanceId("kvstore-1")),
        topics.kv_dumps(InstanceId("coordinator-1")),
        topics.detokenizer_tokens(DetokenizerId("detokenizer-1")),
        topics.gateway_inbox(gateway),
        topics.lifecycle_of("scheduler", InstanceId("engine-1")),
        topics.rank_assignments(),
        topics.rank_status(),
        topics.scaling(),
        *(topics.instance_control(name) for name in names),
        *(topics.name_claims(name) for name in names),
    ]


async def send_spoilt(bus: NatsBus, topic: Topic[Any], number: int, rng: random.Random) -> int:
    """Publishes spoilt messages of the topic. Returns how many of them do not decode."""
    payloads = [encode(m) for m in MESSAGES if type(m) is topic.type or type(m) in get_args(topic.type)]
    raw: Topic[Any] = Topic(topic.subject, Any)
    undecodable = 0
    for i in range(number):
        payload = mutated(payloads[i % len(payloads)], rng)
        try:
            if isinstance(decode(payload, topic.type), COMMANDS):
                continue
        except Undecodable:
            undecodable += 1
        await bus.publish(raw, msgspec.Raw(payload))
        if i % BATCH == BATCH - 1:
            await bus.flush()
    await bus.flush()
    return undecodable


async def send_spoilt_orders(bus: NatsBus, number: int, rng: random.Random) -> None:
    """Calls the admin service with JSON that orders nothing of anybody."""
    bodies = (b'{"instance": "engine-9", "force": true}', b'{"service": "nobody", "count": 2}', b"{}", b"[]")
    for i in range(number):
        subject = f"{topics.ADMIN}.{rng.choice(('list', 'drain', 'undrain', 'scale'))}"
        body = bodies[i % len(bodies)]
        with contextlib.suppress(EndpointError):
            await bus.request_raw(subject, spoilt_bytes(body, rng), DEADLINE)


async def counted(stack: RunningStack) -> float:
    """Undecodable messages that the processes of the stack have counted."""
    total = 0.0
    async with httpx2.AsyncClient(timeout=DEADLINE) as http:
        for life in (await stack.ps()).values():
            if life.metrics_port is not None:
                page = (await http.get(f"http://127.0.0.1:{life.metrics_port}/metrics")).text
                lines = [line for line in page.splitlines() if line.startswith("baton_undecodable_messages_total")]
                total += sum(float(line.rpartition(" ")[2]) for line in lines)
    return total


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_no_process_of_a_stack_ends_of_what_it_is_sent(tmp_path: Path, own_nats: NatsServer) -> None:
    rng = random.Random(3)
    with running_stack(tmp_path, kvstore="64MiB", more=[f"--nats-url={own_nats.url}"]) as stack:
        [node] = {life.store.node for life in (await stack.ps()).values() if life.store is not None}
        bus = await connect(NatsOptions(servers=(own_nats.url,)))
        async with client_of(stack.url) as client:
            before = await stream_chat(client, stack.model, "Who are you?", max_tokens=16)
            pids = {member.instance: (member.pid, member.restarts) for member in stack.state.members}
            undecodable = 0
            for topic in subjects(stack, node):
                undecodable += await send_spoilt(bus, topic, EACH, rng)
                async with asyncio.timeout(DEADLINE):  # whatever waited in its inbox has been taken
                    assert (await stream_chat(client, stack.model, "Who are you?", max_tokens=16)).text == before.text
                now = {member.instance: (member.pid, member.restarts) for member in stack.state.members}
                assert now == pids, f"{topic.subject}\n{stack.last_words()}"
            await send_spoilt_orders(bus, EACH // 10, rng)
            assert stack.supervisor.poll() is None
            seen = await counted(stack)
            print(f"{EACH * len(subjects(stack, node))} spoilt messages, {undecodable} undecodable; {seen:g} counted")
            assert seen > 0.5 * undecodable
        await bus.close()
