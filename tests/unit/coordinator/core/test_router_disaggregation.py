"""Which engine prefills and which decodes: when a request stays in one place, and when two share it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.actions import PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.ids import InstanceId
from shared.messages.kv_events import KvEvents
from shared.messages.lifecycle import Lifecycle, Phase, Role
from tests.support.engines.coordinator_events import at, detokenizer, engine, holds, route, store, summary

BLOCK = 16
LONG = 200 * BLOCK
"""Tokens; beyond `disaggregate_tokens` as used here."""
ROUTING = CoordinatorConfig(disaggregate_tokens=100 * BLOCK, disaggregate_share=0.7, disaggregate_busy=300 * BLOCK)


def pool(name: str, role: Role, phase: Phase = "ready", *, node: str | None = "n1", **fields: object) -> Lifecycle:
    known: dict[str, object] = {
        "max_running": 64,
        "max_waiting": 64,
        "max_model_len": 65_536,
        "blocks_total": 10_000,
        "blocks_used": 0,
    }
    return engine(name, phase, role=role, node=node, **{**known, **fields})  # type: ignore[arg-type]


def prefix(blocks: int) -> bytes:
    return route("", prompt=LONG).generation.block_hashes[: 16 * blocks]


class Placed(NamedTuple):
    on: str
    decode_on: str | None


def where(
    *heard: Lifecycle | KvEvents,
    prompt: int = LONG,
    avoid: tuple[str, ...] = (),
    routing: CoordinatorConfig = ROUTING,
    attempt: int = 1,
) -> Placed | str:
    core = Coordinator(InstanceId("coordinator-1"), routing)
    core.lifecycle(detokenizer(), at(0))
    for message in heard:
        if isinstance(message, Lifecycle):
            core.lifecycle(message, at(0))
        else:
            core.blocks_changed(message, at(0))
    (action, *_) = actions = core.route(route("r", attempt, prompt=prompt, avoid=avoid), at(1))
    if not isinstance(action, PlaceRequest):
        return summary(actions)[0][0]
    return Placed(action.engine, action.generate.decode_on)


P1, P2 = pool("p1", "prefill"), pool("p2", "prefill")
D1, D2, M1 = pool("d1", "decode"), pool("d2", "decode"), pool("m1", "mixed")
APART = Placed("p1", "d1")
LOCAL = Placed("d1", None)


@pytest.mark.parametrize(
    ("cached", "prompt", "expected"),
    [
        (0, LONG, APART),
        (99, LONG, APART),
        (101, LONG, LOCAL),
        (0, 50 * BLOCK, APART),
        (10, 50 * BLOCK, APART),
        (20, 50 * BLOCK, LOCAL),
        (0, 16 * BLOCK, APART),
        (0, 16 * BLOCK - 1, LOCAL),
    ],
    ids=[
        "nothing cached",
        "101 blocks left are not short",
        "99 blocks left, half of the prompt",
        "a short prompt of which all is left",
        "a short prompt of which 80% are left",
        "a short prompt of which 60% are left",
        "just long enough to be handed over",
        "too short, whatever its share",
    ],
)
def test_what_is_short_and_a_small_share_stays_local(cached: int, prompt: int, expected: Placed) -> None:
    assert where(P1, D1, holds("d1", prefix(cached)), prompt=prompt) == expected


def test_tokens_alone_decide_with_a_share_above_one() -> None:
    routing = replace(ROUTING, disaggregate_share=1.1)
    assert where(P1, D1, prompt=50 * BLOCK, routing=routing) == LOCAL
    assert where(P1, D1, prompt=LONG, routing=routing) == APART


def test_blocks_in_the_decode_engines_store_count_as_present() -> None:
    assert where(P1, D1, store("n1"), holds("kvstore-n1", prefix(150))) == LOCAL


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [((599, 0), Placed("p2", "d1")), ((601, 0), LOCAL), ((301, 301), LOCAL), ((299, 299), APART)],
)
def test_a_prefill_pool_with_much_to_do_gets_no_more(waiting: tuple[int, int], expected: Placed) -> None:
    """More than `disaggregate_busy` tokens for each engine, on average."""
    prefills = [pool(f"p{i + 1}", "prefill", prefill_tokens=blocks * BLOCK) for i, blocks in enumerate(waiting)]
    assert where(*prefills, D1) == expected


@pytest.mark.parametrize(
    "prefill",
    [
        pool("p1", "prefill", "draining"),
        pool("p1", "prefill", "starting"),
        pool("p1", "prefill", waiting=64),
        pool("p1", "prefill", node=None),
        pool("p1", "prefill", max_model_len=100),
        pool("p1", "mixed", "draining"),
    ],
    ids=["draining", "starting", "full", "without a store", "context too short", "of another role"],
)
def test_without_a_prefill_engine_that_can_take_it_the_prompt_stays_local(prefill: Lifecycle) -> None:
    assert where(prefill, D1) == LOCAL


def test_nothing_is_handed_to_an_engine_without_a_store() -> None:
    assert where(P1, pool("d1", "decode", node=None)) == LOCAL


def test_mixed_engines_take_hand_overs_too() -> None:
    assert where(P1, M1) == Placed("p1", "m1")
    assert where(P1, M1, pool("d1", "decode", blocks_used=10)) == Placed("p1", "m1")
    assert where(P1, pool("m1", "mixed", blocks_used=10), D1) == Placed("p1", "d1")


def test_without_prefill_engines_decode_and_mixed_ones_serve_alone() -> None:
    assert where(D1) == LOCAL
    assert where(M1) == Placed("m1", None)


def test_each_of_the_two_is_chosen_by_its_own_cost() -> None:
    busy = pool("p1", "prefill", prefill_tokens=50 * BLOCK)
    assert where(busy, P2, pool("d1", "decode", blocks_used=100), D2) == Placed("p2", "d2")
    assert where(busy, P2, D1, holds("p1", prefix(60))) == Placed("p1", "d1"), "what it has cached is worth the wait"


def test_a_decode_engine_of_the_same_node_is_worth_a_quarter_of_the_blocks() -> None:
    far = pool("d1", "decode", node="n2")
    assert where(P1, far, pool("d2", "decode", blocks_used=49)) == Placed("p1", "d2")
    assert where(P1, far, pool("d2", "decode", blocks_used=51)) == Placed("p1", "d1")


def test_prefill_engines_decode_only_where_nothing_else_does() -> None:
    assert where(P1) == Placed("p1", None)
    assert where(P1, pool("d1", "decode", "draining")) == Placed("p1", None)
    assert where(P1, pool("d1", "decode", waiting=64)) == "queued", "who is full is not gone"


def test_engines_that_failed_earlier_attempts_are_avoided_in_both_pools() -> None:
    assert where(P1, P2, D1, D2, avoid=("p1", "d1"), attempt=2) == Placed("p2", "d2")
    assert where(P1, D1, D2, avoid=("p1",), attempt=2) == LOCAL
    assert where(P1, D1, avoid=("d1",), attempt=2) == Placed("p1", None)
    assert where(P1, D1, avoid=("p1", "d1"), attempt=2) == LOCAL


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "random"])
def test_every_policy_chooses_in_both_pools(policy: Policy) -> None:
    placed = where(P1, P2, D1, D2, routing=replace(ROUTING, router_policy=policy))
    assert isinstance(placed, Placed)
    assert placed.on in ("p1", "p2")
    assert placed.decode_on in ("d1", "d2")


def test_a_hand_over_counts_on_both_engines_and_longer_on_the_one_that_gets_it_later() -> None:
    core = Coordinator(InstanceId("coordinator-1"), ROUTING)
    for life in (P1, D1, detokenizer()):
        core.lifecycle(life, at(0))
    asked = route("r", prompt=LONG).generation
    core.route(route("r", prompt=LONG), at(1))
    for life in (P1, D1):
        core.lifecycle(life, at(1.5))
    assert [candidate.reserved.requests for candidate in core.fleet.prefill_candidates(asked)] == [0]
    assert [
        (candidate.reserved.requests, candidate.reserved.blocks) for candidate in core.fleet.decode_candidates(asked)
    ] == [(1, 200)]
    core.lifecycle(D1, at(2.5))
    assert [candidate.reserved.requests for candidate in core.fleet.decode_candidates(asked)] == [0]


def test_a_lost_prefill_engine_loses_its_request_to_another_way() -> None:
    core = Coordinator(InstanceId("coordinator-1"), ROUTING)
    for life in (P1, D1, detokenizer()):
        core.lifecycle(life, at(0))
    (action,) = core.route(route("r", prompt=LONG), at(1))
    assert isinstance(action, PlaceRequest)
    (again,) = core.engine_unreachable(action.generate, at(1))
    assert isinstance(again, PlaceRequest)
    assert Placed(again.engine, again.generate.decode_on) == LOCAL


def test_the_prefill_engine_is_told_the_node_of_the_decode_engine_where_that_is_another_one() -> None:
    for decoding, node in (("n1", None), ("n2", "n2")):
        core = Coordinator(InstanceId("coordinator-1"), ROUTING)
        for life in (detokenizer(), P1, pool("d1", "decode", node=decoding)):
            core.lifecycle(life, at(0))
        (action, *_) = core.route(route("r", 1, prompt=LONG), at(1))
        assert isinstance(action, PlaceRequest)
        assert (action.generate.decode_on, action.generate.decode_node) == ("d1", node)


def test_decode_first_the_decode_engine_gets_the_request_and_the_name_of_a_prefill_engine() -> None:
    core = Coordinator(InstanceId("coordinator-1"), replace(ROUTING, pd_order="decode-first"))
    for life in (detokenizer(), P1, D1):
        core.lifecycle(life, at(0))
    (action, *_) = core.route(route("r", prompt=LONG), at(1))
    assert isinstance(action, PlaceRequest)
    generate = action.generate
    assert (action.engine, generate.decode_on) == ("d1", None)
    assert (generate.prefill_on, generate.remote_from) == ("p1", 100 * BLOCK)
    (short, *_) = core.route(route("s", prompt=10 * BLOCK), at(1))
    assert isinstance(short, PlaceRequest)
    assert (short.engine, short.generate.prefill_on, short.generate.remote_from) == ("d1", None, 0)


def test_decode_first_both_engines_are_counted_so_that_all_get_their_share() -> None:
    core = Coordinator(InstanceId("coordinator-1"), replace(ROUTING, pd_order="decode-first"))
    for life in (detokenizer(), P1, P2, D1, D2):
        core.lifecycle(life, at(0))
    prefilling, decoding = set(), set()
    for number in range(2):
        (action, *_) = core.route(route(f"r{number}", prompt=LONG + number), at(1))
        assert isinstance(action, PlaceRequest)
        decoding.add(action.engine)
        prefilling.add(action.generate.prefill_on)
    assert (prefilling, decoding) == ({"p1", "p2"}, {"d1", "d2"})
