"""What each of several coordinators spends on block events and their index: as it is, where each hears and keeps all,
and as it would be if prompts were shared out among them by their first block.

    python -m tests.benchmarks.sharded_coordinators --engines 64 --blocks 100000 --coordinators 1 2 4

Decoding and taking in the events of some seconds of traffic, in processor time; the bus's own work is not in it.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from multiprocessing import Process
from random import Random

from deploy.simulation.routing_cost import resident_bytes
from services.coordinator.core.fleet_heartbeat import kv_interval_for
from services.coordinator.core.kv_sources import KvSources
from shared.blocks import BlockHash
from shared.bus.codec import decode, encode
from shared.ids import Incarnation, InstanceId, ModelName
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KvEvents, KvSource

Prompt = list[BlockHash]


class Fleet:
    """Owns the event streams of simulated engines, one for each share of the prompts."""

    def __init__(self, engines: int, shares: int, prompt_blocks: int, seed: int) -> None:
        self._random, self._blocks, self.shares = Random(seed), prompt_blocks, shares
        self.names = [InstanceId(f"engine-{number:04}") for number in range(engines)]
        sources = [KvSource(instance=name, model=ModelName("m"), node=None) for name in self.names]
        self._streams = [[KvEventStream(source, Incarnation(1)) for _ in range(shares)] for source in sources]
        self._held: list[list[Prompt]] = [[] for _ in self.names]

    def fill(self, blocks: int, holders: int) -> None:
        for number in range(blocks * len(self.names) // holders // self._blocks):
            prompt = self._prompt()
            for holder in range(holders):
                self._store((number * holders + holder) % len(self.names), prompt)

    def work(self, prompts: int) -> None:
        """Each engine computes new prompts and evicts as many old ones."""
        for engine, held in enumerate(self._held):
            for _ in range(prompts):
                old = held.pop(self._random.randrange(len(held)))
                for hash_ in old:
                    self._stream(engine, old).changes.removed(hash_)
                self._store(engine, self._prompt())

    def messages(self, share: int) -> Iterator[bytes]:
        """What the coordinator of that share is sent."""
        for streams in self._streams:
            yield from (encode(event) for event in streams[share].flush())

    def _store(self, engine: int, prompt: Prompt) -> None:
        self._held[engine].append(prompt)
        for hash_ in prompt:
            self._stream(engine, prompt).changes.stored(hash_)

    def _prompt(self) -> Prompt:
        return [BlockHash(self._random.randbytes(16)) for _ in range(self._blocks)]

    def _stream(self, engine: int, prompt: Prompt) -> KvEventStream:
        return self._streams[engine][prompt[0][0] % self.shares]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--engines", type=int, default=64)
    made.add_argument("--blocks", type=int, default=100_000, help="cached by each engine")
    made.add_argument("--holders", type=int, default=4, help="engines that hold a block")
    made.add_argument("--prompt-blocks", type=int, default=128, help="new blocks of a prompt")
    made.add_argument("--rate", type=float, default=4.0, help="prompts per engine and second")
    made.add_argument("--seconds", type=float, default=20.0, help="of traffic")
    made.add_argument("--coordinators", type=int, nargs="+", default=[1, 2, 4])
    given = made.parse_args()
    print("coordinators  index        million blocks  MiB  messages/s  blocks/s   event CPU ms/s")
    for count in given.coordinators:
        for shares in sorted({1, count}):
            measured = Process(target=_measure, args=(given, count, shares))  # with memory of its own
            measured.start()
            measured.join()


def _measure(given: argparse.Namespace, coordinators: int, shares: int) -> None:
    """One coordinator of the first share: the others do as much."""
    fleet = Fleet(given.engines, shares, given.prompt_blocks, seed=1)
    fleet.fill(given.blocks, given.holders)
    sources = KvSources(limit=10**9)
    for name in fleet.names:
        sources.follow(name)
    for share in range(1, shares):
        for _ in fleet.messages(share):
            pass
    filling = list(fleet.messages(0))
    gc.collect()
    before = resident_bytes()
    _take_in(sources, filling)
    gc.collect()
    memory = resident_bytes() - before
    gc.freeze()
    interval = kv_interval_for(given.engines, 1280.0)
    messages = hashes = 0
    spent, due = 0.0, 0.0
    for _ in range(int(given.seconds / interval)):
        due += given.rate * interval
        prompts, due = int(due), due - int(due)
        fleet.work(prompts)
        received = list(fleet.messages(0))
        for share in range(1, shares):
            list(fleet.messages(share))
        begin = time.process_time()
        hashes += _take_in(sources, received)
        spent += time.process_time() - begin
        messages += len(received)
    index = "all" if shares == 1 else f"1/{shares}"
    print(
        f"{coordinators:<13} {index:<12} {len(sources.map) / 1e6:<15.2f} {memory / 2**20:<4.0f} "
        f"{messages / given.seconds:<11.0f} {hashes / given.seconds:<10,.0f} {spent / given.seconds * 1e3:.1f}",
        flush=True,
    )
    gc.unfreeze()


def _take_in(sources: KvSources, messages: list[bytes]) -> int:
    hashes = 0
    for message in messages:
        event = decode(message, KvEvents)
        sources.record_events(event, 0.0)
        hashes += (len(event.stored) + len(event.removed)) // 16
    return hashes


if __name__ == "__main__":
    main()
