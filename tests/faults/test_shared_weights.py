"""Engines of one host have the weights in memory once; whichever of them dies, the others keep them, and it finds them
again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL
from tests.support.worker.weight_holder import shared_kilobytes

RANKS = ("engine-1-rank0", "engine-2-rank0")
TOKENS = 100


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(DEMO_MODEL, model)  # its own files: stacks of other tests hold the demo model's weights, too
    with running_stack(tmp_path_factory.mktemp("weights"), model=model, engines=2, kvstore="0") as stack:
        yield stack


async def texts(stack: RunningStack, started: asyncio.Event | None = None) -> list[str]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS[:4])
        return [each.text for each in await asyncio.gather(*chats)]


def shared(stack: RunningStack) -> list[float]:
    """How much of the weights' memory counts as each rank's own."""
    found = [shared_kilobytes(stack.pid(rank)) for rank in RANKS]
    assert all(each["Rss"] > 2 << 10 for each in found)
    return [each["Pss"] / each["Rss"] for each in found]


@pytest.mark.features("re-dispatch")
async def test_whichever_engine_dies_finds_the_weights_of_the_other(stack: RunningStack) -> None:
    undisturbed = await texts(stack)
    for victim in RANKS:  # one of them has loaded the weights
        assert shared(stack) == pytest.approx([0.5, 0.5], abs=0.05)
        finds, pid = stack.log(victim).count("weights are shared"), stack.pid(victim)
        started = asyncio.Event()
        open_streams = asyncio.create_task(texts(stack, started))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        stack.kill(victim)
        assert await open_streams == undisturbed
        stack.replaced(victim, pid)
        await stack.until_heard(lambda said: all(said[rank].shown_phase == "ready" for rank in RANKS))
        assert stack.log(victim).count("weights are shared") == finds + 1
        assert await texts(stack) == undisturbed
    assert shared(stack) == pytest.approx([0.5, 0.5], abs=0.05)
