"""What placing a request costs a coordinator. Run by hand: python -m tests.benchmarks.router_cost

One million indexed blocks, 64 engines on 8 nodes with a KV store each, prompts of 64 to 256 blocks: the time of one
whole decision (fence, queue, walk, costs of all engines, reservation), of taking an event in, and the memory of the
index. Reports keep coming, as they would, so that reservations are settled between decisions.
"""

from __future__ import annotations

import cProfile
import gc
import random
import sys
import time

import psutil

from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.actions import Moment, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.blocks import HASH_BYTES
from shared.ids import Attempt, GatewayId, Incarnation, InstanceId, RequestId
from shared.kv_event_stream import MAX_HASHES
from shared.messages.coordinator import Route
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.kv_events import KvEvents
from tests.support.engines.coordinator_events import MODEL, detokenizer, engine, source, store

ENGINES, NODES = 64, 8
BLOCKS = 1_000_000
HELD_BY = 4
"""Engines that hold a chain, on average."""
DECISIONS = 20_000
REPORT_EVERY = 0.5
DECISION_EVERY = 0.005


class Chains:
    """Prompts as hashes: chains that share their beginnings, as system prompts and conversations do."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.chains: list[bytes] = []
        blocks = 0
        while blocks < BLOCKS:
            root = chance.randbytes(HASH_BYTES * chance.randint(16, 64))
            blocks += len(root) // HASH_BYTES
            for _ in range(chance.randint(1, 8)):
                own = chance.randbytes(HASH_BYTES * chance.randint(48, 192))
                blocks += len(own) // HASH_BYTES
                self.chains.append(root + own)

    def request(self, number: int) -> Route:
        """Four of five begin with a known chain, whole or in part; all of them have 64 to 256 blocks."""
        blocks = self._chance.randint(64, 256)
        known = self._chance.choice(self.chains)[: HASH_BYTES * self._chance.randint(16, blocks)]
        if self._chance.random() < 0.2:
            known = b""
        hashes = known + self._chance.randbytes(HASH_BYTES * blocks)
        return _route(f"request-{number:030}", hashes[: HASH_BYTES * blocks], blocks)


def _route(request: str, hashes: bytes, blocks: int) -> Route:
    return Route(
        Generation(
            request=RequestId(request),
            attempt=Attempt(1),
            gateway=GatewayId("gateway-1"),
            model=MODEL,
            tokens=bytes(4 * 16 * blocks),
            prompt_length=16 * blocks,
            block_hashes=hashes,
            sampling=SamplingOptions(seed=1),
            stopping=StopConditions(max_tokens=64),
        )
    )


class Cluster:
    """Reports whose load moves, and events that tell who holds what."""

    def __init__(self, core: Coordinator, chance: random.Random) -> None:
        self.core = core
        self._chance = chance
        self._numbers: dict[str, int] = {}

    def report(self, now: float) -> None:
        for number in range(ENGINES):
            life = engine(
                f"engine-{number}",
                running=self._chance.randint(8, 64),
                max_running=256,
                max_waiting=1024,
                max_model_len=8192,
                blocks_total=20_000,
                blocks_used=self._chance.randint(1000, 8000),
                prefill_tokens=self._chance.randint(0, 8192),
                node=f"node-{number % NODES}",
            )
            self.core.lifecycle(life, Moment(now, now))
        for number in range(NODES):
            self.core.lifecycle(store(f"node-{number}"), Moment(now, now))
        self.core.lifecycle(detokenizer(), Moment(now, now))

    def stored(self, instance: str, hashes: bytes) -> None:
        for start in range(0, len(hashes), MAX_HASHES * HASH_BYTES):
            number = self._numbers.get(instance, 0)
            self._numbers[instance] = number + 1
            event = KvEvents(
                source=source(instance),
                epoch=Incarnation(1),
                number=number,
                stored=hashes[start : start + MAX_HASHES * HASH_BYTES],
                cleared=number == 0,
            )
            self.core.blocks_changed(event, Moment(0.0, 0.0))


def measure(policy: Policy, decisions: int) -> None:
    chance = random.Random(1)
    chains = Chains(chance)
    core = Coordinator(
        InstanceId("coordinator-1"), CoordinatorConfig(router_policy=policy, router_index_blocks=4_000_000)
    )
    cluster = Cluster(core, chance)
    cluster.report(0.0)
    gc.collect()
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    stored = 0
    for chain in chains.chains:
        holders = chance.sample(range(ENGINES), chance.randint(1, 2 * HELD_BY - 1))
        names = [f"engine-{n}" for n in holders] + [f"kvstore-node-{n}" for n in {n % NODES for n in holders}]
        for name in names:
            cluster.stored(name, chain)
            stored += len(chain) // HASH_BYTES
    per_block = (time.perf_counter() - started) / stored
    memory = psutil.Process().memory_info().rss - before
    index = core.sources.map
    print(
        f"{policy}: {len(index):,} blocks, {stored:,} (block, source) pairs: {memory / 2**20:.0f} MiB, "
        f"{memory / len(index):.0f} bytes a block; {per_block * 1e6:.2f} µs for each pair taken in"
    )
    _decide(core, cluster, chains, decisions)


def _decide(core: Coordinator, cluster: Cluster, chains: Chains, decisions: int) -> None:
    """Placed requests are counted as placed, and settled by the next report. On a machine that others use too, the
    processor's time tells more than the clock's."""
    took: list[float] = []
    computed: list[float] = []
    hit = 0
    now = 1.0
    reported = now
    for number in range(decisions):
        request = chains.request(number)
        now += DECISION_EVERY
        if now - reported > REPORT_EVERY:
            cluster.report(now)
            core.time_passed(Moment(now, now))
            reported = now
        began, started = time.thread_time(), time.perf_counter()
        (action,) = core.route(request, Moment(now, now))
        took.append(time.perf_counter() - started)
        computed.append(time.thread_time() - began)
        assert isinstance(action, PlaceRequest)
        hit += action.reuse.blocks
    for name, seconds in (("by the clock", took), ("of the processor", computed)):
        print(f"  decisions {name}: {_quantiles(seconds)}")
    print(f"  {hit / decisions:.1f} blocks expected cached on average")


def _quantiles(seconds: list[float]) -> str:
    seconds.sort()
    shown = ", ".join(f"p{int(100 * q)} {seconds[int(len(seconds) * q)] * 1e3:.3f}" for q in (0.5, 0.9, 0.99))
    return f"{shown}, most {seconds[-1] * 1e3:.3f} ms"


if __name__ == "__main__":
    if "--profile" in sys.argv:
        cProfile.run('measure("kv", 5000)', sort="tottime")
    else:
        for policy_ in ("kv", "least-loaded"):
            measure(policy_, DECISIONS)  # type: ignore[arg-type]
