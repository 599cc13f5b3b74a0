"""Measured links: blocks of another node count for what they save beyond their way, if that is anything."""

from __future__ import annotations

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.kv_sources import Reuse
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, RecomputeReport
from tests.support.engines.coordinator_events import at, detokenizer, engine, holds, route, store

BLOCK = 16
PROMPT = 200 * BLOCK
COSTS = RecomputeReport(block_bytes=1000, block_seconds=0.01)
"""A block takes as long to compute as it takes to fetch over a link of 100,000 bytes per second."""


def pool(
    name: str, node: str, *, used: int = 0, role: str = "mixed", costs: RecomputeReport | None = COSTS
) -> Lifecycle:
    return engine(
        name,
        max_running=64,
        max_waiting=64,
        max_model_len=65_536,
        blocks_total=10_000,
        blocks_used=used,
        role=role,  # type: ignore[arg-type]
        node=node,
        recompute=costs,
    )


def placed(*lives: Lifecycle, config: CoordinatorConfig | None = None) -> PlaceRequest:
    """The store of n1 holds the first half of the prompt."""
    core = Coordinator(InstanceId("coordinator-1"), config or CoordinatorConfig())
    for life in (detokenizer(), store("n1"), *lives):
        core.lifecycle(life, at(0))
    half = route("", prompt=PROMPT).generation.block_hashes[: 16 * 100]
    core.blocks_changed(holds("kvstore-n1", half), at(0))
    (action, *_) = core.route(route("r", prompt=PROMPT), at(1))
    assert isinstance(action, PlaceRequest)
    return action


@pytest.mark.parametrize(
    ("rate", "reuse"),
    [
        (1_000_000.0, Reuse(remote=100, remote_node="n1", remote_price=10.0)),  # type: ignore[arg-type]
        (101_000.0, Reuse(remote=100, remote_node="n1", remote_price=100 / 1.01)),  # type: ignore[arg-type]
        (99_000.0, Reuse()),
    ],
)
def test_blocks_of_another_node_are_fetched_where_that_is_sooner(rate: float, reuse: Reuse) -> None:
    action = placed(pool("e2", "n2"), store("n2", links={"n1": rate}))
    assert action.reuse[:4] == reuse[:4]
    assert action.reuse.remote_price == pytest.approx(reuse.remote_price)
    assert action.generate.kv_source == reuse.remote_node
    assert action.generate.predicted_cached == reuse.blocks * BLOCK


def test_loading_them_from_the_arena_counts_too() -> None:
    slow = RecomputeReport(block_bytes=1000, block_seconds=0.01, load_seconds=0.0095)
    link = store("n2", links={"n1": 1_000_000.0})
    assert placed(pool("e2", "n2"), link).reuse.remote == 100
    assert placed(pool("e2", "n2", costs=slow), link).reuse.remote == 0


def test_what_was_not_measured_is_worth_what_the_setting_says() -> None:
    assert placed(pool("e2", "n2"), store("n2")).reuse == Reuse(remote=100, remote_node="n1")  # type: ignore[arg-type]
    unmeasured = placed(pool("e2", "n2", costs=None), store("n2", links={"n1": 1.0}))
    assert unmeasured.reuse.remote == 100


@pytest.mark.parametrize(("rate", "chosen"), [(10_000_000.0, "e2"), (110_000.0, "e1")])
def test_of_two_engines_the_one_with_the_better_link_gets_the_request(rate: float, chosen: str) -> None:
    """e1 has the blocks in its node's store, at a quarter of their price, and 60 blocks more to read."""
    action = placed(pool("e1", "n1", used=60), pool("e2", "n2"), store("n2", links={"n1": rate}))
    assert action.engine == chosen


def test_a_store_that_is_gone_has_no_links() -> None:
    gone = store("n2", "stopped", links={"n1": 1.0})
    assert placed(pool("e2", "n2"), store("n2", links={"n1": 1.0}), gone).reuse.remote == 100


SPLIT = CoordinatorConfig(disaggregate_tokens=10 * BLOCK)


@pytest.mark.parametrize(
    ("rate", "decode_on"),
    [
        (1_000_000.0, "d2"),  # its way hides behind the prefill, all but the last block
        (60_000.0, "d1"),  # slower than the prefill: d1 has less to wait for
    ],
)
def test_a_hand_over_goes_where_its_way_is_not_waited_for(rate: float, decode_on: str) -> None:
    action = placed(
        pool("p", "n1", role="prefill"),
        pool("d1", "n1", role="decode", used=30),
        pool("d2", "n2", role="decode"),
        store("n2", links={"n1": rate}),
        config=SPLIT,
    )
    assert (action.engine, action.generate.decode_on) == ("p", decode_on)


@pytest.mark.parametrize(("rate", "engine_and_decode"), [(80_000.0, ("p", "d2")), (10_000.0, ("d2", None))])
def test_nothing_is_handed_over_a_link_over_which_it_takes_longer_than_computing_it_again(
    rate: float, engine_and_decode: tuple[str, str | None]
) -> None:
    action = placed(
        pool("p", "n1", role="prefill"),
        pool("d2", "n2", role="decode"),
        store("n2", links={"n1": rate}),
        config=SPLIT,
    )
    assert (action.engine, action.generate.decode_on) == engine_and_decode
