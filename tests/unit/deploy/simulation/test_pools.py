"""Pools that prefill and decode, and engines that share a store, on virtual time."""

from __future__ import annotations

import pytest

from deploy.simulation.kit import EnginePools
from services.coordinator.config import CoordinatorConfig
from tests.support.engines.simulated_fleet import FixedLoad, request, run

POOLS = EnginePools(prefill=1, decode=1)
PULLED = CoordinatorConfig(prefill_queue=True)
LOAD = FixedLoad(tuple(request(number, number * 0.05, prompt=300 + 7 * number, output=20) for number in range(12)))


def test_engines_are_numbered_pool_by_pool() -> None:
    pools = EnginePools(1, 2, 1)
    assert [pools.role_of(number) for number in range(5)] == ["mixed", "prefill", "prefill", "decode", "mixed"]
    assert pools.total == 4


def test_long_prompts_are_handed_over_and_all_tokens_come() -> None:
    result = run(LOAD, engines=2, pools=POOLS, store_blocks=4096, checked=True)
    assert {sent.engine for sent in result.sent} == {"engine-1"}
    for sent in result.sent:
        record = result.records[sent.request.id]
        assert record.error is None
        assert record.output_tokens == len(record.token_times) == 20
        assert list(record.token_times) == sorted(record.token_times)
    decode = next(total for total in result.totals if total.engine == "engine-2")
    assert decode.steps > 20, "the second engine decodes"


def test_a_second_token_waits_for_the_copies_of_the_prompts_blocks() -> None:
    def gap(block_seconds: float) -> float:
        result = run(
            FixedLoad((request(0, 0.0, 512, 4),)),
            engines=2,
            pools=POOLS,
            store_blocks=512,
            block_seconds=block_seconds,
        )
        first, second, *_ = result.records[result.sent[0].request.id].token_times
        return second - first

    slower = 0.002
    # All of a prompt that fits into one step is saved behind it, and loaded: 33 blocks each way.
    assert gap(slower) - gap(0.0) == pytest.approx(2 * 33 * slower, abs=0.011)


def test_without_room_in_the_store_the_prefill_engine_decodes() -> None:
    result = run(LOAD, engines=2, pools=POOLS, store_blocks=8, checked=True)
    assert all(record.error is None and record.output_tokens == 20 for record in result.records.values())
    totals = {total.engine: total.steps for total in result.totals}
    assert totals["engine-1"] > totals["engine-2"]


def test_engines_that_share_a_store_find_what_others_computed() -> None:
    routing = CoordinatorConfig(router_policy="round-robin")
    load = FixedLoad(tuple(request(number, number * 0.5, 200, 4, name=7) for number in range(4)))
    alone = run(load, engines=2, routing=routing)
    shared = run(load, engines=2, routing=routing, pools=EnginePools(2), store_blocks=64, checked=True)
    assert alone.records["r1"].cached_tokens == 0
    assert shared.records["r1"].cached_tokens == 192


def test_pulled_prompts_are_all_computed_and_none_twice() -> None:
    result = run(LOAD, engines=2, pools=POOLS, store_blocks=4096, checked=True, pulls=True, routing=PULLED)
    assert {sent.engine for sent in result.sent} == {"engine-1"}
    assert all(record.error is None and record.output_tokens == 20 for record in result.records.values())
    assert len(result.records) == len(LOAD.given)
