"""Two gateways behind one port, and one of them is killed: the other one answers, and no stream ends as if it was
complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
from openai import APIConnectionError, AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack

STREAMS = 8
TOKENS = 200
"""`ignore_eos` keeps every stream open long enough to be cut in the middle."""
VICTIM = "gateway-1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("gateways"), gateways=2) as stack:
        yield stack


async def requests_by_gateway(stack: RunningStack) -> dict[str, float]:
    """How many streams each gateway has open, as the page says that both of them answer for."""
    async with httpx2.AsyncClient(timeout=DEADLINE) as http:
        page = (await http.get(f"{stack.url}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("baton_gateway_open_exchanges{")]
    return {line.split('gateway="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.fixture
async def clients(stack: RunningStack) -> AsyncIterator[list[AsyncOpenAI]]:
    """A connection for each stream, as the kernel deals connections and not requests."""
    clients = [client_of(stack.url) for _ in range(STREAMS)]
    yield clients
    for client in clients:
        await client.close()


async def test_streams_end_with_an_error_and_new_requests_are_served(
    stack: RunningStack, clients: list[AsyncOpenAI]
) -> None:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    events = [asyncio.Event() for _ in clients]
    streams = [
        asyncio.create_task(stream_chat(client, stack.model, question, event, **options))
        for client, question, event in zip(clients, QUESTIONS, events, strict=True)
    ]
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(event.wait() for event in events))
        opened = await requests_by_gateway(stack)
        assert set(opened) == {"gateway-1", "gateway-2"}, opened
        pid = stack.kill(VICTIM)
        # A client with the SDK's usual retries notices nothing, as from now on connections go to the other one.
        retrying = clients[0].with_options(max_retries=2)
        answers = await asyncio.gather(
            *(
                retrying.chat.completions.create(
                    model=stack.model, messages=[{"role": "user", "content": question}], max_tokens=4
                )
                for question in QUESTIONS
            )
        )
        ended = await asyncio.gather(*streams, return_exceptions=True)
    assert all(answer.choices[0].message.content for answer in answers)
    finished = [end for end in ended if isinstance(end, Streamed)]
    broken = [end for end in ended if not isinstance(end, Streamed)]
    assert all(stream.completion_tokens == TOKENS for stream in finished)
    assert len(broken) == opened[VICTIM], ended
    for end in broken:
        assert isinstance(end, APIConnectionError) or "incomplete chunked read" in str(end), repr(end)
    await asyncio.to_thread(stack.replaced, VICTIM, pid)
    await stack.until_heard(lambda said: all(life.phase == "ready" for life in said.values()))
