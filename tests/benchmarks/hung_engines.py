"""What clients see of an engine that hangs: a stack with simulated devices under steady traffic, in which a scheduler,
a rank, or both are stopped (SIGSTOP).

    python -m tests.benchmarks.hung_engines --keep-alive 1 8
    python -m tests.benchmarks.hung_engines --keep-alive 1 --supervisor

`--keep-alive`: seconds between two messages of a process that say the same, 8 as in a fleet of 1,024 engines. Without
`--supervisor` that is killed before: nobody replaces what hangs, as where a whole host hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError

from services.bench.report import Table
from tests.support.cluster.stack import RunningStack, running_stack

STEP_MS, OUTPUT = 50, 60
RATE = 6.0
"""Requests a second: some 18 are open at a time."""
WARM_UP = 6.0
LATE = 1.0
"""Seconds without a token that are no chance at 50 ms a step."""
VICTIMS = {"scheduler": ("engine-1",), "rank": ("engine-1-rank0",), "both": ("engine-1", "engine-1-rank0")}


@dataclass(slots=True)
class _Request:
    began: float
    tokens: list[float] = field(default_factory=list)
    """When each came."""
    failed: str = ""

    @property
    def longest_wait(self) -> float:
        """Seconds between two tokens, or until the first."""
        return max((later - sooner for sooner, later in pairwise([self.began, *self.tokens])), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--keep-alive", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--seconds", type=float, default=25.0, help="of traffic behind the signal")
    parser.add_argument("--supervisor", action="store_true")
    given = parser.parse_args()
    table = Table(
        ("every s", "stopped", "streams it had", "their pause s: median", "longest", "later requests late",
         "their wait s: median", "longest", "last began after s", "failed"),
        names=2,
    )  # fmt: skip
    print(table.head(), flush=True)
    for keep_alive in given.keep_alive:
        for victim in given.victims:
            with tempfile.TemporaryDirectory(prefix="baton-hung-") as folder:
                row = _measured(Path(folder), given.engines, keep_alive, victim, given.seconds, given.supervisor)
            print(table.row((f"{keep_alive:g}", victim, *row)), flush=True)


def _measured(
    folder: Path, engines: int, keep_alive: float, victim: str, seconds: float, supervised: bool
) -> Sequence[str]:
    services = ("scheduler", "worker", "coordinator", "gateway", "detokenizer", "tokenizer")
    settings = [f"{service}.heartbeat_interval_s={keep_alive}" for service in services]
    settings.append(f"worker.sim_step_ms={STEP_MS}")
    with running_stack(folder, engines=engines, device="sim", kvstore="0", settings=settings) as stack:
        if not supervised:
            stack.kill_supervisor()
        requests, struck = asyncio.run(_traffic(stack, VICTIMS[victim], seconds))
    before = [each for each in requests if each.began < struck and (not each.tokens or each.tokens[-1] > struck)]
    paused = [each.longest_wait for each in before if each.longest_wait > LATE]
    late = [each for each in requests if each.began >= struck and each.longest_wait > LATE]
    waits = [each.longest_wait for each in late]
    return (
        str(len(paused)),
        *_spread(paused),
        str(len(late)),
        *_spread(waits),
        f"{max((each.began - struck for each in late), default=0.0):.1f}",
        str(sum(bool(each.failed) for each in requests)),
    )


async def _traffic(stack: RunningStack, victims: Sequence[str], seconds: float) -> tuple[list[_Request], float]:
    """All requests, and when the victims were stopped."""
    pids = [stack.pid(name) for name in victims]
    requests: list[_Request] = []
    async with (
        AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
        asyncio.TaskGroup() as open_requests,
    ):
        began, struck = time.monotonic(), 0.0
        while time.monotonic() - began < WARM_UP + seconds:
            if not struck and time.monotonic() - began > WARM_UP:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                struck = time.monotonic()
            requests.append(_Request(time.monotonic()))
            open_requests.create_task(_stream(client, stack.model, requests[-1]))
            await asyncio.sleep(1 / RATE)
    return requests, struck


async def _stream(client: AsyncOpenAI, model: str, request: _Request) -> None:
    prompt = f"{request.began}"
    try:
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=OUTPUT, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            request.tokens.append(time.monotonic())
    except OpenAIError as error:
        request.failed = str(error)


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "–", "–"
    return f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"


if __name__ == "__main__":
    main()
