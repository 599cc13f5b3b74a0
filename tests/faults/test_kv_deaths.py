"""Pools that pass their KV blocks through the store: any part dies in any phase, any client leaves in any phase.

Every prompt is prefilled by one engine, in chunks, and handed over to another. What is killed is killed at a message
that shows how far the requests are. All streams end with what they would have been, and nothing stays held anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest
from openai import AsyncOpenAI

from shared.ids import NodeId
from shared.messages.kvstore import Commit, Find, Reserve
from tests.bus_moments import (
    Moment,
    blocks_are_copied,
    listening,
    prompts_are_computed,
    requests_are_handed_to,
    store_is_asked,
    tokens_are_drawn,
)
from tests.conversations import DEADLINE, client_of
from tests.kv_ring import ask, handed_over, prompts, retries
from tests.stack import RunningStack, running_stack

pytestmark = pytest.mark.timeout(400)

NODE = NodeId("here")
STREAMS = 16
TOKENS = 48
"""`ignore_eos` keeps every stream open long enough to be cut in the middle."""
LENGTHS = tuple(range(200, 200 + STREAMS * 13, 13))
"""Prompts in tokens: each of several chunks, and its last block full to another degree."""
SHAPE = ("--max-batch-tokens=96", f"--max-num-seqs={STREAMS}", f"--node={NODE}")
SETTINGS = (
    "coordinator.disaggregate_tokens=0",
    # What is left by whoever died with a lease is to be seen gone soon.
    "kvstore.lease_seconds=3",
    # Deaths are tested here, not how fast this machine is just now.
    "scheduler.store_deadline=0.5",
)
STORE = "40MiB"
"""Room for the blocks of one test, so that those of the test before go to Redis."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("pools")
    pools = {"prefill": 1, "decode": 2}
    with running_stack(folder, **pools, kvstore=STORE, redis=True, settings=SETTINGS, more=SHAPE) as stack:  # type: ignore[arg-type]
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client


@dataclass
class Seen:
    """One streamed completion as its client saw it."""

    text: str = ""
    finishes: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: int = 0


async def stream(client: AsyncOpenAI, model: str, prompt: list[int], salt: str, seen: Seen) -> None:
    """One greedy stream to its end. Another `salt` shares no blocks, and has the same text."""
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "cache_salt": salt},
    )
    async for chunk in answer:
        seen.chunks += 1
        for choice in chunk.choices:
            seen.text += choice.text
            if choice.finish_reason:
                seen.finishes.append(choice.finish_reason)
        if chunk.usage:
            seen.prompt_tokens, seen.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens


class Streams:
    """Owns one test's streams, all asked for at once."""

    def __init__(self, client: AsyncOpenAI, stack: RunningStack, salt: str) -> None:
        asked = prompts(stack, LENGTHS)
        self.seen = [Seen() for _ in asked]
        self.tasks = [
            asyncio.create_task(stream(client, stack.model, prompt, salt, seen))
            for prompt, seen in zip(asked, self.seen, strict=True)
        ]

    @property
    def begun(self) -> int:
        """How many have text."""
        return sum(bool(seen.text) for seen in self.seen)

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while self.begun < count:
                await asyncio.sleep(0.001)

    @property
    def ended(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def end(self) -> list[Seen]:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self.tasks)
        return self.seen


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Seen]:
    """The run without a death: everything is handed over, nothing is tried twice."""

    async def run() -> list[Seen]:
        async with client_of(stack.url) as client:
            return await Streams(client, stack, "undisturbed").end()

    seen = asyncio.run(run())
    assert (handed_over(stack), retries(stack)) == (STREAMS, 0)
    assert [(one.finishes, one.completion_tokens) for one in seen] == [(["length"], TOKENS)] * STREAMS
    return seen


async def unrest(stack: RunningStack) -> dict[str, int]:
    """Who is not ready, or still has anything in hand: empty once there is nobody."""
    said = await stack.ps()
    found = {m.instance: 1 for m in stack.state.members if m.instance not in said or said[m.instance].phase != "ready"}
    for life in said.values():
        held = {f"{life.instance} requests": life.load}
        if life.engine is not None:
            held[f"{life.instance} blocks"] = life.engine.blocks_total - life.engine.blocks_free
        if life.store is not None:
            held |= {"pinned": life.store.pinned, "reserved": life.store.reserved}
        found |= {what: count for what, count in held.items() if count}
    return found


async def assert_at_rest(stack: RunningStack) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE
    while (found := await unrest(stack)) and loop.time() < deadline:
        await asyncio.sleep(0.05)
    assert not found, stack.last_words()


