"""Where the `kv` policy sends a request: to its blocks, unless the work there costs more than computing them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.kv_sources import Reuse
from services.coordinator.core.reservations import EXPECT_SECONDS
from shared.ids import InstanceId, ModelName, NodeId
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestFailed
from shared.messages.kv_events import KvEvents
from shared.messages.lifecycle import DetokenizerReport, Lifecycle
from tests.support.engines.coordinator_events import MODEL, at, detokenizer, engine, holds, route, store

BLOCK = 16
PROMPT = 20 * BLOCK + 3


def prefix(blocks: int, seed: int = 0) -> bytes:
    return route("", prompt=PROMPT, seed=seed).generation.block_hashes[: 16 * blocks]


def big(name: str, **fields: object) -> Lifecycle:
    known: dict[str, object] = {
        "max_running": 64,
        "max_waiting": 64,
        "max_model_len": 8192,
        "blocks_total": 1000,
        "blocks_used": 0,
    }
    return engine(name, **{**known, **fields})  # type: ignore[arg-type]


def coordinator(*heard: Lifecycle | KvEvents, routing: CoordinatorConfig | None = None) -> Coordinator:
    core = Coordinator(InstanceId("coordinator-1"), routing or CoordinatorConfig())
    core.lifecycle(detokenizer(), at(0))
    for message in heard:
        if isinstance(message, Lifecycle):
            core.lifecycle(message, at(0))
        else:
            core.blocks_changed(message, at(0))
    return core


def place(
    core: Coordinator, request: str = "r", *, seconds: float = 1.0, seed: int = 0, prompt: int = PROMPT
) -> PlaceRequest:
    (action,) = core.route(route(request, prompt=prompt, seed=seed), at(seconds))
    assert isinstance(action, PlaceRequest)
    return action


def test_a_request_hashed_by_another_block_size_fails_with_both() -> None:
    core = coordinator(big("a"), routing=CoordinatorConfig(block_size=32))
    (action,) = core.route(route("r", prompt=100), at(1))
    assert isinstance(action, NotifyGateway)
    assert isinstance(action.message, RequestFailed)
    assert action.message.reason.startswith("its tokenizer hashed 6 blocks of 100 tokens, where blocks of 32 are 3: ")


def test_a_request_goes_to_the_engine_that_holds_most_of_it() -> None:
    core = coordinator(big("a"), big("b"), big("c"), holds("b", prefix(5)), holds("c", prefix(9)))
    placed = place(core)
    assert placed.engine == "c"
    assert placed.reuse == Reuse(device=9)
    assert placed.blocks == 21
    assert placed.generate.predicted_cached == 9 * BLOCK


def test_the_last_token_is_computed_even_where_all_blocks_are_held() -> None:
    core = coordinator(big("a"), holds("a", prefix(20)))
    assert place(core, prompt=20 * BLOCK).generate.predicted_cached == 19 * BLOCK
    assert place(core, "s", prompt=20 * BLOCK + 1).generate.predicted_cached == 20 * BLOCK


@pytest.mark.parametrize(("used", "chosen"), [(8, "a"), (10, "b")])
def test_blocks_in_use_weigh_as_much_as_blocks_to_compute(used: int, chosen: str) -> None:
    """9 blocks are cached on "a"; they save 9 to compute, and those in use there are not taken again."""
    core = coordinator(big("a", blocks_used=used + 9), big("b"), holds("a", prefix(9)))
    assert place(core).engine == chosen


@pytest.mark.parametrize(("waiting", "chosen"), [(8 * BLOCK, "a"), (10 * BLOCK, "b")])
def test_prompts_that_wait_there_weigh_as_much_as_the_requests_own(waiting: int, chosen: str) -> None:
    core = coordinator(big("a", prefill_tokens=waiting), big("b"), holds("a", prefix(9)))
    assert place(core).engine == chosen


def test_what_was_just_placed_counts_until_a_report_does() -> None:
    core = coordinator(big("a"), big("b"), holds("a", prefix(15)))
    assert [place(core, "r").engine, place(core, "s").engine] == ["a", "a"]
    for other in range(3):
        place(core, f"t{other}", seed=1000 * (1 + other))
    work = core.fleet.decode_candidates(route("u", prompt=PROMPT).generation)
    assert sum(candidate.reserved.prefill for candidate in work) == 6 + 1 + 3 * 21, (
        "the second of equal prompts costs one block"
    )
    core.lifecycle(big("a", blocks_used=30), at(1.5))
    core.lifecycle(big("b", blocks_used=40), at(1.5))
    work = core.fleet.decode_candidates(route("u", prompt=PROMPT).generation)
    assert [candidate.reserved.prefill for candidate in work] == [0, 0]


def test_a_block_in_the_nodes_store_is_worth_three_quarters() -> None:
    stores = [store("n1"), holds("kvstore-n1", prefix(12))]
    near, far = big("a", node="n1"), big("b")
    core = coordinator(near, far, *stores, holds("b", prefix(10)))
    assert place(core).engine == "b", "10 on the device are more than 12 × 0.75"
    core = coordinator(near, far, *stores, holds("b", prefix(8)))
    assert place(core).reuse == Reuse(device=0, stored=12)


def test_the_store_counts_only_beyond_what_the_device_holds() -> None:
    core = coordinator(big("a", node="n1"), store("n1"), holds("a", prefix(5)), holds("kvstore-n1", prefix(9)))
    assert place(core).reuse == Reuse(device=5, stored=4)
    assert place(core, "s", seconds=1.0 + EXPECT_SECONDS).generate.predicted_cached == 9 * BLOCK


def test_the_node_is_named_whose_store_holds_more_than_the_engines_own() -> None:
    stores = [store("n1"), store("n2"), holds("kvstore-n1", prefix(3)), holds("kvstore-n2", prefix(9))]
    core = coordinator(big("a", node="n1"), *stores)
    placed = place(core)
    assert placed.generate.kv_source == NodeId("n2")
    assert placed.reuse == Reuse(stored=3, remote=6, remote_node=NodeId("n2"))
    core = coordinator(big("a", node="n2"), *stores)
    assert place(core).generate.kv_source is None
    core = coordinator(big("a"), *stores)
    assert place(core).reuse == Reuse(), "without a store of its own it takes nothing from others"


def test_a_store_that_is_gone_counts_no_more() -> None:
    core = coordinator(big("a", node="n1"), store("n1"), holds("kvstore-n1", prefix(9)))
    core.lifecycle(store("n1", "stopped"), at(1))
    assert place(core).reuse == Reuse()


def test_an_engine_that_is_gone_takes_its_blocks_with_it() -> None:
    core = coordinator(big("a"), big("b"), holds("a", prefix(9)))
    core.lifecycle(big("a", incarnation=2), at(1))
    assert place(core).reuse == Reuse()


@pytest.mark.parametrize(
    ("loaded", "others", "chosen"),
    [
        ({"running": 6}, {"running": 1}, "a"),
        ({"running": 12}, {"running": 1}, "b"),
        ({"running": 60}, {"running": 40}, "a"),
        ({"running": 64}, {"running": 40}, "b"),
        ({"running": 64}, {"running": 64}, "a"),
    ],
)
def test_a_cache_attracts_only_while_its_engine_is_not_saturated(
    loaded: dict[str, object], others: dict[str, object], chosen: str
) -> None:
    """Beyond twice the mean of requests in hand and a few more, or without a free running slot, unless all are so. It
    has more blocks in use than the others, so that nothing but the cache speaks for it."""
    lives = [big("a", blocks_used=2, **loaded), *(big(name, **others) for name in "bcd")]
    core = coordinator(*lives, holds("a", prefix(9)))
    chosen_engine = place(core).engine
    assert (chosen_engine if chosen_engine == "a" else "b") == chosen


def test_an_engine_to_avoid_does_not_win_by_its_cache() -> None:
    core = coordinator(big("a"), big("b"), holds("a", prefix(20)))
    (action,) = core.route(route("r", prompt=PROMPT, avoid=("a",)), at(1))
    assert isinstance(action, PlaceRequest)
    assert action.engine == "b"


def test_tokens_of_earlier_attempts_count_as_prompt() -> None:
    core = coordinator(big("a"), big("b"), holds("b", prefix(20)))
    resumed = place(core, prompt=PROMPT)
    assert (resumed.engine, resumed.reuse.device) == ("b", 20)


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "random"])
def test_other_policies_do_not_look_at_blocks_but_predict_them(policy: str) -> None:
    core = coordinator(
        big("a", running=1),
        big("b"),
        holds("a", prefix(9)),
        routing=CoordinatorConfig(router_policy=policy),  # type: ignore[arg-type]
    )
    placed = [place(core, f"r{i}") for i in range(12)]
    assert {action.reuse.device for action in placed if action.engine == "a"} <= {9}
    assert {action.reuse.device for action in placed if action.engine == "b"} == {0}


def test_choices_of_one_request_go_to_one_engine() -> None:
    core = coordinator(big("a"), big("b"), big("c"))
    first = place(core, "r-0")
    others = [place(core, f"r-{number}") for number in range(1, 8)]
    assert {other.engine for other in others} == {first.engine}
    assert (first.generate.predicted_cached, others[0].generate.predicted_cached) == (0, 20 * BLOCK)


def test_equal_prompts_that_are_short_are_spread() -> None:
    core = coordinator(big("a"), big("b"))
    engines = [place(core, f"r-{number}", prompt=BLOCK + 2).engine for number in range(8)]
    assert {engines.count("a"), engines.count("b")} == {4}


def test_an_engine_that_has_too_much_in_hand_gets_no_more_choices() -> None:
    core = coordinator(big("a"), big("b"), big("c"), routing=CoordinatorConfig(router_saturation=1.0))
    engines = [place(core, f"r-{number}").engine for number in range(16)]
    assert len(set(engines)) > 1


def test_the_blocks_of_a_prompt_are_expected_for_a_moment_only() -> None:
    core = coordinator(big("a"), big("b"))
    place(core, "r")
    assert place(core, "s", seconds=1.9).generate.predicted_cached == 20 * BLOCK
    assert place(core, "t", seconds=1.9 + EXPECT_SECONDS).generate.predicted_cached == 0


def test_nothing_is_expected_of_another_prompt_or_policy() -> None:
    core = coordinator(big("a"))
    place(core, "r")
    assert place(core, "s", seed=1).generate.predicted_cached == 0
    core = coordinator(big("a"), routing=CoordinatorConfig(router_policy="round-robin"))
    place(core, "r")
    assert place(core, "s").generate.predicted_cached == 0


def uncached(request: str) -> Route:
    return Route(replace(route(request, prompt=PROMPT).generation, prefix_caching=False, block_hashes=b""))


def test_a_request_without_prefix_caching_goes_where_least_is_to_do_and_draws_nobody_after_it() -> None:
    core = coordinator(big("a"), big("b", waiting=2), holds("b", prefix(20)))
    (action,) = core.route(uncached("r"), at(1.0))
    assert isinstance(action, PlaceRequest)
    assert (action.engine, action.generate.predicted_cached) == ("a", 0)
    core = coordinator(big("a"), big("b"))
    placed = [core.route(uncached(name), at(1.0))[0] for name in ("r", "s")]
    assert [(each.engine, each.generate.predicted_cached) for each in placed if isinstance(each, PlaceRequest)] == [
        ("a", 0),
        ("b", 0),
    ]


def test_a_request_without_prefix_caching_is_not_handed_over() -> None:
    engines = big("p", role="prefill", node="n"), big("d", role="decode", node="n")
    core = coordinator(*engines, routing=CoordinatorConfig(disaggregate_tokens=0))
    assert place(core, "q").generate.decode_on == "d"
    (action,) = core.route(uncached("r"), at(1.0))
    assert isinstance(action, PlaceRequest)
    assert (action.engine, action.generate.decode_on) == ("d", None)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_wherever_it_goes() -> None:
    core = coordinator(big("a"), big("b", waiting=2), holds("b", prefix(20)))
    asked = route("r", prompt=PROMPT)
    sampling = replace(asked.generation.sampling, prompt_logprobs=0)
    (action,) = core.route(Route(replace(asked.generation, sampling=sampling)), at(1.0))
    assert isinstance(action, PlaceRequest)
    assert (action.engine, action.generate.predicted_cached) == ("a", 0)
    assert place(core, "s").engine == "b"


def test_a_request_gets_a_detokenizer_of_its_model_or_one_that_does_not_say() -> None:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    other = replace(detokenizer("a-of-another"), detokenizer=DetokenizerReport(model=ModelName("other")))
    core.lifecycle(engine("e"), at(0))
    core.lifecycle(other, at(0))
    assert not [each for each in core.route(route("r"), at(0)) if isinstance(each, PlaceRequest)]
    own = replace(other, instance=InstanceId("b"), detokenizer=DetokenizerReport(model=MODEL))
    (placed,) = core.lifecycle(own, at(0.1))
    assert isinstance(placed, PlaceRequest)
    assert placed.generate.detokenizer == "b"
    core.lifecycle(replace(own, phase="draining"), at(0.2))
    core.lifecycle(detokenizer("of-an-older-release"), at(0.2))
    assert place(core, "s", prompt=32).generate.detokenizer == "of-an-older-release"
