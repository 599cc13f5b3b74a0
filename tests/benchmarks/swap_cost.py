"""What sequences that lose their memory to others cost: computed again, or swapped out to the KV store.

    python -m tests.benchmarks.swap_cost --rounds 3

One engine of Llama's shape with 110 M dummy weights on a CPU, with room for a third of the requests that it is sent at
once. A stack without a store and one with it take turns. Processor time is that of all processes of a stack.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from openai import AsyncOpenAI
from transformers import LlamaConfig

from services.bench.report import Table
from tests.benchmarks.library_cost import SHAPE
from tests.faults.test_swapped_sequences import counted
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL

REQUESTS, PROMPT, OUTPUT = 8, 160, 160
TOKEN_BYTES = 12 * 4 * 64 * 2 * 2
"""Of keys and values in bfloat16: layers, KV heads, their size, two of them."""
KV_MEMORY = REQUESTS // 3 * (PROMPT + OUTPUT) * TOKEN_BYTES
KINDS = {"computed again": "0", "swapped": "1GiB"}


class _Round(NamedTuple):
    tokens_per_second: float
    processor_ms: float
    """A token."""
    preempted: float
    loaded: float
    """Of those that went on, how many did by what the store had."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[_Round]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="baton-swap-") as name:
        model = Path(name) / "model"
        LlamaConfig(**SHAPE, max_position_embeddings=2048).save_pretrained(model)
        for each in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / each, model)
        for number in range(given.rounds):
            for kind, memory in KINDS.items():
                found[kind].append(_round(Path(name) / f"{number}-{memory}", model, memory))
                print(kind, found[kind][-1], flush=True)
    rows = []
    for kind, rounds in found.items():
        speeds = sorted(each.tokens_per_second for each in rounds)
        rows.append(
            (
                kind,
                f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})",
                f"{statistics.median(each.processor_ms for each in rounds):.2f}",
                f"{statistics.median(each.preempted for each in rounds):.0f}",
                f"{statistics.median(each.loaded for each in rounds):.0f}",
            )
        )
    heads = ("", "output tok/s", "processor ms a token", "preemptions", "of them loaded")
    print("\n".join(Table(heads, rows).lines()))


def _round(folder: Path, model: Path, memory: str) -> _Round:
    more = ["--load-format=dummy", "--max-model-len=512", f"--kv-memory={KV_MEMORY}", "--served-model-name=bench"]
    settings = ["scheduler.canary_interval_s=0"]
    with running_stack(folder, model=model, kvstore=memory, dtype="bfloat16", settings=settings, more=more) as stack:
        return asyncio.run(_measured(stack))


async def _measured(stack: RunningStack) -> _Round:
    await _answer(stack, 0, requests=1)
    before, used, began = await _counts(stack), _processor_seconds(stack), time.perf_counter()
    await _answer(stack, 1, requests=REQUESTS)
    took, used = time.perf_counter() - began, _processor_seconds(stack) - used
    preempted, loaded = (now - then for now, then in zip(await _counts(stack), before, strict=True))
    tokens = REQUESTS * OUTPUT
    return _Round(tokens / took, used / tokens * 1000, preempted, loaded)


async def _answer(stack: RunningStack, seed: int, requests: int) -> None:
    """All requests at once, whose prompts share nothing."""
    chance = Random(seed)
    asked = [[chance.randrange(10, 1000) for _ in range(PROMPT)] for _ in range(requests)]
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=600.0) as client:
        await asyncio.gather(
            *(
                client.completions.create(
                    model=stack.model, prompt=each, max_tokens=OUTPUT, extra_body={"ignore_eos": True}
                )
                for each in asked
            )
        )


async def _counts(stack: RunningStack) -> tuple[float, float]:
    """Preemptions, and those that went on by loading, so far."""
    await asyncio.sleep(1.0)  # counters are written at ticks
    names = ("preemptions_total", r'resumed_total\{how="loaded"\}')
    preempted, loaded = [await counted(stack, name) for name in names]
    return preempted, loaded


def _processor_seconds(stack: RunningStack) -> float:
    pids = [member.pid for member in stack.state.members if member.pid is not None]
    times = [psutil.Process(pid).cpu_times() for pid in [*pids, stack.state.nats_pid]]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
