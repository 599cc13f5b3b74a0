"""Everything at once on engines of a model with states: the answers are those of one that is in no hurry."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.ids import EngineId
from tests.integration.cluster.test_features_together import (
    INT8,
    PROCESSES,
    REQUESTS,
    SMALL_STEPS,
    Answers,
    counted,
    crowd,
)
from tests.support.cluster.bus_moments import listening, tokens_are_drawn
from tests.support.cluster.conversations import client_of
from tests.support.cluster.ports import free_port
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.state_demo import write_state_demo
from tests.support.paths import REPOSITORY
from tests.support.plugin_packages import pip_installed

ENGINES = (EngineId("engine-1"), EngineId("engine-2"))


@pytest.mark.slow
@pytest.mark.features(
    "guided",
    "prefix cache",
    "chunked prefill",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "federation",
    "quantization",
    "logits processors",
    "states",
)
def test_another_clusters_states_in_little_memory_and_an_engine_that_dies(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first cluster answers itself; then its engine is drained, and the other one answers."""
    packages = pip_installed("sequence-processors", tmp_path_factory)
    with federated(tmp_path, packages, ["--pooling-type=last", INT8, PROCESSES]) as (home, other):
        expected = asyncio.run(all_at_once(home))
        done = home.baton("drain", ENGINES[0], "--force")
        assert done.returncode == 0, done.stderr
        assert asyncio.run(all_at_once(home)) == expected
        again = asyncio.run(while_an_engine_dies(home, other))
        assert again == {name: expected[name] for name in again}


@contextlib.contextmanager
def federated(folder: Path, packages: Path, both: Sequence[str]) -> Iterator[tuple[RunningStack, RunningStack]]:
    """One engine beside which there is nothing, and two with small steps, little memory, and a KV store."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    secret = {"BATON_FEDERATION_SECRET": "known to both clusters and to nobody else"}
    secret["PYTHONPATH"] = os.pathsep.join((str(packages), str(REPOSITORY)))
    both_have: dict[str, Any] = {"model": write_state_demo(folder / "model"), "environment": secret}
    home = [*both, "--enable-prompt-embeds", "--cluster=home", f"--federation-address={addresses[0]}"]
    other = [
        *both,
        "--enable-prompt-embeds",
        "--cluster=other",
        f"--federation-address={addresses[1]}",
        f"--federate={addresses[0]}",
    ]
    other += [*SMALL_STEPS, "--max-model-len=1024", "--kv-memory=10MiB"]
    plain = ("scheduler.run_ahead=0",)
    with (
        running_stack(folder / "home", more=home, settings=plain, kvstore="0", **both_have) as one,
        running_stack(folder / "other", engines=2, kvstore="64MiB", more=other, **both_have) as two,
    ):
        yield one, two


async def all_at_once(stack: RunningStack) -> Answers:
    async with client_of(stack.url) as client:
        answers = await asyncio.gather(*(request(client, stack.model) for request in REQUESTS.values()))
    return dict(zip(REQUESTS, answers, strict=True))


async def while_an_engine_dies(home: RunningStack, other: RunningStack) -> Answers:
    """Beside a crowd; all but the prompt that is sent twice, as what was cached of it dies with the engine."""
    requests = {name: request for name, request in REQUESTS.items() if name != "long prompt"}
    async with client_of(home.url) as client, asyncio.TaskGroup() as all_of_them:
        async with listening(other, tokens_are_drawn(ENGINES[0])) as listener:
            tasks = {name: all_of_them.create_task(ask(client, home.model)) for name, ask in requests.items()}
            await listener.moment()
        other.kill(ENGINES[0])
        all_of_them.create_task(crowd(home, 24))
    assert sum([await counted(other, engine, "preemptions_total") for engine in ENGINES]) > 0
    return {name: task.result() for name, task in tasks.items()}
