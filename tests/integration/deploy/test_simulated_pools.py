"""A real stack with pools of simulated engines: requests pass through the real store, whose blocks have no contents."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import running_stack
from tests.support.kv.prompts import PATIENT, ask, handed_over, held, prompts, retries, started_by


async def test_simulated_engines_of_any_size_hand_over_through_the_store(tmp_path: Path) -> None:
    with running_stack(
        tmp_path,
        prefill=1,
        decode=1,
        tp_decode=2,
        kvstore="32MiB",
        device="sim",
        settings=("coordinator.disaggregate_tokens=0", PATIENT),
        more=("--sim-step-ms=1",),
    ) as stack:
        asked = prompts(stack, (40, 100, 333, 800))
        async with client_of(stack.url) as client:
            first = [await ask(client, stack.model, each, seed=1) for each in asked]
            again = [await ask(client, stack.model, each, seed=1) for each in asked]
        assert [answer.text for answer in first] == [answer.text for answer in again]
        assert handed_over(stack) >= len(asked)
        assert started_by(stack, "prefill-1") >= len(asked)
        assert retries(stack) == 0
        found = await held(stack)
        assert not any(found), found
