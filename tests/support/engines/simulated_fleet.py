"""Small simulations for tests: a device whose steps take 5 ms and 20 µs a token, and loads of a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from deploy.simulation.front import Workload
from deploy.simulation.hops import HopDelays
from deploy.simulation.kit import EngineKit, EnginePools, SlowEngines
from deploy.simulation.prompts import PromptSegment, SimRequest
from deploy.simulation.simulation import SimulationResult, simulate
from deploy.simulation.workloads import GeneratedLoad
from services.coordinator.config import CoordinatorConfig
from services.scheduler.core.limits import EngineLimits
from services.worker.kv.copier import RankKvCache
from services.worker.sim.backend import SimBackend
from services.worker.sim.kv_copier import SimKvCopier
from shared.ids import ModelName
from shared.messages.kvstore import KvLayout
from shared.messages.model_card import ModelCard

CARD = ModelCard(
    name=ModelName("m"), max_model_len=4096, vocab_size=1000, eos_token_ids=(0,), dtype="bfloat16", created=0
)
LOAD = GeneratedLoad(rate=20, seconds=5, input_len=200, output_len=30, prefixes=4, prefix_len=256, seed=7)


def step_seconds(tokens: int, pairs: int, read: int, samples: int) -> float:
    return 0.005 + 0.00002 * tokens


BLOCK_BYTES = 2**20


def kv_memory(blocks: int, block_seconds: float) -> RankKvCache:
    return RankKvCache(
        layout=KvLayout(model="m", dtype="float16", layers=1, kv_heads=1, head_dim=1),
        first_head=0,
        num_heads=1,
        writes=True,
        num_blocks=blocks,
        copier=SimKvCopier(block_seconds, BLOCK_BYTES),
        first_layer=0,
        num_layers=1,
    )


def make_kit(
    limits: EngineLimits | None = None,
    blocks: int = 400,
    hops: HopDelays | None = None,
    checked: bool = False,
    pools: EnginePools | None = None,
    store_blocks: int = 0,
    pulls: bool = False,
    block_seconds: float = 0.0002,
    slow: SlowEngines | None = None,
) -> EngineKit:
    kv = kv_memory(blocks, block_seconds)
    device = SimBackend(CARD, blocks, step_seconds, list(range(1, 1000)), "sim", kv=kv)
    return EngineKit(
        limits or EngineLimits(max_running=16, run_ahead=2),
        device,
        hops or HopDelays(),
        checked=checked,
        pools=pools or EnginePools(),
        slow=slow or SlowEngines(),
        store_memory=store_blocks * BLOCK_BYTES,
        pulls=pulls,
    )


class FixedLoad(NamedTuple):
    """Requests as they are given."""

    given: tuple[SimRequest, ...]
    concurrency: int | None = None
    description: dict[str, object] = {}  # noqa: RUF012

    def requests(self) -> Iterator[SimRequest]:
        return iter(self.given)


def request(number: int, at: float, prompt: int = 100, output: int = 10, name: int | None = None) -> SimRequest:
    own = PromptSegment(1000 + number if name is None else name, prompt)
    return SimRequest(number, at, (own,), output)


def run(
    load: Workload = LOAD,
    *,
    engines: int = 3,
    processes: int = 0,
    routing: CoordinatorConfig | None = None,
    **kit: Any,
) -> SimulationResult:
    routing = routing or CoordinatorConfig()
    return simulate(partial(make_kit, **kit), routing, load, engines=engines, processes=processes)
