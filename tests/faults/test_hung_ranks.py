"""A rank whose device call never returns is replaced, and every stream ends with the text that it would have had."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY

TOKENS = 150
RANK = "engine-1-rank0"
HANGING = REPOSITORY / "tests/support/worker/hanging"


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this file is, the next step of a rank never ends."""
    return tmp_path_factory.mktemp("hang") / "now"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, hang: Path) -> Iterator[RunningStack]:
    environment = {"HANG_WHEN_THERE": str(hang), "PYTHONPATH": os.pathsep.join((str(HANGING), str(REPOSITORY)))}
    with running_stack(tmp_path_factory.mktemp("hung"), kvstore="0", environment=environment) as stack:
        yield stack


async def streams(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS)
        return await asyncio.gather(*chats)


@pytest.mark.features("re-dispatch")
async def test_streams_survive_a_device_call_that_never_returns(stack: RunningStack, hang: Path) -> None:
    undisturbed = await streams(stack)
    before, started = stack.pid(RANK), asyncio.Event()
    disturbed = asyncio.create_task(streams(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    await asyncio.to_thread(hang.touch)
    seen = await disturbed
    assert not await asyncio.to_thread(hang.exists), "no step was computed after that"
    assert [s.text for s in seen] == [s.text for s in undisturbed]
    assert [(s.finishes, s.completion_tokens) for s in seen] == [(["length"], TOKENS)] * len(QUESTIONS)
    stack.replaced(RANK, before)
    assert "tokens had no result after" in stack.log(RANK)
    assert await blocks_in_use(stack) == 0
