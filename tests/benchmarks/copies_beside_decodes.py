"""What copies of KV blocks cost the decodes of the same host, and what `--kv-bandwidth` makes of that.

    python -m tests.benchmarks.copies_beside_decodes --budgets none 256MiB 64MiB --rounds 6

A stack with one engine on a CPU decodes streams of the demo model, while its store fetches blocks of 2 MiB from the
store of another node, as fast as it may. Both run on this machine; the other one's copies count as another host's. The
budget is changed between rounds in the file that all of the host share, so that rounds of all budgets alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from openai import AsyncOpenAI

from kvstore.arena.shared_bandwidth import FILE, SharedBandwidth
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import NodeId
from tests.benchmarks.transfer_links import BLOCK_BYTES, LAYOUT, MEBIBYTE
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.arenas import chain
from tests.support.kv.store_process import StoreClient, StoreProcess, know_each_other

BLOCKS = 4
"""Of one fetch."""
CHAINS = 48
"""More than the near store has room for: each is fetched again in its turn."""
MEMORY = 32 * BLOCKS * BLOCK_BYTES
FAR_MEMORY = (CHAINS + 1) * BLOCKS * BLOCK_BYTES
IDLE = "no copies"


class NearStore(StoreProcess):
    """The stack's own, as an engine's side sees it."""

    def __init__(self, directory: Path) -> None:
        self.node, self.directory = NodeId("near"), directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=["none", "256MiB", "64MiB"], help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-copies-") as folder,
        running_stack(
            Path(folder),
            engines=1,
            kvstore=f"{MEMORY // MEBIBYTE}MiB",
            settings=["kvstore.transfer_port=0", "worker.threads=1"],
            more=["--node=near"],
        ) as stack,
    ):
        results = asyncio.run(measure(given, stack))
    print("| copies | copied | ITL p50 | ITL p99 |")
    print("| --- | ---: | ---: | ---: |")
    for label, (gaps, rates) in results.items():
        print(
            f"| {label} | {statistics.median(rates) / MEBIBYTE:.0f} MiB/s "
            f"| {percentile(gaps, 50) * 1e3:.1f} ms | {percentile(gaps, 99) * 1e3:.1f} ms |"
        )


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


async def measure(given: argparse.Namespace, stack: RunningStack) -> dict[str, tuple[list[float], list[float]]]:
    url = stack.state.nats_url[0]
    user, password = stack.user_credentials("kvstore")
    far = StoreProcess(
        url, "far", "--transfer-port=0", f"--nats-user={user}", f"--nats-password={password}", memory=FAR_MEMORY
    )
    near = NearStore(arenas_of(stack))
    user, password = stack.user_credentials("scheduler")
    bus = await connect(NatsOptions(servers=(url,), user=user, password=password))
    results: dict[str, tuple[list[float], list[float]]] = {}
    try:
        far.start()
        at_near, at_far = (StoreClient(bus, store, LAYOUT) for store in (near, far))
        for at in (at_near, at_far):
            await at.follow()
            await at.attach()
        await know_each_other(at_near, at_far)
        for number in range(CHAINS):
            await at_far.save(chain(number, BLOCKS))
        labels = [IDLE, *(f"budget {budget}" for budget in given.budgets)]
        rates = [0, *(0 if each == "none" else int(each.removesuffix("MiB")) * MEBIBYTE for each in given.budgets)]
        for number in range(given.rounds + 1):  # the first one warms up, and counts for nothing
            for label, rate in zip(labels, rates, strict=True):
                SharedBandwidth.publish(near.directory, rate)
                gaps, copied = await a_round(given, stack, at_near, far, copies=label != IDLE)
                if number:
                    seen = results.setdefault(label, ([], []))
                    seen[0].extend(gaps)
                    seen[1].append(copied)
    finally:
        await bus.close()
        far.close()
    return results


def arenas_of(stack: RunningStack) -> Path:
    """Where the stack's store has its files."""
    [store] = stack.instances("kvstore")
    files = (Path(mapped.path) for mapped in psutil.Process(stack.pid(store)).memory_maps())
    return next(path.parent for path in files if path.name == FILE)


async def a_round(
    given: argparse.Namespace, stack: RunningStack, at_near: StoreClient, far: StoreProcess, *, copies: bool
) -> tuple[list[float], float]:
    """Seconds between the tokens of all streams, and bytes per second that were copied meanwhile."""
    copied, begin = [0], time.perf_counter()
    copying = asyncio.create_task(copy_on(at_near, far, copied)) if copies else None
    async with client_of(stack.url) as client:
        gaps = await asyncio.gather(*(a_stream(client, stack.model, given.tokens, n) for n in range(given.streams)))
    rate = copied[0] / (time.perf_counter() - begin)
    if copying is not None:
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
    return [gap for each in gaps for gap in each], rate


async def copy_on(at_near: StoreClient, far: StoreProcess, copied: list[int]) -> None:
    while True:
        for number in range(CHAINS):
            lease, found = await at_near.find_only(chain(number, BLOCKS), source=far)
            await at_near.release(lease)
            copied[0] += found.from_lower * BLOCK_BYTES


async def a_stream(client: AsyncOpenAI, model: str, tokens: int, number: int) -> list[float]:
    """Seconds between its tokens."""
    stream = await client.completions.create(
        model=model,
        prompt=f"Story number {number}: ",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    at = [time.perf_counter() async for _ in stream]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


if __name__ == "__main__":
    main()