async def assert_survived(
    stack: RunningStack,
    client: AsyncOpenAI,
    undisturbed: list[Seen],
    moment: Moment,
    victim: str,
    kill: Callable[[], object],
) -> None:
    """All streams end as without the kill, and then everything is as it was before."""
    async with listening(stack, moment) as listener:
        streams = Streams(client, stack, f"{moment}, {victim} dies")
        await listener.moment()
    kill()
    assert not streams.ended, "all was over before anything happened"
    seen = await streams.end()
    assert [one.text for one in seen] == [one.text for one in undisturbed], stack.last_words()
    assert [(one.finishes, one.prompt_tokens, one.completion_tokens) for one in seen] == [
        (one.finishes, one.prompt_tokens, one.completion_tokens) for one in undisturbed
    ]
    await assert_at_rest(stack)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("prefill-1", prompts_are_computed("prefill-1")),
        ("prefill-1", tokens_are_drawn("prefill-1")),
        ("prefill-1", requests_are_handed_to("decode-1")),
        ("prefill-1-rank0", prompts_are_computed("prefill-1")),
        ("prefill-1-rank0", tokens_are_drawn("prefill-1")),
        ("decode-1", requests_are_handed_to("decode-1")),
        ("decode-1", tokens_are_drawn("decode-1")),
        ("decode-1-rank0", blocks_are_copied("decode-1")),
        ("decode-1-rank0", tokens_are_drawn("decode-1")),
        ("kvstore-1", store_is_asked(NODE, Find)),
        ("kvstore-1", store_is_asked(NODE, Reserve)),
        ("kvstore-1", store_is_asked(NODE, Commit)),
        ("kvstore-1", tokens_are_drawn("decode-1")),
    ],
    ids=str,
)
async def test_streams_survive_a_kill(
    stack: RunningStack, client: AsyncOpenAI, undisturbed: list[Seen], victim: str, moment: Moment
) -> None:
    pid = stack.pid(victim)
    await assert_survived(stack, client, undisturbed, moment, victim, lambda: stack.kill(victim))
    assert stack.pid(victim) != pid


@pytest.mark.parametrize(
    "moment",
    [prompts_are_computed("prefill-1"), tokens_are_drawn("prefill-1"), blocks_are_copied("decode-1")],
    ids=str,
)
async def test_streams_survive_a_restart_of_the_bus(
    stack: RunningStack, client: AsyncOpenAI, undisturbed: list[Seen], moment: Moment
) -> None:
    await assert_survived(stack, client, undisturbed, moment, "nats-server", stack.kill_nats)


@pytest.mark.parametrize("question", [Find, Reserve])
async def test_streams_survive_the_death_of_redis(
    stack: RunningStack, client: AsyncOpenAI, undisturbed: list[Seen], question: type[Find | Reserve]
) -> None:
    """While blocks are looked for there, and while they are evicted to it."""
    pid = stack.state.redis_pid
    moment = store_is_asked(NODE, question)
    await assert_survived(stack, client, undisturbed, moment, "redis-server", stack.kill_redis)
    await asyncio.to_thread(stack.until, lambda state: state.redis_pid not in (None, pid))


@pytest.mark.parametrize(
    "moment",
    [
        prompts_are_computed("prefill-1"),
        tokens_are_drawn("prefill-1"),
        requests_are_handed_to("decode-1"),
        blocks_are_copied("decode-1"),
        tokens_are_drawn("decode-1"),
    ],
    ids=str,
)
async def test_what_clients_leave_is_freed_and_others_go_on(
    stack: RunningStack, client: AsyncOpenAI, undisturbed: list[Seen], moment: Moment
) -> None:
    """Every second one disconnects."""
    async with listening(stack, moment) as listener:
        streams = Streams(client, stack, f"left at {moment}")
        await listener.moment()
    await leave(streams, undisturbed)
    await assert_at_rest(stack)


async def test_clients_may_leave_right_after_their_first_text(
    stack: RunningStack, client: AsyncOpenAI, undisturbed: list[Seen]
) -> None:
    streams = Streams(client, stack, "left at the first text")
    await streams.until_begun(1)
    await leave(streams, undisturbed)
    await assert_at_rest(stack)


async def leave(streams: Streams, undisturbed: list[Seen]) -> None:
    leaving = streams.tasks[::2]
    assert not all(task.done() for task in leaving), "all was over before anybody left"
    for task in leaving:
        task.cancel()
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.gather(*streams.tasks[1::2])
    assert [seen.text for seen in streams.seen[1::2]] == [seen.text for seen in undisturbed[1::2]]


async def test_a_prefix_outlives_every_engine_and_the_store(stack: RunningStack, client: AsyncOpenAI) -> None:
    (prompt,) = prompts(stack, [400], salt=1)
    first = await ask(client, stack.model, prompt)
    await assert_at_rest(stack)
    victims = [*stack.instances("scheduler"), *stack.instances("worker"), "kvstore-1"]
    killed = {victim: stack.kill(victim) for victim in victims}
    for victim, pid in killed.items():
        await asyncio.to_thread(stack.replaced, victim, pid)
    await assert_at_rest(stack)
    again = await ask(client, stack.model, prompt)
    assert (first.cached, again.cached) == (0, 384)
    assert again.text == first.text
    await assert_at_rest(stack)
