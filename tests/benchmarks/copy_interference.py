"""What copies of KV blocks cost the streams of an engine on the same host, with and without a bandwidth for them.

    python -m tests.benchmarks.copy_interference --bandwidth 16MiB --tokens 300

For each setting a stack of its own: streams alone, then beside another node's store that fetches the blocks of a long
prompt from this one's, again and again. Milliseconds between two tokens, and what was fetched meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from deploy.model_choice import DEMO_MODEL
from kvstore.arena.mapped_arena import MappedArena
from kvstore.transfer.client import TransferClient
from kvstore.transfer.interface import BlockRequest
from shared.blocks import hash_chain
from shared.packing import pack
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import ask, prompts, stored

LENGTH = 1500
STREAMS = 2


class Measured(NamedTuple):
    """Of one phase: gaps in seconds, and bytes per second that were fetched."""

    gaps: list[float]
    fetched: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", nargs="+", default=["16MiB"])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--fetchers", type=int, default=4)
    given = parser.parse_args()
    print("| kv-bandwidth | | fetched, MiB/s | ITL p50, ms | p90, ms | p99, ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for bandwidth in ("none", *given.bandwidth):
        settings = ["kvstore.transfer_port=0", "worker.threads=1"]
        if bandwidth != "none":
            settings.append(f"kvstore.kv_bandwidth={bandwidth}")
        with (
            tempfile.TemporaryDirectory() as folder,
            running_stack(Path(folder), model=DEMO_MODEL, engines=1, kvstore="128MiB", settings=settings) as stack,
        ):
            for label, measured in asyncio.run(measure(stack, given)).items():
                row(bandwidth, label, measured)


def row(bandwidth: str, label: str, measured: Measured) -> None:
    gaps = statistics.quantiles(measured.gaps, n=100)
    cells = (bandwidth, label, f"{measured.fetched / 2**20:.0f}", *(f"{gaps[at - 1] * 1e3:.1f}" for at in (50, 90, 99)))
    print(f"| {' | '.join(cells)} |", flush=True)


async def measure(stack: RunningStack, given: argparse.Namespace) -> dict[str, Measured]:
    [prompt] = prompts(stack, (LENGTH,))
    async with client_of(stack.url) as client:
        await ask(client, stack.model, prompt)
    await stored(stack, LENGTH // 16)
    life = (await stack.ps())["kvstore-1"]
    assert life.store is not None
    path = arena_of(stack)
    fetcher = Fetchers(life.store.transfer, path, BlockRequest(path.stem, hash_chain(pack(prompt), None)))
    return {
        "streams alone": await phase(stack, given, fetcher, 0),
        "and another node": await phase(stack, given, fetcher, given.fetchers),
    }


def arena_of(stack: RunningStack) -> Path:
    """The file with the blocks of its one layout."""
    [path] = Path(stack.state.arenas or "").glob("*.arena")
    return path


class Fetchers:
    """Several fetches of the same blocks at a time, each begun anew when it ends."""

    def __init__(self, address: str, path: Path, request: BlockRequest) -> None:
        self._address, self._request = address, request
        self._shape = MappedArena.open(path).shape
        self.bytes = 0

    async def run(self) -> None:
        client = TransferClient()
        while True:
            async for block in client.fetch(self._address, self._request, self._shape):
                self.bytes += len(block.payload)
            await asyncio.sleep(0)


async def phase(stack: RunningStack, given: argparse.Namespace, fetcher: Fetchers, fetchers: int) -> Measured:
    running = [asyncio.create_task(fetcher.run()) for _ in range(fetchers)]
    before, begin = fetcher.bytes, time.perf_counter()
    gaps = await asyncio.gather(*(gaps_of(stack, given.tokens, number) for number in range(STREAMS)))
    rate = (fetcher.bytes - before) / (time.perf_counter() - begin)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return Measured([gap for each in gaps for gap in each], rate)


async def gaps_of(stack: RunningStack, tokens: int, number: int) -> list[float]:
    times = []
    async with client_of(stack.url) as client:
        stream = await client.completions.create(
            model=stack.model,
            prompt=f"Once upon a time number {number}",
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


if __name__ == "__main__":
    main()
