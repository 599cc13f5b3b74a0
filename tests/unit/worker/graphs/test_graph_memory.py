"""How much captured decodes are said to take before KV memory is sized: two are tried, on memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from services.worker.executor import kv_sizing as kv_profile
from services.worker.graphs.capture import Replay
from services.worker.graphs.choice import DecodeGraphs
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.interface import MemoryReading
from tests.support.worker.emulated_graphs import RunAgain

MIB = 1 << 20


class WatchedDecoder:
    """As much of a decoder as capturing needs."""

    ops = SimpleNamespace(block_size=16)
    state_bytes = 0

    def __init__(self) -> None:
        self.steps: list[int] = []

    def allocate_kv(self, num_blocks: int, sequences: int) -> KvCaches:
        return [(torch.zeros(num_blocks), torch.zeros(num_blocks))]

    def check_inputs(self, *, of_clients: bool) -> None:
        raise NotImplementedError

    def empty_features(self, rows: int) -> Tensor:
        return torch.zeros(rows, 4)

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor:
        assert bool((meta.slots == -1).all()), "nothing may be stored"
        assert features is not None
        assert len(features) == len(ids)
        self.steps.append(len(ids))
        return torch.zeros(len(ids), 8)


class WatchedMemory(CpuPlatform):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.given_back = 0
        # Before and behind the graphs the log looks, too.
        self.left = [1000 * MIB, 1000 * MIB, 900 * MIB, 893 * MIB, 893 * MIB]
        self.held = [100 * MIB, 100 * MIB, 195 * MIB, 200 * MIB, 200 * MIB]

    def empty_cache(self) -> None:
        self.given_back += 1

    def memory(self) -> MemoryReading:
        return MemoryReading(self.left.pop(0), self.held.pop(0))


def test_the_two_largest_sizes_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_profile, "CudaCapture", lambda device: AllowingChecks())
    decoder = WatchedDecoder()
    graphs = DecodeGraphs(decoder, WatchedMemory(0), (1, 2, 4, 8, 16), max_model_len=64, features=True)
    assert kv_profile._of_graphs(graphs) == (100 + 4 * 7) * MIB
    assert decoder.steps == [16, 16, 8, 8]


class AllowingChecks(RunAgain):
    """The decoder here looks at numbers, which a real one may not."""

    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        work()
        return work
