"""Several parts of two pools die at random moments of one run, some stand still, and clients leave in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import prompts
from tests.support.kv.streams import Seen, Streams, assert_at_rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 12
DEATHS = 2
"""In one round."""
WITHIN = 4.0
"""Seconds from the beginning of a round in which all of its deaths fall."""
STANDSTILL = 3.0
LENGTHS = tuple(range(120, 520, 25))
SETTINGS = (
    "coordinator.disaggregate_tokens=0",
    "kvstore.lease_seconds=3",
    # Both engines of a small stack may be gone at once, and a busy machine takes its time to start them.
    # Each death can cost a request three attempts before a slow machine has brought the next token.
    f"gateway.attempts={3 * DEATHS + 3}",
    # A prompt whose stream ended for two deaths comes again in the next round.
    "gateway.refuse_poisoned_s=0.001",
)
MORE = ("--max-batch-tokens=96", f"--max-num-seqs={len(LENGTHS)}")
SHAPES: dict[str, dict[str, Any]] = {
    "two of each": {"prefill": 2, "decode": 2, "detokenizers": 2},
    "one of each, of two ranks and of one": {"prefill": 1, "decode": 1, "tp_prefill": 2},
}


async def strike(stack: RunningStack, chance: random.Random) -> None:
    """Kills somebody, or has him stand still for a while. What is printed is shown of a test that failed."""
    await asyncio.sleep(chance.uniform(0, WITHIN))
    services = ("scheduler", "worker", "kvstore", "detokenizer", "coordinator", "tokenizer")
    state = stack.state
    victims = [(member.instance, member.pid) for member in state.members if member.service in services]
    name, pid = chance.choice([*victims, ("nats-server", state.nats_pid), ("redis-server", state.redis_pid)])
    stands_still = chance.random() < 0.25
    print(f"{time.strftime('%X')}: {name}, {pid}, {'stands still' if stands_still else 'dies'}")
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGSTOP if stands_still else signal.SIGKILL)
        if pid is not None and stands_still:
            await asyncio.sleep(STANDSTILL)
            os.kill(pid, signal.SIGCONT)


async def one_round(stack: RunningStack, streams: Streams, chance: random.Random) -> list[Seen]:
    """What those who stayed have seen."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(DEATHS):
            tasks.create_task(strike(stack, chance))
        if chance.random() < 0.2:
            await streams.until_one_begins()
            return await streams.leave()
        return await streams.end()


@pytest.mark.parametrize("shape", SHAPES)
async def test_streams_survive_what_comes(tmp_path: Path, shape: str) -> None:
    with running_stack(tmp_path, **SHAPES[shape], kvstore="40MiB", redis=True, settings=SETTINGS, more=MORE) as stack:
        asked = prompts(stack, LENGTHS)
        async with client_of(stack.url) as client:
            undisturbed = await Streams(client, stack.model, asked, "undisturbed").end()
            for seed in range(ROUNDS):
                streams = Streams(client, stack.model, asked, f"round {seed}")
                print(f"round {seed}")
                seen = await one_round(stack, streams, random.Random(seed))
                expected = undisturbed if len(seen) == len(undisturbed) else undisturbed[1::2]
                unlike = [one for one, whole in zip(seen, expected, strict=True) if one != whole]
                # Of two deaths one may be of whoever had a suspect alone.
                assert len(unlike) < DEATHS, stack.last_words()
                assert all(one.blamed for one in unlike), stack.last_words()
                await assert_at_rest(stack)
