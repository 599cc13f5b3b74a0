"""Gateways of several clusters, over real HTTP: requests go where there is room, and come back with the same text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.federation.topics import cluster_requests
from shared.bus import EndpointError
from shared.ids import ClusterName
from shared.messages.federation import ClusterRequest
from shared.messages.gateway import Deltas
from shared.messages.scheduler import Cancel
from shared.messages.tokenizer import Tokenize
from shared.topics import CLUSTERS_ADMIN
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.federated_gateways import Cluster, federated


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


async def content(cluster: Cluster, text: str = "hello", **fields: Any) -> str:
    """The answer's text, streamed."""
    pieces = []
    stream = await cluster.stack.openai.chat.completions.create(**chat(text, stream=True, **fields))
    async for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
    return "".join(pieces)


def served(cluster: Cluster) -> list[Tokenize]:
    """The attempts that this cluster's own ring had."""
    return [message for message in cluster.ring.seen if isinstance(message, Tokenize)]


async def fill(cluster: Cluster) -> None:
    """Its engine has no place left, and its gateway knows."""
    cluster.ring.busy = 9
    await cluster.ring.announce()
    await eventually(lambda: [each.room for each in cluster.federation.clusters.own_status(0.0).models] == [0])


async def switch(at: Cluster, what: str, cluster: str, **more: Any) -> dict[str, Any]:
    body = msgspec.json.encode({"cluster": cluster, **more})
    bus = at.stack.gateway.bus
    answer: dict[str, Any] = msgspec.json.decode(await bus.request_raw(f"{CLUSTERS_ADMIN}.{what}", body, 60))
    return answer


async def test_a_request_stays_at_home_while_there_is_room() -> None:
    async with federated("eu", "us") as (eu, us):
        assert await content(eu, max_tokens=8) == said(8)
        assert (len(served(eu)), len(served(us))) == (1, 0)


async def test_a_request_that_finds_its_cluster_full_is_served_by_another() -> None:
    async with federated("eu", "us") as (eu, us):
        await fill(eu)
        assert await content(eu, max_tokens=8) == said(8)
        assert served(eu) == []
        (attempt,) = served(us)
        assert attempt.gateway == "gateway-1"
        assert attempt.request.startswith("eu/")
        answer = await eu.stack.openai.chat.completions.create(**chat("one two three", max_tokens=4))
        assert answer.choices[0].message.content == said(4)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        await eventually(lambda: len(us.federation.relayed) == 0 and us.stack.gateway.is_idle())


async def test_where_nobody_has_room_a_request_waits_at_home() -> None:
    async with federated("eu", "us") as (eu, us):
        await fill(us)
        await us.federation.say_status()
        await eventually(lambda: not eu.federation.clusters.has_room(MODEL))
        await fill(eu)
        assert await content(eu, max_tokens=8) == said(8)
        assert (len(served(eu)), len(served(us))) == (1, 0)


async def test_a_request_that_was_sent_is_never_sent_on() -> None:
    async with federated("eu", "us") as (eu, us):
        await content(eu, max_tokens=2)
        (tokenize,) = served(eu)
        await fill(us)
        await eventually(lambda: us.federation.clusters.has_room(MODEL))
        for cluster in ("eu", "nobody"):
            forwarded = ClusterRequest(ClusterName(cluster), "127.0.0.1:7300", tokenize)
            await eu.link.publish(cluster_requests(ClusterName("us")), forwarded)
        await eventually(lambda: len(served(us)) == 1 and len(us.federation.relayed) == 0)
        assert len(served(eu)) == 1
        assert served(us)[0].request.startswith("eu/"), "a cluster that is not known may send nothing"


async def test_a_cluster_without_engines_serves_by_another() -> None:
    async with federated("eu", "us", wait_for_engines_s=0.0) as (eu, us):
        eu.ring.absent = {"scheduler"}
        await eu.ring.die("scheduler")
        await eventually(lambda: not eu.federation.clusters.serves(MODEL))
        assert await content(eu, max_tokens=8) == said(8)
        assert len(served(us)) == 1
        assert (await eu.stack.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("loss", ["cut", "gateway", "message"])
async def test_a_stream_that_loses_its_cluster_goes_on_with_the_same_text(loss: str) -> None:
    async with federated("eu", "us", step=0.02) as (eu, us):
        await fill(eu)
        text = asyncio.create_task(content(eu, max_tokens=200))
        await eventually(lambda: len(us.federation.relayed) == 1 and us.ring.running != {})
        if loss == "cut":
            us.link.cut = True
        elif loss == "message":
            us.link.lose_next.append(Deltas)
        else:
            us.stack.runtime.stop()
        assert await text == said(200)
        if loss == "cut":
            assert eu.states()["us"] == "silent"
            (again,) = served(eu)
            assert again.attempt == 2
            await eventually(lambda: len(us.federation.relayed) == 0)  # nobody reads it there
            us.link.cut = False
            await eventually(lambda: eu.states()["us"] == "ready")
            assert await content(eu, max_tokens=8) == said(8)
            assert len(served(us)) == 2


async def test_what_a_request_asks_for_comes_back_from_another_cluster() -> None:
    wanted = chat("one two three", n=2, logprobs=True, top_logprobs=2, prompt_logprobs=1, max_tokens=4, seed=1)
    async with federated("eu", "us") as (eu, us):
        at_home = (await us.stack.http.post("/v1/chat/completions", json=wanted)).json()
        await fill(eu)
        elsewhere = (await eu.stack.http.post("/v1/chat/completions", json=wanted)).json()
        assert len(served(us)) == 4
        assert elsewhere["usage"] == at_home["usage"]
        assert elsewhere["choices"] == at_home["choices"]
        assert elsewhere.get("prompt_logprobs") == at_home.get("prompt_logprobs")


async def test_an_engine_that_fails_there_is_that_clusters_own_affair() -> None:
    async with federated("eu", "us") as (eu, us):
        await fill(eu)
        assert await content(eu, "FAIL", max_tokens=8) == said(8)
        assert served(eu) == []
        assert [attempt.attempt for attempt in served(us)] == [1, 2]


async def test_what_a_client_leaves_ends_in_the_other_cluster() -> None:
    async with federated("eu", "us", step=0.02) as (eu, us):
        await fill(eu)
        stream = await eu.stack.openai.chat.completions.create(**chat(stream=True, max_tokens=2000))
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: any(isinstance(message, Cancel) for message in us.ring.seen))
        await eventually(lambda: len(us.federation.relayed) == 0)


