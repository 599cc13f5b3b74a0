"""Everything at once on engines whose layers have block tables of their own: the answers are those of one table."""

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
    ADAPTER,
    INT8,
    NGRAM,
    OF_THE_ADAPTER,
    PROCESSES,
    REQUESTS,
    SMALL_STEPS,
    TAKES_EMBEDDINGS,
    Answers,
    all_at_once,
    counted,
    crowd,
)
from tests.support.cluster.bus_moments import listening, tokens_are_drawn
from tests.support.cluster.conversations import client_of
from tests.support.cluster.ports import free_port
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_adapters import demo_reference, write_adapter
from tests.support.models.windowed_demo import write_windowed_demo
from tests.support.paths import REPOSITORY
from tests.support.plugin_packages import pip_installed

ENGINES = (EngineId("engine-1"), EngineId("engine-2"))


@pytest.mark.slow
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "tensor parallel",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "federation",
    "LoRA",
    "quantization",
    "hybrid KV cache",
    "logits processors",
    "prompt embeds",
)
def test_another_clusters_windows_in_little_memory_and_an_engine_that_dies(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first cluster answers itself, with one table; then its engine is drained, and the other one answers."""
    model = write_windowed_demo(tmp_path / "windowed")
    write_adapter(demo_reference(), tmp_path / "adapter", strength=0.02)
    both = [f"--lora={ADAPTER}={tmp_path}/adapter", "--pooling-type=last", INT8, PROCESSES, TAKES_EMBEDDINGS]
    packages = pip_installed("sequence-processors", tmp_path_factory)
    with federated(tmp_path, model, packages, both) as (home, other):
        expected = asyncio.run(all_at_once(home))
        done = home.baton("drain", ENGINES[0], "--force")
        assert done.returncode == 0, done.stderr
        assert asyncio.run(all_at_once(home)) == expected
        again = asyncio.run(while_an_engine_dies(home, other))
        assert again == {name: expected[name] for name in again}


@contextlib.contextmanager
def federated(
    folder: Path, model: Path, packages: Path, both: Sequence[str]
) -> Iterator[tuple[RunningStack, RunningStack]]:
    """One with a table for all layers, and one of two engines of two ranks with groups, drafts, a KV store and little
    memory."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    secret = {"BATON_FEDERATION_SECRET": "known to both clusters and to nobody else"}
    secret["PYTHONPATH"] = os.pathsep.join((str(packages), str(REPOSITORY)))
    both_have: dict[str, Any] = {"model": model, "environment": secret}
    home = [*both, "--cluster=home", f"--federation-address={addresses[0]}", "--hybrid-kv-cache=off"]
    other = [*both, "--cluster=other", f"--federation-address={addresses[1]}", f"--federate={addresses[0]}"]
    other += [*SMALL_STEPS, NGRAM, "--hybrid-kv-cache=on", "--max-model-len=1024", "--kv-memory=2MiB"]
    plain = ("scheduler.run_ahead=0",)
    with (
        running_stack(folder / "home", more=home, settings=plain, kvstore="0", **both_have) as one,
        running_stack(folder / "other", engines=2, tp=2, kvstore="64MiB", more=other, **both_have) as two,
    ):
        yield one, two


async def while_an_engine_dies(home: RunningStack, other: RunningStack) -> Answers:
    """Beside a crowd; all but the prompt that is sent twice, as what was cached of it dies with the engine."""
    requests = {name: request for name, request in REQUESTS.items() if name != "long prompt"}
    async with client_of(home.url) as client, asyncio.TaskGroup() as all_of_them:
        async with listening(other, tokens_are_drawn(ENGINES[0])) as listener:
            named = {name: ADAPTER if name in OF_THE_ADAPTER else home.model for name in requests}
            tasks = {name: all_of_them.create_task(request(client, named[name])) for name, request in requests.items()}
            await listener.moment()
        other.kill(ENGINES[0])
        all_of_them.create_task(crowd(home, 24))
    for counter in ("preemptions_total", "accepted_draft_tokens_total"):
        assert sum([await counted(other, engine, counter) for engine in ENGINES]) > 0
    return {name: task.result() for name, task in tasks.items()}
