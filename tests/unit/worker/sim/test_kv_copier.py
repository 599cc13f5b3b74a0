"""KV memory of simulated ranks: what they share, and how long copies take."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.kv.copier import RankKvCache
from services.worker.sim.kv_copier import SimKvCopier, simulated_kv
from services.worker.sim.shape import read_shape
from tests.support.engines.engine_on_a_bus import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def rank(folder: Path, number: int, of: int, dtype: str = "auto") -> RankKvCache:
    shape = read_shape(folder, dtype)
    return simulated_kv(shape, num_blocks=8, block_size=16, rank=number, world_size=of, bandwidth=1e6, time_scale=1.0)


def seconds(kv: RankKvCache) -> float:
    assert isinstance(kv.copier, SimKvCopier)
    return kv.copier.seconds_per_block


def test_a_block_takes_its_bytes_over_the_bandwidth_and_ranks_share_its_heads(folder: Path) -> None:
    block = 16 * (2 * 2 * 2 * 16 * 2)
    assert seconds(rank(folder, 0, 1)) == pytest.approx(block / 1e6)
    assert seconds(rank(folder, 1, 2)) == pytest.approx(block / 2 / 1e6)
    assert seconds(rank(folder, 3, 4)) == pytest.approx(block / 2 / 1e6), "two ranks hold the same head"
    assert seconds(rank(folder, 0, 1, "float32")) == pytest.approx(2 * block / 1e6)


def test_engines_of_any_size_share_blocks_and_those_of_other_models_do_not(folder: Path) -> None:
    assert rank(folder, 0, 1).layout == rank(folder, 3, 4).layout
    assert rank(folder, 0, 1).layout != rank(folder, 0, 1, "float32").layout
    assert [rank(folder, number, 4).writes for number in range(4)] == [True, False, False, False]
