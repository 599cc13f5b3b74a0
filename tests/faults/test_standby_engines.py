"""An engine that stands by takes the place of one that dies, and of one that is to be added; streams end as they would.

The tests are in order: each leaves one engine that serves and one that stands by.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack

STREAMS = 2
TOKENS = 60
SIMULATED = ("worker.sim_step_ms=20",)
"""Slow enough to be hit in the middle. Each token follows from seed and position: who repeats or leaves out one, or
begins anew, says another text; and an engine starts in a second, of which these tests start a dozen."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("standby")
    with running_stack(folder, device="sim", kvstore="0", settings=SIMULATED, more=["--standby=1"]) as stack:
        yield stack


async def streams(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "seed": 7, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS[:STREAMS])
        return await asyncio.gather(*chats)


async def until_shown(stack: RunningStack, **phases: str) -> None:
    wanted = {name.replace("_", "-"): phase for name, phase in phases.items()}
    await stack.until_heard(
        lambda said: wanted == {name: life.shown_phase for name, life in said.items() if life.service == "scheduler"}
    )


async def lose_a_rank(stack: RunningStack) -> None:
    """Its streams go on at the standby, and say what they say undisturbed; the engine stands by from then on."""
    await until_shown(stack, engine_1="ready", engine_2="standby")
    undisturbed = await streams(stack)
    assert (await stack.heard())["engine-2"].engine.tokens == 0, "who stands by gets no requests"  # type: ignore[union-attr]
    started = asyncio.Event()
    open_streams = asyncio.create_task(streams(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    stack.kill("engine-1-rank0")
    assert [each.text for each in await open_streams] == [each.text for each in undisturbed]
    await until_shown(stack, engine_1="standby", engine_2="ready")


@pytest.mark.features("re-dispatch")
async def test_the_standby_takes_the_place_of_an_engine_that_loses_its_rank(stack: RunningStack) -> None:
    await lose_a_rank(stack)


@pytest.mark.slow
@pytest.mark.features("re-dispatch")
async def test_a_standby_that_has_loaded_a_model_computes_the_same_text(tmp_path: Path) -> None:
    with running_stack(tmp_path, kvstore="0", settings=["worker.threads=1"], more=["--standby=1"]) as stack:
        await lose_a_rank(stack)


async def test_scaling_up_promotes_the_standby_whoever_supervises(stack: RunningStack) -> None:
    await until_shown(stack, engine_1="standby", engine_2="ready")
    stack.kill_supervisor()
    stack.start_supervisor()
    stack.until(lambda state: state.pid == stack.supervisor.pid and state.phase == "ready")
    assert {m.instance for m in stack.state.members if m.standby} == {"engine-1", "engine-1-rank0"}
    pid = stack.pid("engine-1-rank0")
    done = stack.baton("scale", "engines=2")
    assert "starting engine-1, engine-1-rank0" in done.stdout, done.stderr
    await until_shown(stack, engine_1="ready", engine_2="ready", engine_3="standby")
    assert stack.pid("engine-1-rank0") == pid, "loaded before"
    done = stack.baton("scale", "engines=1")
    assert done.returncode == 0, done.stderr
    await until_shown(stack, engine_1="ready", engine_3="standby")


async def test_the_time_of_a_promotion_is_measured(stack: RunningStack) -> None:
    await until_shown(stack, engine_1="ready", engine_3="standby")
    done = stack.baton("bench", "startup", "--repetitions", "1", "--standby", "--json")
    assert done.returncode == 0, done.stderr
    (startup,) = json.loads(done.stdout)["startups"]
    assert startup["stages"] == {}, "loaded before"
    assert startup["ready"] > 0
    assert startup["first_token"] > 0


@pytest.mark.features("re-dispatch", "prefill/decode")
async def test_in_each_pool_a_standby_takes_the_place_of_one_that_dies(tmp_path: Path) -> None:
    with running_stack(
        tmp_path, device="sim", prefill=1, decode=1, kvstore="64MiB", settings=SIMULATED, more=["--standby=1"]
    ) as stack:
        await until_shown(stack, prefill_1="ready", prefill_2="standby", decode_1="ready", decode_2="standby")
        undisturbed = await streams(stack)
        for rank in ("prefill-1-rank0", "decode-1-rank0"):  # one after the other: whoever was in both would be blamed
            started = asyncio.Event()
            open_streams = asyncio.create_task(streams(stack, started))
            async with asyncio.timeout(DEADLINE):
                await started.wait()
            stack.kill(rank)
            assert [each.text for each in await open_streams] == [each.text for each in undisturbed]
        await until_shown(stack, prefill_1="standby", prefill_2="ready", decode_1="standby", decode_2="ready")
        assert [each.text for each in await streams(stack)] == [each.text for each in undisturbed]
