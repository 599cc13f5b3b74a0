"""Whether blocks are loaded or computed follows from what both were measured to take."""

from __future__ import annotations

import pytest

from services.scheduler.core.transfer.recompute_costs import LOAD_MEMORY, RecomputeCosts
from shared.messages.kvstore import KvLayout
from shared.messages.lifecycle import RecomputeReport

LAYOUT = KvLayout(model="m", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)


def measured(*, token_seconds: float = 0.001, load_seconds: float | None = None) -> RecomputeCosts:
    costs = RecomputeCosts(LAYOUT, 16)
    costs.record_step(1000, 1000 * token_seconds)
    if load_seconds is not None:
        costs.record_load(10, 10 * load_seconds, 1.0)
    return costs


def test_what_was_not_measured_is_loaded_and_waited_for_as_long_as_is_set() -> None:
    costs = RecomputeCosts(LAYOUT, 16)
    costs.record_step(8, 10.0)  # a few tokens: its fixed cost says nothing of long prompts
    assert costs.block_seconds is None
    assert costs.load_pays(1.0)
    assert costs.deadline(100, 0.5) == 0.5
    assert costs.report() is None


def test_a_search_lasts_no_longer_than_computing_would() -> None:
    costs = measured(token_seconds=0.001)
    assert costs.block_seconds == pytest.approx(0.016)
    assert costs.deadline(10, 0.5) == pytest.approx(0.16)
    assert costs.deadline(100, 0.5) == 0.5


@pytest.mark.parametrize(("load_seconds", "pays"), [(0.001, True), (0.015, True), (0.017, False)])
def test_the_cheaper_of_both_is_done(load_seconds: float, pays: bool) -> None:
    assert measured(load_seconds=load_seconds).load_pays(2.0) == pays


def test_a_slow_load_is_forgotten_after_a_while() -> None:
    costs = measured(load_seconds=1.0)
    assert not costs.load_pays(1.0 + LOAD_MEMORY)
    assert costs.load_pays(1.1 + LOAD_MEMORY)
    costs.record_load(10, 0.01, 2.0 + LOAD_MEMORY)
    assert costs.load_pays(2.0 + LOAD_MEMORY), "what is old does not count beside it"


def test_coordinators_are_told_bytes_and_seconds_of_a_block() -> None:
    report = measured(load_seconds=0.002).report()
    assert report == RecomputeReport(block_bytes=2 * 2**20, block_seconds=0.016, load_seconds=0.002)
    unshared = RecomputeCosts(None, 16)
    unshared.record_step(1000, 1.0)
    assert unshared.report() is None
