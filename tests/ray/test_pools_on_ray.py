"""Pools of prefill and decode on the nodes of a Ray cluster: prompts go from one node's store to another's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from services.offline import LLM, SamplingParams
from tests.ray.conftest import RayMachines
from tests.support.cluster.conversations import client_of, stream_chat
from tests.support.cluster.ray_nodes import RayNodes
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL

pytestmark = pytest.mark.timeout(900)
QUESTION = "Ada lives in Oslo. Ben has a green boat and seven red hens. " * 12 + "Where does Ada live?"
ANSWER_TOKENS = 200
ONE_ENGINE = 3
"""CPUs of a node on which one engine fits, beside one of the other services."""
DISAGGREGATED = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")


class Pools(NamedTuple):
    stack: RunningStack
    machines: RayMachines
    ssd: Path


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder, ssd = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("ssd")
    with RayNodes(ONE_ENGINE) as cluster:
        machines = RayMachines(cluster)
        more = ("--launcher=ray", f"--ray-address={machines.address}", f"--kv-ssd={ssd}", "--kv-ssd-size=64MiB")
        with running_stack(folder, prefill=1, decode=1, kvstore="64MiB", settings=DISAGGREGATED, more=more) as running:
            yield Pools(running, machines, ssd)


async def counted(stack: RunningStack, instance: str, metric: str) -> float:
    """The sum of a counter over its labels."""
    port = (await stack.until_heard(lambda said: instance in said))[instance].metrics_port
    async with httpx2.AsyncClient() as http:
        page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(float(each) for each in re.findall(rf"(?m)^{metric}(?:{{[^}}]*}})? (\S+)$", page))


async def text_of(stack: RunningStack, begun: asyncio.Event | None = None) -> str:
    options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client:
        return (await stream_chat(client, stack.model, QUESTION, begun or asyncio.Event(), **options)).text


@pytest.fixture(scope="module")
def expected() -> str:
    """What one process says."""
    with LLM(str(DEMO_MODEL), device="cpu", dtype="float32", kv_memory="32MiB", progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        (answer,) = llm.chat([{"role": "user", "content": QUESTION}], params)
    return answer.outputs[0].text


async def test_a_prompt_goes_from_the_store_of_one_node_to_that_of_another(expected: str, pools: Pools) -> None:
    stack, machines, _ = pools
    assert machines.node_of(stack.pid("prefill-1")) != machines.node_of(stack.pid("decode-1"))
    for engine in ("prefill-1", "decode-1"):
        assert machines.node_of(stack.pid(f"{engine}-kvstore")) == machines.node_of(stack.pid(engine))
    assert await text_of(stack) == expected
    assert await counted(stack, "prefill-1", "baton_scheduler_hand_overs_total") > 0
    assert await counted(stack, "decode-1", "baton_scheduler_kv_blocks_loaded_total") > 0


async def test_each_store_has_a_folder_of_its_own_on_its_nodes_ssd(pools: Pools) -> None:
    assert sorted(each.name for each in pools.ssd.iterdir()) == ["decode-1", "prefill-1"]


async def test_a_pool_that_loses_its_node_under_streams_costs_no_text_and_runs_elsewhere(
    expected: str, pools: Pools
) -> None:
    stack, machines, _ = pools
    begun = [asyncio.Event() for _ in range(3)]
    streams = [asyncio.create_task(text_of(stack, each)) for each in begun]
    async with asyncio.timeout(60):
        await asyncio.gather(*(each.wait() for each in begun))
    former = stack.pid("decode-1")
    lost = machines.node_of(former)
    machines.lose(lost)
    assert [await each for each in streams] == [expected] * 3
    await stack.until_heard(lambda said: "decode-1" in said and said["decode-1"].phase == "ready")
    assert stack.pid("decode-1") != former
    assert machines.node_of(stack.pid("decode-1")) != lost
    assert await text_of(stack) == expected
