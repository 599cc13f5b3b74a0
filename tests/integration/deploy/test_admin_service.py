"""The operators' micro service on a real nats-server, spoken to as the stock `nats` command would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client

from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from shared import topics
from shared.actor import ActorRuntime
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import EngineId, InstanceId, NodeId
from shared.messages.gateway import RequestPlaced
from shared.messages.lifecycle import Drain, Lifecycle, Role, Undrain
from shared.messages.scheduler import PauseGeneration, PauseState, ReadPauseState, ResumeGeneration, SchedulerQuestion
from shared.messages.supervisor import (
    ProcessStruck,
    Scale,
    ScaleRefusal,
    ScaleReply,
    ScaleResult,
    StrikeProcess,
    StrikeRefusal,
    StrikeReply,
)
from tests.support.cluster.nats_server import NatsServer
from tests.support.engines.coordinator_events import GATEWAY, detokenizer, engine, life, route

DEADLINE = 60

REFUSED = [
    ("drain", '{"instance": "nobody"}', 404, "coordinator-1"),
    ("undrain", '{"instance": "nobody"}', 404, "nobody"),
    ("drain", "not json", 400, "JSON"),
    ("drain", "", 400, "instance"),
    ("drain", "[]", 400, "instance"),
    ("drain", '{"instance": 7}', 400, "$.instance"),
    ("drain", '{"instance": "x", "force": "yes"}', 400, "$.force"),
    ("drain", '{"instance": "x", "forced": true}', 400, "forced"),
    ("undrain", '{"instance": null}', 400, "$.instance"),
    ("list", '{"service": "nonsense"}', 400, "scheduler"),
    ("list", b"\xff\xfe".decode("latin-1"), 400, "JSON"),
    ("scale", '{"service": "tokenizer"}', 400, "count"),
    ("scale", '{"service": "tokenizer", "count": "2"}', 400, "$.count"),
    ("scale", '{"service": "tokenizer", "count": -1}', 400, "count: -1 is not allowed; 0 to 256 are"),
    ("scale", '{"service": "nonsense", "count": 1}', 400, "$.service"),
    ("scale", '{"service": "tokenizer", "count": 2}', 503, "supervisor"),
    ("strike", '{"instance": "x"}', 400, "fault"),
    ("strike", '{"instance": "x", "fault": "burn"}', 400, "$.fault"),
    ("strike", '{"instance": "x", "fault": "pause", "seconds": 61}', 400, "seconds: 61 is not allowed; 0.1 to 60 are"),
    ("strike", '{"instance": "x", "fault": "kill", "host": "b"}', 404, "host: no supervisor of a host 'b'"),
    ("strike", '{"instance": "x", "fault": "kill"}', 503, "supervisor"),
    ("prefixes", '{"most": 3}', 400, "most"),
    ("pause", "", 400, "mode"),
    ("pause", '{"mode": "some"}', 400, "$.mode"),
    ("resume", '{"mode": "all"}', 400, "mode"),
    ("paused", "", 503, "no engine"),
    ("sleep", '{"level": 3}', 400, "$.level"),
    ("wake_up", '{"tags": ["weights"]}', 400, "tags"),
    ("sleeping", "", 503, "no engine"),
]
"""Endpoint, body, the code it is refused with, and what the refusal names."""


class Cluster:
    """Coordinators, a bus for whoever else speaks, and a raw NATS connection."""

    def __init__(self, bus: NatsBus, raw: Client) -> None:
        self.bus, self.raw = bus, raw
        self.actors: list[CoordinatorActor] = []

    async def hear(self, *lives: Lifecycle) -> None:
        for heard in lives:
            await self.bus.publish(topics.lifecycle_of(heard.service, heard.instance), heard)
        async with asyncio.timeout(DEADLINE):
            for actor in self.actors:
                while any(actor.core.fleet.registry.get(x.service, x.instance) != x for x in lives):
                    await asyncio.sleep(0.005)

    async def ask(self, endpoint: str, body: str | dict[str, Any] = "") -> dict[str, Any]:
        data = body if isinstance(body, str) else json.dumps(body)
        answer = await self.raw.request(f"baton.admin.{endpoint}", data.encode(), timeout=DEADLINE)
        decoded: dict[str, Any] = json.loads(answer.data)
        if "error" in decoded:
            assert answer.headers is not None
            assert answer.headers["Nats-Service-Error-Code"] == str(decoded["error"]["code"])
        return decoded


@pytest.fixture
async def cluster(own_nats: NatsServer) -> AsyncIterator[Cluster]:
    """Two coordinators on a server of their own."""
    async with AsyncExitStack() as stack:
        raw = await nats.connect(own_nats.url)
        stack.push_async_callback(raw.close)
        bus = await connect(NatsOptions(servers=(own_nats.url,)))
        stack.push_async_callback(bus.close)
        cluster = Cluster(bus, raw)
        for name in ("coordinator-1", "coordinator-2"):
            own = await connect(NatsOptions(servers=(own_nats.url,)))
            stack.push_async_callback(own.close)
            own.liveness_now = lambda: 0.0  # type: ignore[method-assign]  # nobody falls silent on a slow machine
            actor = CoordinatorActor(own, InstanceId(name), CoordinatorConfig(scale_timeout=DEADLINE))
            runtime = ActorRuntime(actor, drain_timeout=0.5)
            task = asyncio.create_task(runtime.run())
            cluster.actors.append(actor)
            stack.push_async_callback(asyncio.wait_for, task, DEADLINE)
            stack.callback(runtime.stop)
        async with asyncio.timeout(DEADLINE):
            while not all(a.core.fleet.peers for a in cluster.actors):
                await asyncio.sleep(0.01)
        yield cluster


async def test_the_service_is_discovered_like_any_other(cluster: Cluster) -> None:
    inbox = cluster.raw.new_inbox()
    answers = await cluster.raw.subscribe(inbox)
    await cluster.raw.publish("$SRV.PING.baton-admin", b"", reply=inbox)
    found = [json.loads((await answers.next_msg(timeout=DEADLINE)).data) for _ in range(2)]
    assert {f["name"] for f in found} == {"baton-admin"}
    assert len({f["id"] for f in found}) == 2
    info = json.loads((await cluster.raw.request("$SRV.INFO.baton-admin", b"", timeout=DEADLINE)).data)
    assert {e["subject"] for e in info["endpoints"]} == {
        "baton.admin.list",
        "baton.admin.drain",
        "baton.admin.undrain",
        "baton.admin.reset_prefix_cache",
        "baton.admin.scale",
        "baton.admin.strike",
        "baton.admin.prefixes",
        "baton.admin.pause",
        "baton.admin.resume",
        "baton.admin.paused",
        "baton.admin.sleep",
        "baton.admin.wake_up",
        "baton.admin.sleeping",
    }


async def test_list_shows_everything_that_is_known(cluster: Cluster) -> None:
    await cluster.hear(engine("engine-1", waiting=1, running=2), detokenizer())
    listed = (await cluster.ask("list"))["instances"]
    assert [(i["service"], i["instance"]) for i in listed] == [
        ("coordinator", "coordinator-1"),
        ("coordinator", "coordinator-2"),
        ("detokenizer", "detokenizer-1"),
        ("scheduler", "engine-1"),
    ]
    shown = listed[-1]
    assert (shown["phase"], shown["load"], shown["pid"], shown["host"]) == ("ready", 3, 7, "here")
    assert shown["engine"]["model"]["name"] == "demo/model"
    assert shown["engine"]["waiting"] == 1
    assert shown["uptime"] > 0
    assert shown["worker"] is None
    only = (await cluster.ask("list", {"service": "scheduler"}))["instances"]
    assert [i["instance"] for i in only] == ["engine-1"]


async def test_drain_and_undrain_reach_the_instance(cluster: Cluster) -> None:
    orders: asyncio.Queue[Drain | Undrain] = asyncio.Queue()
    await cluster.bus.subscribe(topics.instance_control(InstanceId("engine-1")), orders.put)
    await cluster.bus.flush()
    await cluster.hear(engine("engine-1"), engine("engine-2"))
    answer = await cluster.ask("drain", {"instance": "engine-1"})
    assert (answer["instance"], answer["asked"]) == ("engine-1", "drain")
    assert await asyncio.wait_for(orders.get(), DEADLINE) == Drain()
    await cluster.hear(engine("engine-1", "draining"))
    assert (await cluster.ask("undrain", {"instance": "engine-1"}))["phase"] == "draining"
    assert await asyncio.wait_for(orders.get(), DEADLINE) == Undrain()


async def test_a_pool_is_drained_by_its_name(cluster: Cluster) -> None:
    orders: asyncio.Queue[Drain | Undrain] = asyncio.Queue()
    names = [f"prefill-{number}" for number in (1, 2)]
    for name in names:
        await cluster.bus.subscribe(topics.instance_control(InstanceId(name)), orders.put)
    await cluster.bus.flush()
    await cluster.hear(*(of_role(name, "prefill", running=2) for name in names), of_role("decode-1", "decode"))
    answer = await cluster.ask("drain", {"instance": "prefill"})
    assert (answer["instances"], answer["load"]) == (names, 4)
    assert [await asyncio.wait_for(orders.get(), DEADLINE) for _ in names] == [Drain(), Drain()]
    assert (await cluster.ask("drain", {"instance": "decode"}))["error"]["code"] == 409
    assert (await cluster.ask("drain", {"instance": "engines"}))["error"]["code"] == 404
    assert (await cluster.ask("undrain", {"instance": "prefill"}))["instances"] == names


def of_role(name: str, role: Role, running: int = 0) -> Lifecycle:
    said = engine(name, running=running)
    assert said.engine is not None
    return msgspec.structs.replace(said, engine=msgspec.structs.replace(said.engine, role=role))


async def test_the_last_of_its_kind_is_drained_only_by_force(cluster: Cluster) -> None:
    await cluster.hear(engine("engine-1"), engine("engine-2", "draining"), life("gateway", "gateway-1"))
    for instance in ("engine-1", "gateway-1"):
        refused = (await cluster.ask("drain", {"instance": instance}))["error"]
        assert refused["code"] == 409
        assert "last ready" in refused["message"]
        assert (await cluster.ask("drain", {"instance": instance, "force": True}))["asked"] == "drain"
    assert "asked" in await cluster.ask("drain", {"instance": "engine-2"})


async def test_a_bad_request_is_refused_by_name(cluster: Cluster) -> None:
    for endpoint, body, code, named in REFUSED:
        error = (await cluster.ask(endpoint, body))["error"]
        assert (endpoint, body, error["code"]) == (endpoint, body, code)
        assert named in error["message"]


async def test_scale_asks_the_supervisor(cluster: Cluster) -> None:
    async def supervise(question: Scale) -> ScaleReply:
        if question.service == "engines":
            return ScaleRefusal("only one GPU")
        return ScaleResult(tuple(f"{question.service}-{i + 1}" for i in range(question.count)), ())

    await cluster.bus.serve(topics.scaling(), supervise)
    await cluster.bus.flush()
    answer = await cluster.ask("scale", {"service": "tokenizer", "count": 2})
    assert answer == {
        "service": "tokenizer",
        "started": ["tokenizer-1", "tokenizer-2"],
        "stopping": [],
        "superseded": [],
    }
    refused = (await cluster.ask("scale", {"service": "engines", "count": 2}))["error"]
    assert (refused["code"], refused["message"]) == (409, "only one GPU")


async def test_a_process_is_struck_on_whichever_host_it_runs(cluster: Cluster) -> None:
    async def supervise(host: str, order: StrikeProcess) -> StrikeReply:
        if order.instance == f"{host}engine-1-rank0":
            return ProcessStruck(len(host))
        return StrikeRefusal(f"instance: {order.instance} has no process here just now")

    await cluster.bus.serve(topics.scaling(), partial(supervise, ""))
    await cluster.bus.serve(topics.host_scaling(NodeId("gpu-2")), partial(supervise, "gpu-2-"))
    await cluster.bus.flush()
    for instance, pid in (("engine-1-rank0", 0), ("gpu-2-engine-1-rank0", 6)):
        struck = await cluster.ask("strike", {"instance": instance, "fault": "kill"})
        assert struck == {"instance": instance, "fault": "kill", "pid": pid}
    named = {"instance": "gpu-2-engine-1-rank0", "fault": "kill", "host": "gpu-2"}
    assert (await cluster.ask("strike", named))["pid"] == 6
    refused = (await cluster.ask("strike", {"instance": "gpu-3-engine-1", "fault": "kill"}))["error"]
    assert (refused["code"], "no process here" in refused["message"]) == (404, True)


async def test_every_engine_is_paused_or_the_silent_one_is_named(cluster: Cluster) -> None:
    asked: list[Any] = []

    async def answer(question: SchedulerQuestion) -> PauseState:
        asked.append(question)
        return PauseState("all", 2)

    await cluster.bus.serve(topics.engine_probes(EngineId("engine-1")), answer)
    await cluster.bus.flush()
    await cluster.hear(engine("engine-1"))
    assert await cluster.ask("pause", {"mode": "all"}) == {"instances": {"engine-1": {"paused": "all", "busy": 2}}}
    assert await cluster.ask("paused") == {"instances": {"engine-1": {"paused": "all", "busy": 2}}}
    await cluster.hear(engine("engine-2"))
    refused = (await cluster.ask("resume"))["error"]
    assert (refused["code"], "engine-2" in refused["message"]) == (503, True)
    assert asked == [PauseGeneration("all"), ReadPauseState(), ResumeGeneration()]


async def test_two_coordinators_share_the_requests_and_place_each_once(cluster: Cluster) -> None:
    placed: asyncio.Queue[RequestPlaced] = asyncio.Queue()
    generated: list[str] = []

    async def generate(message: Any) -> None:
        generated.append(message.generation.request)

    await cluster.bus.subscribe(topics.gateway_inbox(GATEWAY), placed.put)  # type: ignore[arg-type]
    for name in ("engine-1", "engine-2"):
        await cluster.bus.subscribe(topics.engine_requests(EngineId(name)), generate)
    await cluster.bus.flush()
    await cluster.hear(engine("engine-1", max_running=64), engine("engine-2", max_running=64), detokenizer())
    for i in range(40):
        await cluster.bus.publish(topics.route(), route(f"r{i}"))
    async with asyncio.timeout(DEADLINE):
        messages = [await placed.get() for _ in range(40)]
    assert sorted(m.request for m in messages) == sorted(f"r{i}" for i in range(40))
    assert sorted(generated) == sorted(m.request for m in messages)
    on_first = sum(m.engine == "engine-1" for m in messages)
    assert 18 <= on_first <= 22
