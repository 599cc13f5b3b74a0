"""Pools that pass their KV blocks through the store: any part dies in any phase, any client leaves in any phase.

Every prompt is prefilled by one engine, in chunks, and handed over to another. What is killed is killed at a message
that shows how far the requests are. All streams end with what they would have been, and nothing stays held anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.ids import NodeId
from shared.messages.kvstore import Commit, Find, Reserve
from tests.support.cluster.bus_moments import (
    Moment,
    blocks_are_copied,
    listening,
    prompts_are_computed,
    requests_are_handed_to,
    store_is_asked,
    tokens_are_drawn,
)
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import ask, handed_over, prompts, retries
from tests.support.kv.streams import TOKENS, Seen, Streams, assert_at_rest

pytestmark = pytest.mark.timeout(400)

NODE = NodeId("here")
STREAMS = 16
LENGTHS = tuple(range(200, 200 + STREAMS * 13, 13))
"""Prompts in tokens: each of several chunks, and its last block full to another degree."""
SHAPE = ("--max-batch-tokens=96", f"--max-num-seqs={STREAMS}", f"--node={NODE}")
SETTINGS = (
    "coordinator.disaggregate_tokens=0",
    # What is left by whoever died with a lease is to be seen gone soon.
    "kvstore.lease_seconds=3",
    # Deaths are tested here, not how fast this machine is just now: an engine that gives up a store which is only
    # starved keeps its requests, and none is handed over where a test waits for it. Above 2 s a busy machine has been.
    "scheduler.store_deadline=10",
)
STORE = "40MiB"
"""Room for the blocks of one test, so that those of the test before go to Redis."""


_TRIES = 3


def slow(*values: object) -> Any:
    """A case that only `make test-slow` has time for."""
    return pytest.param(
        *values, marks=pytest.mark.slow, id="-".join(getattr(each, "__name__", str(each)) for each in values)
    )


@dataclass(frozen=True)
class Scene:
    """A stack, a client, what it asks, and what it is answered when nobody dies."""

    stack: RunningStack
    client: AsyncOpenAI
    prompts: list[list[int]]
    undisturbed: list[Seen]

    def ask(self, salt: str) -> Streams:
        return Streams(self.client, self.stack.model, self.prompts, salt)

    async def survives(self, moment: Moment, salt: str, interfere: Callable[[], object]) -> None:
        """All streams end as they would have, and then everything is as it was before."""
        streams = await self.until(moment, salt)
        interfere()
        assert not streams.ended, "all was over before anything happened"
        assert await streams.end() == self.undisturbed, self.stack.last_words()
        await assert_at_rest(self.stack)

    async def until(self, moment: Moment, salt: str) -> Streams:
        """Streams that have come to `moment`; asked again where a busy machine showed it when all was over."""
        for number in range(_TRIES):
            async with listening(self.stack, moment) as listener:
                streams = self.ask(f"{salt} {number}")
                await listener.moment()
            if not streams.ended:
                break
            await streams.end()
        return streams


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("pools")
    with running_stack(folder, prefill=1, decode=2, kvstore=STORE, redis=True, settings=SETTINGS, more=SHAPE) as stack:
        yield stack


@pytest.fixture(scope="module")
def asked(stack: RunningStack) -> list[list[int]]:
    return prompts(stack, LENGTHS)


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack, asked: list[list[int]]) -> list[Seen]:
    """The run without a death: requests are handed over, and none is tried twice."""

    async def run() -> list[Seen]:
        async with client_of(stack.url) as client:
            return await Streams(client, stack.model, asked, "undisturbed").end()

    seen = asyncio.run(run())
    assert handed_over(stack) > 0
    assert retries(stack) == 0
    assert [(one.finishes, one.completion_tokens) for one in seen] == [(["length"], TOKENS)] * STREAMS
    return seen


@pytest.fixture
async def scene(stack: RunningStack, asked: list[list[int]], undisturbed: list[Seen]) -> AsyncIterator[Scene]:
    async with client_of(stack.url) as client:
        await until_handed_to_both(stack, client, asked[0])
        yield Scene(stack, client, asked, undisturbed)


async def until_handed_to_both(stack: RunningStack, client: AsyncOpenAI, prompt: list[int]) -> None:
    """Until both decode engines take requests over. A store may still be started again, or have been lost to an engine
    for the moment, though all say that they are ready: the prefill engine then keeps what the test waits to see
    elsewhere."""
    engines = ("decode-1", "decode-2")
    before = [handed_over(stack, engine) for engine in engines]
    async with asyncio.timeout(DEADLINE):
        while any(handed_over(stack, engine) == count for engine, count in zip(engines, before, strict=True)):
            await asyncio.gather(*(ask(client, stack.model, prompt, max_tokens=8) for _ in range(4)))
    await assert_at_rest(stack)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("prefill-1", prompts_are_computed("prefill-1")),
        slow("prefill-1", tokens_are_drawn("prefill-1")),
        slow("prefill-1", requests_are_handed_to("decode-1")),
        slow("prefill-1-rank0", prompts_are_computed("prefill-1")),
        ("prefill-1-rank0", tokens_are_drawn("prefill-1")),
        ("decode-1", requests_are_handed_to("decode-1")),
        slow("decode-1", tokens_are_drawn("decode-1")),
        ("decode-1-rank0", blocks_are_copied("decode-1")),
        slow("decode-1-rank0", tokens_are_drawn("decode-1")),
        slow("kvstore-1", store_is_asked(NODE, Find)),
        slow("kvstore-1", store_is_asked(NODE, Reserve)),
        ("kvstore-1", store_is_asked(NODE, Commit)),
        slow("kvstore-1", blocks_are_copied("decode-1")),
        ("detokenizer-1", requests_are_handed_to("decode-1")),
        slow("coordinator-1", prompts_are_computed("prefill-1")),
    ],
    ids=str,
)
async def test_streams_survive_a_kill(scene: Scene, victim: str, moment: Moment) -> None:
    pid = scene.stack.pid(victim)
    await scene.survives(moment, f"{victim} dies when {moment}", lambda: scene.stack.kill(victim))
    assert scene.stack.pid(victim) != pid


@pytest.mark.parametrize(
    "moment",
    [
        slow(prompts_are_computed("prefill-1")),
        tokens_are_drawn("prefill-1"),
        slow(blocks_are_copied("decode-1")),
    ],
    ids=str,
)
async def test_streams_survive_a_restart_of_the_bus(scene: Scene, moment: Moment) -> None:
    await scene.survives(moment, f"bus dies when {moment}", scene.stack.kill_nats)


@pytest.mark.parametrize("question", [Find, slow(Reserve)])
async def test_streams_survive_the_death_of_redis(scene: Scene, question: type[Find | Reserve]) -> None:
    """While blocks are looked for there that were evicted long ago, and while others are evicted to it."""
    pid = scene.stack.state.redis_pid
    salt = "undisturbed" if question is Find else "redis dies"
    await scene.survives(store_is_asked(NODE, question), salt, scene.stack.kill_redis)
    await asyncio.to_thread(scene.stack.until, lambda state: state.redis_pid not in (None, pid))


async def test_streams_survive_a_store_that_stands_still(scene: Scene) -> None:
    """Nothing waits for it; what it was asked meanwhile does no harm once it goes on."""
    pid = scene.stack.pid("kvstore-1")
    moment = store_is_asked(NODE, Commit)
    async with listening(scene.stack, moment) as listener:
        streams = scene.ask("the store stands still")
        await listener.moment()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await streams.end() == scene.undisturbed, scene.stack.last_words()
    finally:
        with contextlib.suppress(ProcessLookupError):  # the supervisor may have ended it for its silence
            os.kill(pid, signal.SIGCONT)
    await assert_at_rest(scene.stack)


@pytest.mark.parametrize(
    "moment",
    [
        prompts_are_computed("prefill-1"),
        slow(tokens_are_drawn("prefill-1")),
        requests_are_handed_to("decode-1"),
        slow(blocks_are_copied("decode-1")),
        tokens_are_drawn("decode-1"),
    ],
    ids=str,
)
async def test_what_clients_leave_is_freed_and_others_go_on(scene: Scene, moment: Moment) -> None:
    streams = await scene.until(moment, f"left when {moment}")
    stayed = await streams.leave()
    assert stayed == scene.undisturbed[1::2]
    await assert_at_rest(scene.stack)


async def test_clients_may_leave_right_after_the_first_text(scene: Scene) -> None:
    streams = scene.ask("left at the first text")
    await streams.until_one_begins()
    assert await streams.leave() == scene.undisturbed[1::2]
    await assert_at_rest(scene.stack)


async def test_a_prefix_outlives_every_engine_and_the_store(scene: Scene) -> None:
    stack = scene.stack
    (prompt,) = prompts(stack, [400], salt=1)
    first = await ask(scene.client, stack.model, prompt)
    await assert_at_rest(stack)
    victims = [*stack.instances("scheduler"), *stack.instances("worker"), "kvstore-1"]
    killed = {victim: stack.kill(victim) for victim in victims}
    for victim, pid in killed.items():
        await asyncio.to_thread(stack.replaced, victim, pid)
    await assert_at_rest(stack)
    again = await ask(scene.client, stack.model, prompt)
    assert (first.cached, again.cached) == (0, 384)
    assert again.text == first.text
    await assert_at_rest(stack)
