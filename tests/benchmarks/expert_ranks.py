"""What ranks that share a mixture's experts reach, and what they exchange for it, beside what theory says.

    python -m tests.benchmarks.expert_ranks --ranks 2 4 --rounds 2

A Qwen3-MoE with dummy weights, served by real stacks that take turns: by tensor parallelism, the same with whole
experts on ranks, and by a data-parallel group. Processor time and bytes are those of all ranks of a stack.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, get_args

import httpx2
import psutil
from openai import AsyncOpenAI
from transformers import Qwen3MoeConfig

from services.bench.report import Table
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL

LAYERS, HIDDEN, EXPERTS, CHOSEN, SIZE = 8, 512, 32, 4, 512
STREAMS, PROMPT, OUTPUT = 8, 128, 64
ROW, COMBINED_ROW = HIDDEN * 2, HIDDEN * 4
"""Bytes of a row on its way to experts, in bf16, and of what they make of it, in float32."""
PICKS, SET = CHOSEN * (4 + 4), 8
"""Bytes of its picks and their chances; of the set of ranks that it goes to."""
REQUEST_STEPS = OUTPUT - 1
"""Decodes of a request: its first token comes of its prompt."""

Kind = Literal[
    "TP", "TP, SP", "TP + EP", "TP + EP, SP", "DP + EP, all", "DP + EP, low latency", "DP + EP, high throughput"
]
_OPTIONS: dict[Kind, str] = {
    "TP": "--tp={}",
    "TP, SP": "--tp={} --enable-sp",
    "TP + EP": "--tp={} --enable-expert-parallel",
    "TP + EP, SP": "--tp={} --enable-expert-parallel --enable-sp",
    "DP + EP, all": "--data-parallel-size={} --enable-expert-parallel --all2all-backend=allgather_reducescatter",
    "DP + EP, low latency": "--data-parallel-size={} --enable-expert-parallel --all2all-backend=low_latency",
    "DP + EP, high throughput": "--data-parallel-size={} --enable-expert-parallel --all2all-backend=high_throughput",
}


class Way(NamedTuple):
    """How a stack serves the model."""

    kind: Kind
    ranks: int

    @property
    def is_group(self) -> bool:
        """Whether its ranks are a data-parallel group."""
        return self.kind.startswith("DP")

    @property
    def shares_rows(self) -> bool:
        """Whether each rank has a share of the rows between products."""
        return self.kind.endswith("SP")

    @property
    def instances(self) -> list[str]:
        """Its ranks."""
        if self.is_group:
            return [f"engine-{engine}-rank0" for engine in range(1, self.ranks + 1)]
        return [f"engine-1-rank{rank}" for rank in range(self.ranks)]


class Counted(NamedTuple):
    """Of all ranks of a stack, so far."""

    processor_s: float
    computed: float
    """Tokens, each once for each engine that computed it."""
    received: dict[str, float]
    """Bytes, by the kind of exchange."""
    steps: float
    """Of the first rank."""


class Round(NamedTuple):
    tokens_per_second: float
    processor_ms: float
    """A token that came out."""
    received: float
    """Bytes in mixtures, a row that was computed."""
    steps: float
    """Of the first rank, those of other engines too."""


def mixing_bytes(way: Way) -> float:
    """What a token's row costs in a layer that mixes, by theory, received by all ranks together, where any experts are
    picked as often as others."""
    others = way.ranks - 1
    if way.shares_rows:  # a reduce-scatter, and a gather before
        return others * (ROW + COMBINED_ROW + (PICKS if "EP" in way.kind else 0))
    if not way.is_group:  # a sum, of which each rank reads every other's
        return way.ranks * others * COMBINED_ROW
    there_and_back = others * (ROW + COMBINED_ROW + PICKS)
    if way.kind == "DP + EP, all":
        return there_and_back
    nowhere = math.comb(EXPERTS - EXPERTS // way.ranks, CHOSEN) / math.comb(EXPERTS, CHOSEN)
    said = others * SET if way.kind == "DP + EP, low latency" else 0
    return said + (1 - nowhere) * there_and_back


def bytes_beside_mixtures(way: Way, computed: float, requests: int) -> float:
    """What rows that are shared cost elsewhere, by theory, received by all ranks together."""
    wanted = requests * OUTPUT
    summed = LAYERS * computed + wanted  # the embedding, and attention; in the last layer of the rows that are wanted
    return (way.ranks - 1) * (summed * COMBINED_ROW + (LAYERS * computed + wanted) * ROW)


def rows_that_mix(computed: float, requests: int) -> float:
    """Rows in layers that mix: in the last one only those whose logits are wanted."""
    return (LAYERS - 1) * computed + requests * (1 + REQUEST_STEPS)


async def measure(stack: RunningStack, way: Way) -> Round:
    await answer(stack, 0, STREAMS)
    before, began = await counts(stack, way), time.perf_counter()
    await answer(stack, 1, STREAMS)
    took, after = time.perf_counter() - began, await counts(stack, way)
    tokens, rows = STREAMS * OUTPUT, rows_that_mix(after.computed - before.computed, STREAMS)
    moved = defaultdict[str, float](float)
    moved |= {kind: after.received[kind] - before.received[kind] for kind in after.received}
    if way.is_group:
        mixing = sum(moved[kind] for kind in ("all_gather", "reduce_scatter", "dispatch", "combine", "all_to_all"))
    elif way.shares_rows:
        computed = after.computed - before.computed
        mixing = moved["all_gather"] + moved["reduce_scatter"] - bytes_beside_mixtures(way, computed, STREAMS)
    else:  # of the sums of a step, one is of the embedding, and one in each layer behind attention
        computed = after.computed - before.computed
        attention = (LAYERS - 1) * computed + STREAMS * OUTPUT
        mixing = moved["sum"] * rows / (rows + attention + computed)
    return Round(
        tokens / took,
        (after.processor_s - before.processor_s) / tokens * 1000,
        mixing / rows,
        after.steps - before.steps,
    )


async def answer(stack: RunningStack, seed: int, requests: int) -> None:
    """All at once, whose prompts share nothing."""
    chance = Random(seed)
    asked = [[chance.randrange(10, 1000) for _ in range(PROMPT)] for _ in range(requests)]
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300.0) as client:
        create = client.completions.create
        options = {"model": stack.model, "max_tokens": OUTPUT, "extra_body": {"ignore_eos": True}}
        await asyncio.gather(*(create(prompt=each, **options) for each in asked))


async def counts(stack: RunningStack, way: Way) -> Counted:
    heard = await stack.until_heard(lambda said: set(way.instances) <= said.keys())
    processor, computed, steps, received = 0.0, 0.0, 0.0, defaultdict[str, float](float)
    async with httpx2.AsyncClient() as http:
        for instance in way.instances:
            text = (await http.get(f"http://127.0.0.1:{heard[instance].metrics_port}/metrics")).text
            times = psutil.Process(stack.pid(instance)).cpu_times()
            processor += times.user + times.system
            for kind, size in re.findall(
                r'^baton_worker_exchanged_bytes_total\{direction="received",kind="(\w+)"\} (\S+)', text, re.MULTILINE
            ):
                received[kind] += float(size)
            if instance == way.instances[0]:
                steps = sum(
                    map(float, re.findall(r"^baton_worker_steps_(?:total|of_others) (\S+)", text, re.MULTILINE))
                )
            if instance.endswith("rank0"):
                (tokens,) = re.findall(r'^baton_worker_tokens_total\{kind="computed"\} (\S+)', text, re.MULTILINE)
                computed += float(tokens)
    return Counted(processor, computed, received, steps)


def model_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        moe_intermediate_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=2048,
        architectures=["Qwen3MoeForCausalLM"],
    )


def write_model(folder: Path) -> None:
    """A configuration, whose weights are made up."""
    model_config().save_pretrained(folder)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / each, folder)


def run(folder: Path, model: Path, way: Way) -> Round:
    more = ["--load-format=dummy", "--max-model-len=512", "--kv-memory=64MiB", "--served-model-name=bench"]
    more += _OPTIONS[way.kind].format(way.ranks).split()
    settings = ["scheduler.canary_interval_s=0", "worker.threads=1"]
    with running_stack(folder, model=model, kvstore="0", dtype="bfloat16", settings=settings, more=more) as stack:
        return asyncio.run(measure(stack, way))


def table(found: dict[Way, list[Round]]) -> Table:
    rows = []
    for way, rounds in found.items():
        speeds = sorted(each.tokens_per_second for each in rounds)
        rows.append(
            (
                f"{way.kind} {way.ranks}",
                f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})",
                f"{statistics.median(each.processor_ms for each in rounds):.2f}",
                f"{statistics.median(each.steps for each in rounds):.0f}",
                f"{statistics.median(each.received for each in rounds):,.0f}",
                f"{mixing_bytes(way):,.0f}",
            )
        )
    heads = (
        "",
        "output tok/s",
        "processor ms a token",
        "steps",
        "bytes a row and mixture",
        "theory",
    )
    return Table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    given = parser.parse_args()
    ways = [Way(kind, ranks) for ranks in given.ranks for kind in given.kinds]
    found: dict[Way, list[Round]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="baton-experts-") as name:
        write_model(model := Path(name) / "model")
        for number in range(given.rounds):
            for place, way in enumerate(ways):
                found[way].append(run(Path(name) / f"{number}-{place}", model, way))
                print(f"{way.kind} {way.ranks}", found[way][-1], flush=True)
    print("\n".join(table(found).lines()))


if __name__ == "__main__":
    main()
