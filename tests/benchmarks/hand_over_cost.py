"""What a hand-over costs a request: one prefill and one decode engine, prompts that nobody has seen, one at a time.

    python -m tests.benchmarks.hand_over_cost --model DIR --tokens 1024 --requests 20 --json cost.json

The first token comes from the prefill engine, the second from the decode engine: what lies between them beyond the
usual time between two tokens is saving the blocks, loading them, and the messages. Its share of the time to the first
token is what disaggregation adds to a prompt. Save and load are also told as the workers measured them.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import statistics
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import handed_over, retries

SECONDS = "baton_worker_transfer_seconds"
OUTPUT = 12
"""Tokens of each answer: the third and those after say what is usual."""


class Timed(NamedTuple):
    """One request, in seconds."""

    first: float
    """Until the first token."""
    second: float
    """From there to the second."""
    usual: float
    """Between two later ones, the median."""

    @property
    def added(self) -> float:
        return self.second - self.usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-hand-over-") as folder,
        running_stack(
            Path(folder),
            model=given.model,
            prefill=1,
            decode=1,
            kvstore="1GiB",
            settings=[f"worker.threads={given.threads}", "worker.kv_memory=1GiB", "worker.metrics_port=0"],
            more=["--disaggregate-tokens=0"],
        ) as stack,
    ):
        result = measured(stack, given.tokens, given.requests)
    print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2))


def measured(stack: RunningStack, tokens: int, requests: int) -> dict[str, float]:
    """Medians in milliseconds, and the share."""
    random = Random(1)
    prompts = [[random.randrange(10, 1000) for _ in range(tokens)] for _ in range(requests + 2)]
    timed = [each for prompt in prompts if (each := asked(stack, prompt)) is not None][2:]
    assert retries(stack) == 0
    assert len(timed) > requests / 2, "the others were kept: the machine is too busy"
    first, added = (statistics.median(getattr(each, name) for each in timed) for name in ("first", "added"))
    return {
        "tokens": tokens,
        "requests": len(timed),
        "first_ms": first * 1e3,
        "second_ms": statistics.median(each.second for each in timed) * 1e3,
        "usual_ms": statistics.median(each.usual for each in timed) * 1e3,
        "added_ms": added * 1e3,
        "share": added / first,
        "save_ms": of_workers(stack, "save") * 1e3,
        "load_ms": of_workers(stack, "load") * 1e3,
    }


def asked(stack: RunningStack, prompt: list[int]) -> Timed | None:
    """None for a request that was not handed over."""
    before = handed_over(stack)
    timed = ask(stack, prompt)
    return timed if handed_over(stack) > before else None


def ask(stack: RunningStack, prompt: list[int]) -> Timed:
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=60)
    body = {"model": stack.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}))
    came: list[float] = []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            came.append(time.perf_counter())
    connection.close()
    gaps = [after - before for before, after in pairwise(came)]
    return Timed(came[0] - begun, gaps[0], statistics.median(gaps[1:-1]))


def of_workers(stack: RunningStack, kind: str) -> float:
    """Seconds that all transfers of a kind took, for each request that was handed over."""
    total = 0.0
    for worker in stack.instances("worker"):
        text = metrics_of(stack, worker)
        total += sum(
            float(found) for found in re.findall(rf'^{SECONDS}_sum{{kind="{kind}"}} (\S+)$', text, re.MULTILINE)
        )
    return total / handed_over(stack)


def metrics_of(stack: RunningStack, instance: str) -> str:
    port = asyncio.run(stack.ps())[instance].metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def table(result: dict[str, float]) -> str:
    lines = [
        f"{result['requests']:.0f} prompts of {result['tokens']:.0f} tokens, medians:",
        f"  time to first token      {result['first_ms']:8.1f} ms",
        f"  from there to the second {result['second_ms']:8.1f} ms, {result['usual_ms']:.1f} ms between later ones",
        f"  added by the hand-over   {result['added_ms']:8.1f} ms, {result['share']:.1%} of the time to first token",
        f"  of which copying         {result['save_ms']:8.1f} ms saving, {result['load_ms']:.1f} ms loading (means)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
