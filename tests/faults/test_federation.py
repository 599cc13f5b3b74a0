"""Two real clusters under load: one is drained, upgraded and comes back; the link is cut and healed; one is killed as a
whole. Every stream ends with the text that it would have had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psutil
import pytest

from deploy.errors import CommandError
from deploy.supervisor.servers.federation import NAME as SERVER
from shared.topics import CLUSTERS_ADMIN
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.ports import free_port
from tests.support.cluster.stack import RunningStack, running_stack

SECRET = {"BATON_FEDERATION_SECRET": "known to both clusters and to nobody else"}
SIMULATED = ("worker.sim_step_ms=20",)
ASKED = QUESTIONS[:4]
OPTIONS: dict[str, Any] = {"max_tokens": 150, "seed": 7, "extra_body": {"ignore_eos": True}}


class Pair(NamedTuple):
    eu: RunningStack
    us: RunningStack


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, eu_at, us_at = tmp_path_factory.mktemp("federation"), free_port(), free_port()
    shape: dict[str, Any] = {"device": "sim", "kvstore": "0", "environment": SECRET, "settings": SIMULATED}
    eu_options = ["--cluster=eu", f"--federation-address=127.0.0.1:{eu_at}"]
    us_options = ["--cluster=us", f"--federation-address=127.0.0.1:{us_at}", f"--federate=127.0.0.1:{eu_at}"]
    with ExitStack() as stacks:
        eu = stacks.enter_context(running_stack(folder / "eu", more=eu_options, **shape))
        us = stacks.enter_context(running_stack(folder / "us", more=us_options, **shape))
        yield Pair(eu, us)


async def clusters(stack: RunningStack) -> dict[str, str]:
    """The state of each cluster that it knows."""
    answer = await asked_of(stack, "list", {})
    return {each["name"]: each["state"] for each in answer["clusters"]}


async def asked_of(stack: RunningStack, what: str, request: dict[str, Any]) -> Any:
    """What the operators' service answers; asked again where the machine was too busy to answer."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                async with stack.bus() as bus:
                    body = json.dumps(request).encode()
                    return json.loads(await bus.request_raw(f"{CLUSTERS_ADMIN}.{what}", body, DEADLINE))
            except CommandError:
                await asyncio.sleep(0.5)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await true():
            await asyncio.sleep(0.1)


async def until_known(stack: RunningStack, **states: str) -> None:
    async def known() -> bool:
        return await clusters(stack) == states

    await until(known)


async def switch(stack: RunningStack, what: str, cluster: str) -> None:
    await asked_of(stack, what, {"cluster": cluster})


async def engine_load(stack: RunningStack) -> int | None:
    """Requests that its engine has; None where the machine was too busy to hear of it."""
    with contextlib.suppress(CommandError):
        heard = await stack.ps()
        return heard["engine-1"].load if "engine-1" in heard else None
    return None


async def streams(stack: RunningStack, begun: Sequence[asyncio.Event] = ()) -> list[str]:
    """The answers to all questions, asked at once. Sets each of `begun` at the first text."""
    events = begun or [asyncio.Event() for _ in ASKED]
    async with client_of(stack.url) as client:
        asked = [
            stream_chat(client, stack.model, question, started, **OPTIONS)
            for question, started in zip(ASKED, events, strict=True)
        ]
        return [answer.text for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, str]:
    """What each question is answered with when nothing happens: the same in both clusters."""
    eu, us = (asyncio.run(streams(stack)) for stack in pair)
    assert eu == us
    return dict(zip(ASKED, eu, strict=True))


@asynccontextmanager
async def load(*stacks: RunningStack) -> AsyncIterator[list[tuple[str, Streamed]]]:
    """Streams to each of the stacks all the time, two at once; what came, once the context has ended."""
    stopped, done = asyncio.Event(), list[tuple[str, Streamed]]()

    async def ask(stack: RunningStack, number: int) -> None:
        async with client_of(stack.url) as client:
            while not stopped.is_set():
                question = ASKED[number % len(ASKED)]
                done.append((question, await stream_chat(client, stack.model, question, **OPTIONS)))
                number += 1

    async with asyncio.TaskGroup() as tasks:
        for stack in stacks:
            for number in range(2):
                tasks.create_task(ask(stack, number))
        try:
            yield done
        finally:
            stopped.set()


async def test_a_cluster_is_drained_and_upgraded_under_load_and_comes_back(pair: Pair, texts: dict[str, str]) -> None:
    eu, us = pair
    await until_known(us, us="here", eu="ready")
    async with load(eu, us) as done:
        await switch(us, "drain", "eu")
        assert await clusters(eu) == {"eu": "drained", "us": "ready"}
        await until(lambda: is_idle(eu))
        former = eu.kill("engine-1")
        await asyncio.to_thread(eu.replaced, "engine-1", former)
        await until(lambda: is_idle(eu))
        await switch(eu, "undrain", "eu")
        await until(lambda: is_busy(eu))
    assert len(done) > 4
    assert [answer.text for question, answer in done if answer.text != texts[question]] == []
    assert {answer.finish for _, answer in done} == {"length"}


async def is_idle(stack: RunningStack) -> bool:
    return await engine_load(stack) == 0


async def is_busy(stack: RunningStack) -> bool:
    return bool(await engine_load(stack))


@contextlib.contextmanager
def silent_link(stack: RunningStack) -> Iterator[None]:
    """Nothing passes between this cluster and others, and nobody is told."""
    pid = stack.state.processes[SERVER].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_streams_in_another_cluster_go_on_at_home_when_the_link_is_cut_and_it_heals(
    pair: Pair, texts: dict[str, str]
) -> None:
    eu, us = pair
    await switch(us, "drain", "eu")
    begun = [asyncio.Event() for _ in ASKED]
    asked = asyncio.create_task(streams(eu, begun))
    await asyncio.gather(*(started.wait() for started in begun))
    with silent_link(us):
        assert await asked == list(texts.values())
        await until_known(eu, eu="drained", us="silent")
        assert await streams(eu) == list(texts.values()), "a drained cluster serves on where there is no other"
    await until_known(eu, eu="drained", us="ready")
    await until_known(us, us="here", eu="drained")
    await switch(eu, "undrain", "eu")


async def test_a_cluster_that_is_killed_as_a_whole_loses_no_stream_of_others(pair: Pair, texts: dict[str, str]) -> None:
    eu, us = pair
    ran = await asyncio.to_thread(us.baton, "cluster", "drain", "eu")
    assert (ran.returncode, ran.stdout) == (0, "Cluster eu is drained: new requests go to other clusters.\n")
    begun = [asyncio.Event() for _ in ASKED]
    asked = asyncio.create_task(streams(eu, begun))
    await asyncio.gather(*(started.wait() for started in begun))
    kill_whole(us)
    assert await asked == list(texts.values())
    await until_known(eu, eu="drained", us="silent")
    ran = await asyncio.to_thread(eu.baton, "cluster", "list")
    assert [line.split()[:2] for line in ran.stdout.splitlines()[1:]] == [["eu", "drained"], ["us", "silent"]]
    ran = await asyncio.to_thread(eu.baton, "cluster", "drain", "us")
    assert (ran.returncode, ran.stderr) == (1, "baton: cluster us cannot be reached\n")


def kill_whole(stack: RunningStack) -> None:
    """All of its processes at once, the supervisor first, as a data centre goes."""
    supervisor = psutil.Process(stack.supervisor.pid)
    living = [identity.pid for identity in stack.state.living().values()]
    for pid in (supervisor.pid, *(child.pid for child in supervisor.children(recursive=True)), *living):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        stack.supervisor.wait(10)
