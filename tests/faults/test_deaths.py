"""Any part of the ring is killed while streams are open; every stream ends with the text it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.messages.lifecycle import Lifecycle
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import until_all_ready

STREAMS = 8
TOKENS = 200
"""`ignore_eos` keeps every stream open long enough to be cut in the middle."""
TRIES = 5
"""To do something while the streams are open: a client that had no time for a second finds them over."""
VICTIMS = ("tokenizer-1", "coordinator-1", "detokenizer-1", "engine-1", "engine-1-rank0")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("pairs")
    with running_stack(folder, engines=2, tokenizers=2, detokenizers=2, coordinators=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("lone"), more=["--pooling-type=last"]) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(pairs: RunningStack) -> list[Streamed]:
    """What every stack says where nobody dies: the model is the same, and draws nothing."""

    async def run() -> list[Streamed]:
        async with client_of(pairs.url) as client:
            return await many(client, pairs.model)

    return asyncio.run(run())


@pytest.fixture
async def client(pairs: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(pairs.url) as client:
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


async def interrupted(client: AsyncOpenAI, model: str, interrupt: Callable[[], object]) -> list[Streamed]:
    """Streams that are all open, and not all at their end, when `interrupt` is called."""
    for _ in range(TRIES):
        started = asyncio.Event()
        streams = asyncio.create_task(many(client, model, started))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        await asyncio.sleep(0.1)
        if not streams.done():
            interrupt()
            return await streams
        await streams
    raise AssertionError(f"{TRIES} times the streams ended before anything happened to them")


async def answers_of_the_next_engines(
    stack: RunningStack, ask: Callable[[], list[Coroutine[Any, Any, Any]]], *engines: str
) -> list[Any]:
    """What is answered to all that `ask` asks at once, whose engines die while they are at it."""
    for _ in range(TRIES):
        answers = [asyncio.ensure_future(each) for each in ask()]
        working = asyncio.ensure_future(stack.until_heard(anything_runs))
        await asyncio.wait((working, *answers), return_when=asyncio.FIRST_COMPLETED)
        if not any(answer.done() for answer in answers):
            assert anything_runs(await working)
            for engine in engines:
                stack.kill(engine)
            return await asyncio.gather(*answers)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(*answers)
    raise AssertionError(f"{TRIES} times an answer was there before anything happened to its engine")


def anything_runs(said: Mapping[str, Lifecycle]) -> bool:
    return any(life.engine.running for life in said.values() if life.engine is not None)


def assert_complete(seen: list[Streamed], undisturbed: list[Streamed]) -> None:
    assert [s.text for s in seen] == [s.text for s in undisturbed]
    assert [s.finishes for s in seen] == [["length"]] * STREAMS
    assert [s.completion_tokens for s in seen] == [TOKENS] * STREAMS


@pytest.mark.parametrize("victim", VICTIMS)
async def test_streams_survive_a_kill(
    pairs: RunningStack, client: AsyncOpenAI, undisturbed: list[Streamed], victim: str
) -> None:
    pid = pairs.pid(victim)
    seen = await interrupted(client, pairs.model, lambda: pairs.kill(victim))
    assert_complete(seen, undisturbed)
    pairs.replaced(victim, pid)
    await until_all_ready(pairs)
    assert await blocks_in_use(pairs) == 0


async def test_streams_survive_a_restart_of_the_bus(
    pairs: RunningStack, client: AsyncOpenAI, undisturbed: list[Streamed]
) -> None:
    seen = await interrupted(client, pairs.model, pairs.kill_nats)
    assert_complete(seen, undisturbed)
    await until_all_ready(pairs)
    assert await blocks_in_use(pairs) == 0


@pytest.mark.slow
async def test_searches_and_scored_prompts_survive_the_death_of_every_engine(
    pairs: RunningStack, client: AsyncOpenAI
) -> None:
    """Both engines die, whichever has them."""

    def ask() -> list[Coroutine[Any, Any, Any]]:
        searched = client.completions.create(
            model=pairs.model,
            prompt="Once upon a time",
            n=3,
            max_tokens=150,
            extra_body={"use_beam_search": True, "ignore_eos": True, "return_token_ids": True},
        )
        scored = client.completions.create(
            model=pairs.model,
            prompt="Once upon a time there was a lighthouse. " * 20,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"prompt_logprobs": 0, "ignore_eos": True},
        )
        return [searched, scored]

    def choices_of(answers: list[Any]) -> list[Any]:
        return [choice.model_dump() for answer in answers for choice in answer.choices]

    async with asyncio.timeout(DEADLINE):
        undisturbed = await asyncio.gather(*ask())
        answers = await answers_of_the_next_engines(pairs, ask, "engine-1-rank0", "engine-2-rank0")
    assert choices_of(answers) == choices_of(undisturbed)
    await until_all_ready(pairs)
    assert await blocks_in_use(pairs) == 0


@pytest.mark.parametrize("victim", ["engine-1", pytest.param("engine-1-rank0", marks=pytest.mark.slow)])
async def test_streams_survive_the_death_of_a_lone_engine(
    lone: RunningStack, undisturbed: list[Streamed], victim: str
) -> None:
    async with client_of(lone.url) as client:
        seen = await interrupted(client, lone.model, lambda: lone.kill(victim))
        assert_complete(seen, undisturbed)
    await until_all_ready(lone)
    assert await blocks_in_use(lone) == 0


@pytest.mark.features("pooling", "re-dispatch")
async def test_documents_are_ranked_though_a_lone_engine_dies(lone: RunningStack) -> None:
    documents = [f"Once upon a time there was lighthouse number {number}. " * 12 for number in range(80)]
    body = {"model": lone.model, "query": "Which lighthouse?", "documents": documents, "enable_prefix_caching": False}

    async def ask(client: AsyncOpenAI) -> dict[int, float]:
        answer: Any = await client.post("/rerank", body=body, cast_to=object)
        return {each["index"]: each["relevance_score"] for each in answer["results"]}

    async with client_of(lone.url) as client, asyncio.timeout(DEADLINE):
        undisturbed = await ask(client)
        [scores] = await answers_of_the_next_engines(lone, lambda: [ask(client)], "engine-1-rank0")
    assert scores == pytest.approx(undisturbed, abs=1e-5)
    assert await blocks_in_use(lone) == 0
