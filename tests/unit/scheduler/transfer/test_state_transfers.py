"""Checkpoints of states and a KV store: which are saved, looked up, loaded, and handed over."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import SendPrefetch, SendStoreRequest
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.state_memory import page_name
from services.scheduler.core.transfer.hand_over import partial_hash
from shared.blocks import BlockHash, hash_chain
from shared.ids import Attempt, EngineId, NodeId, RequestId
from shared.kv_groups import StateRecords
from shared.messages.kvstore import Find, FindAny
from shared.messages.scheduler import GenerateRequest
from shared.packing import pack, unpack
from tests.support.engines.checking_worker import generate
from tests.support.engines.engines_and_store import EnginesAndStore
from tests.support.engines.loads import assert_failed_load_leaves_cached, computed, expect_right

P, D = EngineId("p"), EngineId("d")
PROMPT = [5 + i % 17 for i in range(200)]
"""12 full blocks, and half of one."""
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=32, max_running=4)
PAGES = 3
KINDS = [StateRecords(pages=PAGES), StateRecords(pages=PAGES, alone=True)]


def engines_with_states(records: StateRecords, *, checkpoints: int = 8, slots: int = 120) -> EnginesAndStore:
    return EnginesAndStore("p", "d", limits=LIMITS, blocks=40, slots=slots, checkpoints=checkpoints, records=records)


def request(prompt: list[int], name: str = "r", **more: object) -> GenerateRequest:
    return generate(name, prompt, max_tokens=20, ignore_eos=True, **more)  # type: ignore[arg-type]


def loaded(engines: EnginesAndStore, name: str) -> int:
    """Records of the store that the engine's plans load."""
    transfers = [each for plan in engines[name].sent_plans for each in plan.transfers]
    return sum(len(unpack(each.blocks)) for each in transfers if each.kind == "load")


def names_of(prompt: list[int]) -> list[BlockHash]:
    return list(hash_chain(pack(prompt), None, 16))


def lookups(engines: EnginesAndStore, name: str) -> list[tuple[str, int]]:
    """What the engine has asked the store for, and how many records."""
    asked = [each.request for each in engines[name].outputs if isinstance(each, SendStoreRequest)]
    return [(type(each).__name__, len(each.hashes) // 16) for each in asked if isinstance(each, Find | FindAny)]


@pytest.mark.parametrize("records", KINDS)
@pytest.mark.parametrize("length", [1, 16, 17, 37, 48, 100, 200])
def test_the_decode_engine_goes_on_from_the_states_behind_the_whole_prompt(length: int, records: StateRecords) -> None:
    engines, asked = engines_with_states(records), request(PROMPT[:length], decode_on=D)
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert computed(engines, "d") == 19, "what was drawn, and nothing of the prompt"
    blocks = 0 if records.alone else -(-length // 16)
    assert loaded(engines, "d") == blocks + PAGES
    partial = partial_hash(RequestId("r"), Attempt(1))
    of_nobody = [partial, *(page_name(page, partial) for page in range(PAGES))]
    assert not any(map(engines.store.place_of, of_nobody)), "of use to nobody any more"
    engines.check_nothing_is_held()


@pytest.mark.parametrize("records", KINDS)
def test_what_others_have_in_common_is_gone_on_from_where_a_checkpoint_is(records: StateRecords) -> None:
    """The first prompt leaves one behind its last block, the second where both part; the other engine's request finds
    the latter. The store is asked where it could go on, and then for that."""
    engines = engines_with_states(records)
    for name, end in (("a", [1] * 30), ("b", [2] * 30)):
        engines["p"].send(request([*PROMPT[:96], *end], name))
        engines.settle()
    asked = request([*PROMPT[:96], *[3] * 50], "c")
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") == 50 + 19
    found = PAGES if records.alone else 6 + PAGES
    assert lookups(engines, "d") == [("FindAny", 9), ("Find", found)]
    assert loaded(engines, "d") == found
    engines.check_nothing_is_held()


@pytest.mark.parametrize("records", KINDS)
def test_who_has_nothing_in_common_is_computed(records: StateRecords) -> None:
    engines, asked = engines_with_states(records), request([9] * 100, "b")
    engines["p"].send(request(PROMPT, "a"))
    engines.settle()
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") == 100 + 19
    engines.check_nothing_is_held()


@pytest.mark.parametrize(
    "gone", [*(page_name(page, names_of(PROMPT)[11]) for page in (1, PAGES - 1)), names_of(PROMPT)[3]]
)
def test_a_record_that_is_gone_is_a_miss(gone: BlockHash) -> None:
    """Of the only checkpoint a page, or of the blocks before it one. What is there is not taken for a checkpoint behind
    a block less, though as many records as that needs are."""
    engines, asked = engines_with_states(KINDS[0]), request(PROMPT, "b")
    engines["p"].send(request(PROMPT, "a"))
    engines.settle()
    place = engines.store.place_of(gone)
    assert place is not None
    engines.store.evict(place)
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") == 200 + 19
    engines.check_nothing_is_held()


def test_a_load_that_fails_leaves_what_was_cached() -> None:
    """D has the states behind the first 96 tokens."""
    engines, asked = engines_with_states(KINDS[0]), request(PROMPT, "b")
    assert_failed_load_leaves_cached(engines, request(PROMPT, "a"), request(PROMPT[:97], "c"), asked)


def test_without_a_place_for_its_last_states_a_request_stays_where_it_is() -> None:
    engines, asked = engines_with_states(KINDS[0], checkpoints=0), request(PROMPT, decode_on=D)
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    engines.check_nothing_is_held()


def test_a_place_is_not_written_to_while_it_is_saved() -> None:
    """There is one place: the next prompt's checkpoint waits for nobody, and is not made."""
    engines = engines_with_states(KINDS[0], checkpoints=1)
    side = engines["p"]
    side.send(request(PROMPT[:40], "a"))
    engines.until(lambda: any(each.kind == "save" for plan in side.sent_plans for each in plan.transfers))
    side.send(request([9] * 40, "b"))
    for _ in range(40):
        side.step()
        side.answer()
    assert sum(len(plan.checkpoints) for plan in side.sent_plans) == 1
    engines.settle()
    assert engines.store.place_of(page_name(PAGES - 1, names_of(PROMPT[:40])[1])) is not None
    engines.check_nothing_is_held()


def test_another_node_is_told_of_the_pages() -> None:
    engines = engines_with_states(KINDS[0])
    asked = request(PROMPT[:40], decode_on=D)
    asked = GenerateRequest(asked.generation, asked.detokenizer, D, decode_node=NodeId("node-2"))
    outputs = engines["p"].send(asked)
    while engines["p"].answer():
        pass
    told = [each for each in engines["p"].outputs + outputs if isinstance(each, SendPrefetch)]
    partial = partial_hash(RequestId("r"), Attempt(1))
    expected = [*names_of(PROMPT[:40]), partial, *(page_name(page, partial) for page in range(PAGES))]
    assert told[0].prefetch.hashes == b"".join(expected)
