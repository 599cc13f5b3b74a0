"""Whole stacks whose KV store evicts to a local SSD: the store is killed, and then everything, arena included."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.messages.lifecycle import TierReport
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import PATIENT, Held, ask, ask_all, held, prompts, store_of
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.timeout(600)

STORE = "2MiB"
"""Room for the blocks of one prompt at the most."""
AT_REST = Held(0, 0, 0)


async def ssd_of(stack: RunningStack) -> TierReport:
    [tier] = (await store_of(stack)).tiers
    return tier


async def until_written(stack: RunningStack) -> int:
    """How many blocks are on the disk, once no more come."""
    deadline, before = time.monotonic() + DEADLINE, -1
    while (stored := (await ssd_of(stack)).blocks or 0) != before or not stored:
        assert time.monotonic() < deadline, stack.last_words()
        before = stored
        await asyncio.sleep(1)
    return before


async def test_what_went_to_the_ssd_outlives_the_store_and_then_the_whole_stack(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    shape = {"engines": 1, "kvstore": STORE, "settings": [PATIENT]}
    more = [f"--kv-ssd={ssd}", "--kv-ssd-size=256MiB"]
    with running_stack(tmp_path / "first", **shape, more=more) as stack:  # type: ignore[arg-type]
        asked = prompts(stack, range(300, 303), salt=9)
        async with client_of(stack.url) as client:
            expected = [await ask(client, stack.model, prompt) for prompt in asked]
            await until_written(stack)
            # The store dies while they are asked again.
            asking = asyncio.create_task(ask_all(client, stack.model, asked))
            pid = stack.kill("kvstore-1")
            await asyncio.to_thread(stack.replaced, "kvstore-1", pid)
            assert await asking == [answer.text for answer in expected]
            assert await held(stack) == AT_REST
        doctor = subprocess.run(  # noqa: ASYNC221
            [sys.executable, "-m", "deploy.cli", "doctor", "--json", "--run-dir", str(stack.run_dir)],
            cwd=REPOSITORY,
            capture_output=True,
            timeout=DEADLINE,
        )
        [said] = [each for each in json.loads(doctor.stdout) if each["name"] == "KV tiers"]
        assert said["detail"].startswith("ssd, ")
        assert "of 0.25 GiB" in said["detail"]
        written = await until_written(stack)
    with running_stack(tmp_path / "second", **shape, more=more) as stack:  # type: ignore[arg-type]
        assert await until_written(stack) == written
        async with client_of(stack.url) as client:
            again = [await ask(client, stack.model, prompt) for prompt in asked]
        assert [answer.text for answer in again] == [answer.text for answer in expected]
        assert sum(answer.cached for answer in again) >= 288, again
        assert (await ssd_of(stack)).hits >= sum(answer.cached for answer in again) // 16
        assert await held(stack) == AT_REST
