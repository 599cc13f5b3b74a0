"""Two gateways behind one port, and one of them is killed: the other one answers, resumable streams go on with the same
text, and no other stream ends as if it was complete. What a gateway's death costs has nothing to do with what computes:
the device is simulated, and says what depends on a request's seed; each stream has its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import httpx2
import pytest
from openai import APIConnectionError, AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.gateway.event_streams import Event, events, last_id

STREAMS = 8
TOKENS = 150
"""`ignore_eos` keeps every stream open long enough to be cut in the middle: 3 s."""
VICTIM = "gateway-1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder, slow, soon = tmp_path_factory.mktemp("gateways"), ["--sim-step-ms=20"], ["gateway.batch_lease_s=5"]
    with running_stack(folder, gateways=2, device="sim", more=slow, settings=soon) as stack:
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
    wanted = 2 * TOKENS
    options = {"max_tokens": wanted, "extra_body": {"ignore_eos": True}}
    events = [asyncio.Event() for _ in clients]
    streams = [
        asyncio.create_task(stream_chat(client, stack.model, question, event, **options))
        for client, question, event in zip(clients, QUESTIONS, events, strict=True)
    ]
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(event.wait() for event in events))
        rank = stack.kill("engine-1-rank0", signal.SIGSTOP)  # else streams may end before the gateway does
        opened = await requests_by_gateway(stack)
        assert set(opened) == {"gateway-1", "gateway-2"}, opened
        pid = stack.kill(VICTIM)
        with contextlib.suppress(ProcessLookupError):  # the supervisor may have ended it for its silence
            os.kill(rank, signal.SIGCONT)
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
    assert all(stream.completion_tokens == wanted for stream in finished)
    assert len(broken) == opened[VICTIM], ended
    for end in broken:
        assert isinstance(end, APIConnectionError) or "incomplete chunked read" in str(end), repr(end)
    await asyncio.to_thread(stack.replaced, VICTIM, pid)
    await stack.until_heard(lambda said: all(life.phase == "ready" for life in said.values()))


async def resumed_stream(stack: RunningStack, question: str, begun: asyncio.Event) -> tuple[list[Event], int]:
    """All events of a stream, on as many connections as it takes, and how many times it was cut off. A gateway that has
    just been started and knows no engine yet says 503: clients try again then."""
    request = {
        "model": stack.model,
        "messages": [{"role": "user", "content": question}],
        "seed": QUESTIONS.index(question),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"resumable": True, "include_usage": True},
    }
    seen: list[Event] = []
    for cuts in range(20):
        try:
            async with httpx2.AsyncClient(base_url=stack.url, timeout=DEADLINE) as http:
                async for event in events(http, request, last_id(seen) if seen else None):
                    seen.append(event)
                    if len(seen) == 5:
                        begun.set()
            return seen, cuts
        except httpx2.TransportError:
            await asyncio.sleep(0.05)
        except httpx2.HTTPStatusError as refused:
            if refused.response.status_code != 503 or not seen:
                raise
            await asyncio.sleep(0.2)
    raise AssertionError("cut off again and again")


def said(seen: list[Event]) -> dict[str, Any]:
    choices = [choice for _, data in seen[:-1] for choice in data["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "roles": sum("role" in choice["delta"] for choice in choices),
        "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [data["usage"]["completion_tokens"] for _, data in seen[:-1] if data["usage"]],
        "done": [data for _, data in seen if data == "[DONE]"],
    }


async def eight(stack: RunningStack, begun: list[asyncio.Event]) -> list[tuple[list[Event], int]]:
    async with asyncio.timeout(DEADLINE):
        return await asyncio.gather(
            *(resumed_stream(stack, question, event) for question, event in zip(QUESTIONS, begun, strict=True))
        )


async def test_resumable_streams_go_on_with_the_same_text(stack: RunningStack) -> None:
    undisturbed = [said(seen) for seen, _ in await eight(stack, [asyncio.Event() for _ in QUESTIONS])]
    assert [each["usage"] for each in undisturbed] == [[TOKENS]] * STREAMS
    assert len({each["text"] for each in undisturbed}) == STREAMS, "one that got another's text would not be noticed"
    begun = [asyncio.Event() for _ in QUESTIONS]
    streams = asyncio.create_task(eight(stack, begun))
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(event.wait() for event in begun))
    async with asyncio.timeout(DEADLINE):
        opened = await requests_by_gateway(stack)
    victim = max(opened, key=lambda name: opened[name])
    pid = stack.kill(victim)
    finished = await streams
    assert [said(seen) for seen, _ in finished] == undisturbed
    assert sum(cuts for _, cuts in finished) >= 1, opened
    await asyncio.to_thread(stack.replaced, victim, pid)
    await stack.until_heard(lambda said: all(life.phase == "ready" for life in said.values()))


BATCH_LINES = 200


def batch_holder(stack: RunningStack, id: str) -> str:
    """The gateway that works on a batch, as the stack's database has it."""
    with closing(sqlite3.connect(stack.run_dir / "database.sqlite")) as database:
        row = database.execute("SELECT holder FROM baton_records WHERE kind = 'batch' AND id = ?", (id,)).fetchone()
    return str(row[0]).partition("/")[0]


