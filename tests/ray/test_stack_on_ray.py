"""`baton up --launcher ray` on several raylets: engines are placed, scaled, drained, lose their node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from deploy.launchers.ray.node import PREFIX
from deploy.supervisor.state_file import StackState, shared_memory
from shared.messages.lifecycle import Lifecycle
from tests.ray.conftest import RayMachines
from tests.support.cluster.conversations import client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack

QUESTION = "Tell me a story about a lighthouse."
LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
REAP_SECONDS = 10
"""In which a raylet reaps an actor that has ended."""


@pytest.fixture(scope="module")
def stack(machines: RayMachines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    more = ("--launcher=ray", f"--ray-address={machines.address}")
    folder = tmp_path_factory.mktemp("ray")
    with running_stack(folder, engines=2, kvstore="32MiB", more=more) as running:
        yield running


async def all_ready(stack: RunningStack) -> Mapping[str, Lifecycle]:
    """What every process says once all are ready, and the state file knows the same ones."""
    return await stack.until_heard(
        lambda said: (
            all(life.phase == "ready" for life in said.values())
            and {(name, life.pid) for name, life in said.items()} >= {(m.instance, m.pid) for m in stack.state.members}
        )
    )


def has(state: StackState, instance: str) -> bool:
    return any(member.instance == instance for member in state.members)


async def test_engines_run_on_the_nodes_and_gateways_here(stack: RunningStack, machines: RayMachines) -> None:
    placed = {name: machines.node_of(stack.pid(name)) for name in ("engine-1", "engine-2", "tokenizer-1")}
    assert {node.address for node in placed.values()} <= {node.address for node in machines.nodes}
    for engine in ("engine-1", "engine-2"):
        for part in (f"{engine}-rank0", f"{engine}-kvstore"):
            assert machines.node_of(stack.pid(part)) == placed[engine]
    supervisor = psutil.Process(stack.supervisor.pid)
    assert stack.pid("gateway-1") in {child.pid for child in supervisor.children()}
    async with client_of(stack.url) as client:
        answer = await stream_chat(client, stack.model, "What is the capital of France?", max_tokens=20)
    assert answer.finishes
    assert "Paris" in answer.text
    assert "ready" in stack.log("engine-1")


async def test_a_node_that_is_lost_under_streams_costs_no_text_and_its_engine_runs_elsewhere(
    stack: RunningStack, machines: RayMachines
) -> None:
    async with client_of(stack.url) as client:
        expected = (await stream_chat(client, stack.model, QUESTION, **LONG)).text
        begun = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(stream_chat(client, stack.model, QUESTION, each, **LONG)) for each in begun]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.wait() for each in begun))
        lost = machines.node_of(stack.pid("engine-1"))
        gone = {m.instance: m.pid for m in stack.state.members if m.pid and lost_has(machines, lost, m.pid)}
        machines.lose(lost)
        answers = await asyncio.gather(*streams)
    assert [answer.text for answer in answers] == [expected] * 4
    await all_ready(stack)
    for instance, pid in gone.items():
        assert stack.pid(instance) != pid
        assert machines.node_of(stack.pid(instance)) != lost
    assert not [pid for pid in gone.values() if psutil.pid_exists(pid)]


def lost_has(machines: RayMachines, lost: object, pid: int) -> bool:
    try:
        return machines.node_of(pid) == lost
    except StopIteration:
        return False


async def test_it_is_scaled_and_an_engine_that_goes_finishes_its_streams(stack: RunningStack) -> None:
    grown = await asyncio.to_thread(stack.baton, "scale", "engines=3")
    assert grown.returncode == 0, grown.stderr
    assert {"engine-3", "engine-3-rank0", "engine-3-kvstore"} <= (await all_ready(stack)).keys()
    async with client_of(stack.url) as client:
        begun = [asyncio.Event() for _ in range(6)]
        streams = [asyncio.create_task(stream_chat(client, stack.model, QUESTION, each, **LONG)) for each in begun]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.wait() for each in begun))
        shrunk = await asyncio.to_thread(stack.baton, "scale", "engines=1")
        assert shrunk.returncode == 0, shrunk.stderr
        answers = await asyncio.gather(*streams)
    assert len({answer.text for answer in answers}) == 1
    assert {answer.finish for answer in answers} == {"length"}
    await asyncio.to_thread(stack.until, lambda state: not has(state, "engine-2") and not has(state, "engine-3"))


async def test_a_killed_supervisors_engines_serve_on_and_are_taken_over(stack: RunningStack) -> None:
    await all_ready(stack)
    before = {member.instance: member.pid for member in stack.state.members}
    async with client_of(stack.url) as client:
        begun = [asyncio.Event() for _ in range(3)]
        streams = [asyncio.create_task(stream_chat(client, stack.model, QUESTION, each, **LONG)) for each in begun]
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.wait() for each in begun))
        stack.kill_supervisor()
        answers = await asyncio.gather(*streams)
        assert len({answer.text for answer in answers}) == 1
        assert (await stream_chat(client, stack.model, QUESTION, **LONG)).text == answers[0].text
    stack.start_supervisor()
    await asyncio.to_thread(stack.until, lambda state: state.pid == stack.supervisor.pid and state.phase == "ready")
    assert {member.instance: member.pid for member in stack.state.members} == before
    # The next one follows them: what dies is started again in its place.
    former = stack.kill("engine-1-kvstore")
    await asyncio.to_thread(stack.replaced, "engine-1-kvstore", former)
    assert stack.pid("engine-1") == before["engine-1"]
    await all_ready(stack)


async def test_nothing_is_left_after_baton_down(stack: RunningStack, tmp_path: Path) -> None:
    processes = [psutil.Process(member.pid) for member in stack.state.members if member.pid is not None]
    ended = await asyncio.to_thread(stack.baton, "down")
    assert ended.returncode == 0, ended.stderr
    assert await asyncio.to_thread(stack.supervisor.wait, 60) == 0
    _, left = psutil.wait_procs(processes, timeout=REAP_SECONDS)
    assert not left
    own = [each for each in shared_memory().glob(f"{PREFIX}*") if each.stat().st_uid == os.getuid()]
    assert not own
