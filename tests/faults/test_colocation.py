"""An engine whose scheduler, rank, coordinator and detokenizer are one process: what it says, and what its death costs.

The tests are in order, on one stack.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults.test_deaths import assert_complete, interrupted, many
from tests.support.cluster.conversations import Streamed, blocks_in_use, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import until_all_ready

ACTORS = ("engine-1", "engine-1-rank0", "engine-1-coordinator", "engine-1-detokenizer")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("one"), more=["--colocate"]) as stack:
        yield stack


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[Streamed]:
    """What a stack of as many processes as actors says."""

    async def run(stack: RunningStack) -> list[Streamed]:
        async with client_of(stack.url) as client:
            return await many(client, stack.model)

    with running_stack(tmp_path_factory.mktemp("apart")) as stack:
        return asyncio.run(run(stack))


async def test_one_process_says_what_four_say_and_steps_pass_no_server(
    stack: RunningStack, apart: list[Streamed]
) -> None:
    heard = await stack.until_heard(lambda said: said.keys() >= set(ACTORS))
    assert len({heard[name].pid for name in ACTORS}) == 1
    assert {heard[name].phase for name in ACTORS} == {"ready"}
    subjects: Counter[str] = Counter()

    async def tapped(subject: str, payload: bytes) -> None:
        subjects[subject.rpartition(".")[2]] += 1

    async with stack.bus() as bus, client_of(stack.url) as client:
        await bus.tap(">", tapped)
        assert_complete(await many(client, stack.model), apart)
    assert subjects["deltas"] > 10
    assert (subjects["steps"], subjects["results"], subjects["tokens"], subjects["requests"]) == (0, 0, 0, 0)


async def test_streams_survive_the_death_of_all_at_once(stack: RunningStack, apart: list[Streamed]) -> None:
    async with client_of(stack.url) as client:
        pid = stack.pid("engine-1")
        assert_complete(await interrupted(client, stack.model, lambda: stack.kill("engine-1")), apart)
    stack.replaced("engine-1", pid)
    await until_all_ready(stack)
    assert await blocks_in_use(stack) == 0


def _post(stack: RunningStack, path: str) -> object:
    request = urllib.request.Request(f"{stack.url}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


async def test_its_rank_falls_asleep_and_all_wakes_up(stack: RunningStack, apart: list[Streamed]) -> None:
    pid = stack.pid("engine-1")
    assert (await asyncio.to_thread(_post, stack, "/sleep?level=1"))["is_sleeping"] is True
    assert (await asyncio.to_thread(_post, stack, "/wake_up"))["is_sleeping"] is False
    async with client_of(stack.url) as client:
        assert_complete(await many(client, stack.model), apart)
    assert stack.pid("engine-1") == pid
