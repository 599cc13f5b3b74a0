"""Any rank of a TP 2 × PP 2 engine is killed under streams: all ranks start anew, and every stream ends as it would.
Its model is a mixture, of which each rank has whole experts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.demo_mixture import write_demo_mixture

STREAMS = 4
TOKENS = 150
RANKS = [f"engine-1-rank{rank}" for rank in range(4)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model, how = write_demo_mixture(tmp_path_factory.mktemp("model") / "demo"), ["--enable-expert-parallel"]
    with running_stack(
        tmp_path_factory.mktemp("ranks"), model=model, tp=2, pp=2, settings=["worker.threads=1"], more=how
    ) as stack:
        yield stack


@pytest.fixture
def library_stack(tmp_path: Path) -> Iterator[RunningStack]:
    """The demo model, by the code of `transformers`."""
    how = ["--model-impl", "transformers"]
    with running_stack(tmp_path, tp=2, pp=2, settings=["worker.threads=1"], more=how) as stack:
        yield stack


async def streams(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS[:STREAMS])
        return await asyncio.gather(*chats)


async def survive_the_death_of(stack: RunningStack, victim: str, undisturbed: list[Streamed]) -> None:
    before = {rank: stack.pid(rank) for rank in RANKS}
    started = asyncio.Event()
    open_streams = asyncio.create_task(streams(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    assert not open_streams.done(), "the streams ended before anything happened to them"
    stack.kill(victim)
    seen = await open_streams
    assert [s.text for s in seen] == [s.text for s in undisturbed]
    assert [(s.finishes, s.completion_tokens) for s in seen] == [(["length"], TOKENS)] * STREAMS
    for rank in RANKS:
        stack.replaced(rank, before[rank])
    assert await blocks_in_use(stack) == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.features("pipeline parallel", "tensor parallel", "expert parallel", "re-dispatch")
async def test_streams_survive_the_death_of_a_rank(stack: RunningStack, victim: str) -> None:
    await survive_the_death_of(stack, victim, await streams(stack))


@pytest.mark.features("pipeline parallel", "tensor parallel", "re-dispatch")
async def test_streams_survive_where_the_library_computes(library_stack: RunningStack) -> None:
    await survive_the_death_of(library_stack, RANKS[1], await streams(library_stack))
