"""Grammars that would take an engine down: each is answered by a 400 that names its limit, and no other request and no
process notices.

Every one of these ended a scheduler or a worker, or held all requests up, while grammars were compiled and followed in
the rank's own process (docs/adr/0020).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack

QUESTION = "What is the capital of France?"
COMPILE_LIMIT, STEP_LIMIT = "limit grammar_compile_s", "limit grammar_step_ms"

HOSTILE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a jump ahead without an end": ({"regex": "((a{1000}){1000}){1000}"}, (STEP_LIMIT, "limit grammar_memory")),
    "nested pluses": ({"regex": "(" * 11 + "a" + "+)" * 11}, (STEP_LIMIT,)),
    "42 bytes of ambiguity": ({"grammar": 'root ::= root root | root root root | "a"'}, (STEP_LIMIT,)),
    "wide alternations": (
        {"regex": "(" + "|".join(f"w{number * 7919 % 100003}x" for number in range(16000)) + ")+"},
        (COMPILE_LIMIT, STEP_LIMIT),
    ),
    "a schema of 4,500 properties": (
        {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4500)}}},
        (COMPILE_LIMIT,),
    ),
}
"""What is asked for, and the limits of which the error names one."""

PATIENCE = 3 * DEADLINE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    settings = ("worker.grammar_compile_s=1", "worker.grammar_step_ms=10")
    with running_stack(tmp_path_factory.mktemp("hostile"), settings=settings) as stack:
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client


async def ask(client: AsyncOpenAI, model: str, guided: dict[str, Any], min_tokens: int = 0, **options: Any) -> Any:
    """`min_tokens` keep a sequence from ending before its grammar shows what it costs."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    body = {"structured_outputs": guided, "min_tokens": min_tokens}
    return await client.chat.completions.create(
        model=model, messages=messages, temperature=1.0, seed=3, extra_body=body, **options
    )


async def good(client: AsyncOpenAI, model: str) -> list[Streamed]:
    """A stream without a grammar, and one with."""
    small = {"structured_outputs": {"regex": "[0-9]{300}"}}
    return list(
        await asyncio.gather(
            stream_chat(client, model, QUESTION, max_tokens=300, extra_body={"ignore_eos": True}),
            stream_chat(client, model, QUESTION, max_tokens=310, extra_body=small),
        )
    )


async def test_hostile_grammars_are_refused_one_by_one_and_nobody_else_notices(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    before = {name: stack.pid(name) for name in ("engine-1", "engine-1-rank0")}
    async with asyncio.timeout(PATIENCE):
        undisturbed = await good(client, stack.model)
        beside = asyncio.create_task(good(client, stack.model))
        answers = await asyncio.gather(
            *(ask(client, stack.model, guided, 800, max_tokens=800) for guided, _ in HOSTILE.values()),
            return_exceptions=True,
        )
        assert [stream.text for stream in await beside] == [stream.text for stream in undisturbed]
    for (name, (_, limits)), answer in zip(HOSTILE.items(), answers, strict=True):
        assert isinstance(answer, openai.BadRequestError), (name, answer)
        assert isinstance(answer.body, dict)
        assert str(answer.body["param"]).startswith("structured_outputs."), name
        assert any(limit in str(answer.body["message"]) for limit in limits), (name, answer.body)
    assert {name: stack.pid(name) for name in before} == before
    assert await blocks_in_use(stack) == 0


async def test_many_choices_with_a_long_schema_make_no_plan_that_does_not_fit_the_bus(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    """128 times 120 kB would be 15 MB; the text goes to the workers once."""
    long = {"enum": ["yes", "no"], "description": "x" * 120_000}
    before = {name: stack.pid(name) for name in ("engine-1", "engine-1-rank0")}
    async with asyncio.timeout(PATIENCE):
        answer = await ask(client, stack.model, {"json": long}, max_tokens=20, n=128)
    assert {json.loads(choice.message.content) for choice in answer.choices} <= {"yes", "no"}
    assert len(answer.choices) == 128
    assert {name: stack.pid(name) for name in before} == before


def grammar_processes(rank: int) -> list[psutil.Process]:
    """Those of a rank's grammars: what the server that starts them has forked."""
    found: list[psutil.Process] = []
    for child in psutil.Process(rank).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "fork_server" in " ".join(child.cmdline()):
                found += child.children()
    return found


async def kill_grammars(rank: int) -> None:
    """Every one that there is, until it is cancelled."""
    while True:
        for process in grammar_processes(rank):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.sleep(0.02)


async def test_a_grammar_whose_processes_are_killed_again_and_again_is_refused_by_name(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    """It was tried six times, and each time in vain, as the process that had been killed was taken for compiled."""
    rank = stack.pid("engine-1-rank0")
    (before, *_) = await good(client, stack.model)
    killing = asyncio.create_task(kill_grammars(rank))
    try:
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(client.with_options(max_retries=0), stack.model, {"regex": "[x-z]{200}"}, max_tokens=250)
    finally:
        killing.cancel()
    assert failed.value.status_code == 500
    assert "refused for 60 s" in failed.value.message
    assert failed.value.param == "structured_outputs.regex"
    text = (await ask(client, stack.model, {"regex": "[u-w]{200}"}, max_tokens=250)).choices[0].message.content
    assert len(text) == 200
    assert (await good(client, stack.model))[0].text == before.text


async def test_a_stream_whose_grammar_loses_its_process_once_goes_on(stack: RunningStack, client: AsyncOpenAI) -> None:
    rank = stack.pid("engine-1-rank0")
    undisturbed = await ask(client, stack.model, {"regex": "[a-f]{300}"}, max_tokens=310)
    stream = await ask(client, stack.model, {"regex": "[a-f]{300}"}, max_tokens=310, stream=True)
    text = ""
    async for chunk in stream:
        before, text = text, text + (chunk.choices[0].delta.content or "" if chunk.choices else "")
        if not before and text:
            for process in grammar_processes(rank):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert text == undisturbed.choices[0].message.content
