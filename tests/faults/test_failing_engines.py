"""An engine that goes on answering, fast and wrong: it is found, gets no more requests, and its ranks are replaced."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shared.messages.lifecycle import EngineHealth, Lifecycle
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY

FAILING, RANK = "engine-1", "engine-1-rank0"
HOOK = REPOSITORY / "tests/support/worker/garbage"


@pytest.fixture(scope="module")
def garbage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the rank that it names computes garbage."""
    return tmp_path_factory.mktemp("garbage") / "now"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, garbage: Path) -> Iterator[RunningStack]:
    environment = {"GARBAGE_WHEN_THERE": str(garbage), "PYTHONPATH": os.pathsep.join((str(HOOK), str(REPOSITORY)))}
    folder = tmp_path_factory.mktemp("failing")
    settings = ("scheduler.canary_interval_s=0.5", "scheduler.ejection_s=0.3")
    with running_stack(
        folder, engines=2, coordinators=2, kvstore="0", settings=settings, environment=environment
    ) as stack:
        yield stack


def events(stack: RunningStack, coordinator: str) -> list[dict[str, Any]]:
    """What a coordinator has logged, in order."""
    return [json.loads(line) for line in stack.log(coordinator).splitlines()]


def placed_while_ejected(stack: RunningStack) -> int:
    """Requests that a coordinator placed on the failing engine after it had ejected it. Each has ejected it."""
    count = 0
    for coordinator in stack.instances("coordinator"):
        logged = events(stack, coordinator)
        ejected = False
        assert any(event["event"] == "engine ejected" for event in logged), f"{coordinator} knows nothing of it"
        for event in logged:
            if event.get("engine") == FAILING:
                ejected = event["event"] == "engine ejected" or (ejected and event["event"] == "placed")
                count += ejected and event["event"] == "placed"
    return count


async def texts(stack: RunningStack, tokens: int = 40) -> list[str]:
    options = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, **options) for question in QUESTIONS)
        return [seen.text for seen in await asyncio.gather(*chats)]


def health(said: Mapping[str, Lifecycle]) -> EngineHealth:
    report = said[FAILING].engine
    return EngineHealth() if report is None or report.health is None else report.health


async def test_an_engine_that_fails_requests_at_once_draws_no_traffic_though_its_canaries_are_right(
    stack: RunningStack, garbage: Path
) -> None:
    right = await texts(stack)
    before = stack.pid(RANK)
    await asyncio.to_thread(garbage.write_text, f"{before} prompts")
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        while "engine suspect" not in stack.log(FAILING):
            seen = await stream_chat(client, stack.model, QUESTIONS[0], max_tokens=2)
            assert right[0].startswith(seen.text)
    assert "requests failed in 10 s" in stack.log(FAILING)
    assert await texts(stack) == right
    await asyncio.to_thread(garbage.unlink)
    await stack.until_heard(lambda said: health(said).suspect is None)
    assert stack.pid(RANK) == before, "nothing shows that its rank is at fault"
    assert await blocks_in_use(stack) == 0
    assert placed_while_ejected(stack) == 0


async def test_streams_of_an_engine_that_computes_nan_go_on_elsewhere_with_the_right_text(
    stack: RunningStack, garbage: Path
) -> None:
    """Nothing but its lack of load speaks for it, as it fails all that it is given at once."""
    right = await texts(stack)
    before = stack.pid(RANK)
    disturbed = [asyncio.create_task(texts(stack)) for _ in range(3)]
    await asyncio.to_thread(garbage.write_text, f"{before} nan")
    for seen in await asyncio.gather(*disturbed):
        assert seen == right
    await stack.until_heard(lambda said: health(said).suspect is not None)
    assert await texts(stack) == right
    await asyncio.to_thread(stack.replaced, RANK, before)
    await stack.until_heard(lambda said: said[RANK].phase == "ready" and health(said).suspect is None)
    assert await blocks_in_use(stack) == 0
    assert placed_while_ejected(stack) == 0


async def test_an_engine_that_says_one_token_for_ever_is_ejected_restarted_and_taken_back(
    stack: RunningStack, garbage: Path
) -> None:
    right = await texts(stack)
    before = stack.pid(RANK)
    await stack.until_heard(lambda said: health(said).suspect is None)
    await asyncio.to_thread(garbage.write_text, f"{before} zero")
    said = await stack.until_heard(lambda said: health(said).suspect is not None)
    assert health(said).suspect == "canary: token 0 for ever, where the engine said others before"
    assert "suspect: canary: token 0" in stack.baton("ps").stdout
    assert await texts(stack) == right, "nothing goes to it any more"
    await asyncio.to_thread(stack.replaced, RANK, before)
    await stack.until_heard(lambda said: said[RANK].phase == "ready" and health(said).suspect is None)
    assert await texts(stack) == right
    assert await blocks_in_use(stack) == 0
    assert placed_while_ejected(stack) == 0
