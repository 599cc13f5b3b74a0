"""Processes that stand still instead of dying: all of them are replaced, and nothing of the open streams is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack

TOKENS = 150
STREAMS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("still"), tp=2, kvstore="0", settings=["worker.threads=1"]) as stack:
        yield stack


async def streams(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS[:STREAMS])
        return await asyncio.gather(*chats)


@pytest.mark.parametrize(
    "victims",
    [("tokenizer-1", "coordinator-1", "engine-1-rank1"), ("detokenizer-1", "engine-1")],
    ids=["tokenizer, coordinator and a rank that another waits for in a collective", "detokenizer and scheduler"],
)
@pytest.mark.features("tensor parallel", "re-dispatch")
async def test_what_stands_still_is_replaced_and_streams_go_on(stack: RunningStack, victims: tuple[str, ...]) -> None:
    undisturbed = await streams(stack)
    started = asyncio.Event()
    disturbed = asyncio.create_task(streams(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    assert not disturbed.done(), "the streams ended before anything happened to them"
    stopped = {victim: stack.kill(victim, signal.SIGSTOP) for victim in victims}
    later = await streams(stack)
    for seen in (await disturbed, later):
        assert [s.text for s in seen] == [s.text for s in undisturbed]
        assert [(s.finishes, s.completion_tokens) for s in seen] == [(["length"], TOKENS)] * STREAMS
    for victim, pid in stopped.items():
        await asyncio.to_thread(stack.replaced, victim, pid)
    assert await blocks_in_use(stack) == 0


@pytest.fixture(scope="module")
def large_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Its processes promise to speak twice a minute, as those of a very large fleet do: silence alone shows nothing for
    a minute, neither to schedulers nor to the supervisor."""
    settings = ["worker.threads=1", "worker.heartbeat_interval_s=30"]
    folder, more = tmp_path_factory.mktemp("large"), ["--router-policy=round-robin"]
    with running_stack(folder, engines=2, kvstore="0", settings=settings, more=more) as stack:
        yield stack


@pytest.mark.features("re-dispatch")
async def test_a_rank_that_stands_still_under_a_living_scheduler_is_asked_and_given_up(
    large_fleet: RunningStack,
) -> None:
    undisturbed = await streams(large_fleet)
    started = asyncio.Event()
    disturbed = asyncio.create_task(streams(large_fleet, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    pid = large_fleet.kill("engine-1-rank0", signal.SIGSTOP)
    try:
        later = await streams(large_fleet)
        assert [s.text for s in await disturbed] == [s.text for s in later] == [s.text for s in undisturbed]
        assert "worker engine-1-rank0: silent for 2 s after it was asked, as a step is late" in large_fleet.log(
            "engine-1"
        )
        assert large_fleet.pid("engine-1-rank0") == pid, "it was not replaced, so its engine was given up"
    finally:
        os.kill(pid, signal.SIGCONT)
    await large_fleet.until_heard(lambda said: said["engine-1"].phase == "ready")
    assert await blocks_in_use(large_fleet) == 0
