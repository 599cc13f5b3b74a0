"""Decode-first pools, and pools that pull: a part dies while prompts are computed for another engine, or wait.

All streams end with what they would have been, and nothing stays held anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_kv_deaths import LENGTHS, SETTINGS, SHAPE, STORE, STREAMS, Scene, slow
from tests.support.cluster.bus_moments import Moment, prompts_are_computed, requests_are_handed_to, tokens_are_drawn
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import handed_over, prompts, retries
from tests.support.kv.streams import TOKENS, Seen, Streams

pytestmark = pytest.mark.timeout(400)
MORE = (*SHAPE, "--pd-order=decode-first")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("decode-first")
    with running_stack(folder, prefill=1, decode=2, kvstore=STORE, settings=SETTINGS, more=MORE) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Seen]:
    async def run() -> list[Seen]:
        async with client_of(stack.url) as client:
            return await Streams(client, stack.model, prompts(stack, LENGTHS), "undisturbed").end()

    seen = asyncio.run(run())
    assert passed_on(stack) > 0
    assert retries(stack) == 0
    assert [(one.finishes, one.completion_tokens) for one in seen] == [(["length"], TOKENS)] * STREAMS
    return seen


def passed_on(stack: RunningStack) -> int:
    """Requests that a decode engine has had another engine compute the prompt of."""
    decode = (name for name in stack.instances("scheduler") if name.startswith("decode"))
    return sum(stack.log(name).count('"event":"handed over"') for name in decode)


@pytest.mark.features("prefix cache", "chunked prefill", "prefill/decode", "re-dispatch")
@pytest.mark.parametrize("victim", ["prefill-1", slow("coordinator-1")])
async def test_streams_survive_a_kill_while_prompts_are_pulled(tmp_path: Path, victim: str) -> None:
    """More prompts than two steps hold: some wait in the queue when it happens."""
    more = (*SHAPE, "--prefill-queue")
    with running_stack(tmp_path, prefill=1, decode=1, kvstore=STORE, settings=SETTINGS, more=more) as stack:
        asked = prompts(stack, LENGTHS)
        async with client_of(stack.url) as client:
            whole = await Streams(client, stack.model, asked, "undisturbed").end()
            assert handed_over(stack) > 0
            assert '"event":"queued"' in stack.log("coordinator-1"), "none waited to be pulled"
            assert retries(stack) == 0
            moment = prompts_are_computed("prefill-1")
            await Scene(stack, client, asked, whole).survives(moment, f"{victim} dies", lambda: stack.kill(victim))


@pytest.mark.features("prefix cache", "chunked prefill", "prefill/decode", "re-dispatch")
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("prefill-1", prompts_are_computed("prefill-1")),
        slow("prefill-1-rank0", tokens_are_drawn("prefill-1")),
        slow("decode-1", requests_are_handed_to("decode-1")),
        ("decode-1", prompts_are_computed("prefill-1")),
        slow("coordinator-1", prompts_are_computed("prefill-1")),
    ],
    ids=str,
)
async def test_streams_survive_a_kill(
    stack: RunningStack, undisturbed: list[Seen], victim: str, moment: Moment
) -> None:
    pid = stack.pid(victim)
    async with client_of(stack.url) as client:
        scene = Scene(stack, client, prompts(stack, LENGTHS), undisturbed)
        await scene.survives(moment, f"{victim} dies when {moment}", lambda: stack.kill(victim))
    assert stack.pid(victim) != pid
