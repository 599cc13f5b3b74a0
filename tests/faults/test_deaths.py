"""Any part of the ring is killed while streams are open; every stream ends with the text it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from tests.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.stack import Stack, running_stack

STREAMS = 16
TOKENS = 400
"""`ignore_eos` keeps every stream open long enough to be cut in the middle."""
VICTIMS = ("tokenizer-1", "coordinator-1", "detokenizer-1", "engine-1", "engine-1-rank0")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pairs")
    with running_stack(folder, engines=2, tokenizers=2, detokenizers=2, coordinators=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("lone")) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client


async def many(client: AsyncOpenAI, model: str, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with asyncio.timeout(DEADLINE):
        return await asyncio.gather(
            *(
                stream_chat(client, model, f"{QUESTIONS[i % len(QUESTIONS)]} ({i})", started, **options)
                for i in range(STREAMS)
            )
        )


async def interrupted(stack: Stack, client: AsyncOpenAI, interrupt: object) -> list[Streamed]:
    started = asyncio.Event()
    streams = asyncio.create_task(many(client, stack.model, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    await asyncio.sleep(0.1)
    assert callable(interrupt)
    await asyncio.to_thread(interrupt)
    return await streams


def assert_complete(seen: list[Streamed], undisturbed: list[Streamed]) -> None:
    assert [s.text for s in seen] == [s.text for s in undisturbed]
    assert [s.finishes for s in seen] == [["length"]] * STREAMS
    assert [s.completion_tokens for s in seen] == [TOKENS] * STREAMS


@pytest.mark.parametrize("victim", VICTIMS)
async def test_streams_survive_a_kill(stack: Stack, client: AsyncOpenAI, victim: str) -> None:
    undisturbed = await many(client, stack.model)
    seen = await interrupted(stack, client, lambda: stack.kill(victim))
    assert_complete(seen, undisturbed)
    await asyncio.to_thread(stack.wait_ready)
    assert stack.blocks_in_use() == 0


async def test_streams_survive_a_restart_of_the_bus(stack: Stack, client: AsyncOpenAI) -> None:
    undisturbed = await many(client, stack.model)
    seen = await interrupted(stack, client, lambda: stack.kill("nats"))
    assert_complete(seen, undisturbed)


@pytest.mark.parametrize("victim", ["engine-1", "engine-1-rank0"])
async def test_streams_survive_the_death_of_a_lone_engine(lone: Stack, victim: str) -> None:
    async with client_of(lone.url) as client:
        undisturbed = await many(client, lone.model)
        seen = await interrupted(lone, client, lambda: lone.kill(victim))
        assert_complete(seen, undisturbed)
    await asyncio.to_thread(lone.wait_ready)
    assert lone.blocks_in_use() == 0