async def test_a_rejection_for_what_a_request_is_comes_back_as_it_is() -> None:
    async with federated("eu", "us") as (eu, us):
        await fill(eu)
        response = await eu.stack.http.post("/v1/chat/completions", json=chat("REJECT"))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "prompt: too long, 2048 tokens are allowed"
        assert len(served(us)) == 1


async def test_a_drained_cluster_sends_its_requests_away_until_it_is_undrained() -> None:
    async with federated("eu", "us", step=0.02) as (eu, us):
        before = asyncio.create_task(content(eu, max_tokens=100))
        await eventually(lambda: len(served(eu)) == 1)
        assert await switch(us, "drain", "eu") == {"cluster": "eu", "drained": True}
        assert us.states() == {"us": "here", "eu": "drained"}
        assert await content(eu, max_tokens=8) == said(8)
        assert (len(served(eu)), len(served(us))) == (1, 1)
        await fill(us)
        assert await content(us, max_tokens=8) == said(8), "nothing comes to a drained cluster"
        assert len(served(us)) == 2
        assert await before == said(100)
        await switch(eu, "undrain", "eu")
        assert await content(eu, max_tokens=8) == said(8)
        assert len(served(eu)) == 2


async def test_a_drained_cluster_is_still_drained_when_its_gateways_were_started_anew(tmp_path: Path) -> None:
    async with federated("eu", "us", folder=tmp_path) as (_, us):
        await switch(us, "drain", "eu")
    async with federated("eu", "us", folder=tmp_path) as (eu, us):
        assert eu.states()["eu"] == us.states()["eu"] == "drained"
        await eventually(lambda: eu.federation.clusters.has_room(MODEL))
        assert await content(eu, max_tokens=8) == said(8)
        assert (len(served(eu)), len(served(us))) == (0, 1)
        await switch(eu, "undrain", "eu")
    async with federated("eu", "us", folder=tmp_path) as (eu, _):
        assert eu.states() == {"eu": "here", "us": "ready"}
    (tmp_path / "eu.json").write_text("no JSON")
    async with federated("eu", "us", folder=tmp_path) as (eu, _):
        assert eu.states() == {"eu": "here", "us": "ready"}


async def test_open_streams_move_where_that_is_wanted() -> None:
    async with federated("eu", "us", step=0.02) as (eu, us):
        here = asyncio.create_task(content(eu, max_tokens=300))
        await eventually(lambda: len(served(eu)) == 1 and eu.ring.running != {})
        await fill(us)
        there = asyncio.create_task(content(us, max_tokens=300))
        await eventually(lambda: len(eu.federation.relayed) == 1 and len(served(eu)) == 2)
        await switch(us, "drain", "eu", move_after=0)
        assert (await here, await there) == (said(300), said(300))
        assert sorted(attempt.request.startswith("eu/") for attempt in served(us)) == [False, True]
        await eventually(lambda: len(eu.federation.relayed) == 0)


async def test_a_switch_that_cannot_be_is_refused() -> None:
    async with federated("eu", "us") as (eu, us):
        for body, code, words in (
            ({"cluster": "asia"}, 404, "none of eu, us"),
            ({"cluster": 7}, 400, "cluster"),
            ({"cluster": "us", "more": 1}, 400, "more"),
        ):
            with pytest.raises(EndpointError, match=words) as refused:
                await eu.stack.gateway.bus.request_raw(f"{CLUSTERS_ADMIN}.drain", msgspec.json.encode(body), 60)
            assert refused.value.code == code
        await switch(us, "drain", "us")
        with pytest.raises(EndpointError, match="no other cluster would take"):
            await switch(eu, "drain", "eu")


async def test_two_clusters_of_one_name_refuse_the_later_one() -> None:
    async with federated("eu", "us", "us") as (eu, _, other):
        await eventually(lambda: [each.state for each in eu.federation.listing()] == ["here", "ready", "refused"])
        refused = eu.federation.listing()[2]
        assert (refused.address, "give another --cluster" in refused.reason) == ("127.0.0.1:7302", True)
        assert other.federation.listing()[0].state == "refused"
        await fill(other)
        assert await content(other, max_tokens=8) == said(8), "it serves its own clients, alone"
        assert len(served(other)) == 1