async def test_another_gateway_goes_on_with_a_batch_and_each_line_is_answered_once(stack: RunningStack) -> None:
    body = {"model": stack.model, "prompt": "The", "max_tokens": 40, "ignore_eos": True}
    lines = [
        {"custom_id": f"n{n}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": n}}
        for n in range(BATCH_LINES)
    ]
    async with client_of(stack.url).with_options(max_retries=10) as client, asyncio.timeout(DEADLINE):
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = await client.files.create(file=("in.jsonl", text), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while not (counts := (await client.batches.retrieve(made.id)).request_counts) or counts.completed < 10:
            await asyncio.sleep(0.1)
        stack.kill(batch_holder(stack, made.id))
        batch = await client.batches.retrieve(made.id)
        assert batch.status == "in_progress"
        while (batch := await client.batches.retrieve(made.id)).status in ("in_progress", "finalizing"):
            await asyncio.sleep(0.2)
        assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", BATCH_LINES)
        output = (await client.files.content(batch.output_file_id or "")).text
        answered = [json.loads(line) for line in output.splitlines()]
        assert [answer["custom_id"] for answer in answered] == [line["custom_id"] for line in lines]


async def test_background_responses_go_on_where_their_gateway_was(
    stack: RunningStack, clients: list[AsyncOpenAI]
) -> None:
    asked: Any = {"model": stack.model, "input": QUESTIONS[0], "max_output_tokens": TOKENS}
    asked["extra_body"] = {"ignore_eos": True, "seed": 5}
    async with asyncio.timeout(2 * DEADLINE):
        expected = await clients[0].responses.create(**asked)
        begun = [await client.responses.create(**asked, background=True) for client in clients]
        seen: list[Any] = []
        async for event in await clients[0].responses.retrieve(begun[0].id, stream=True):
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        opened = await requests_by_gateway(stack)
        victim = max(opened, key=lambda name: opened[name])
        assert opened[victim] > 0, opened
        pid = stack.kill(victim)
        retrying = [client.with_options(max_retries=5) for client in clients]
        for client, response in zip(retrying, begun, strict=True):
            while (ended := await client.responses.retrieve(response.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.5)
            assert (ended.status, ended.output_text) == ("incomplete", expected.output_text)
            events = [event async for event in await client.responses.retrieve(response.id, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == expected.output_text
        again = [event async for event in await retrying[0].responses.retrieve(begun[0].id, stream=True)]
        assert [event.to_json() for event in again[: len(seen)]] == [event.to_json() for event in seen]
    await asyncio.to_thread(stack.replaced, victim, pid)
