"""Groups of layers and a KV store: which group's blocks are saved, found, loaded and handed over."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import SendPrefetch, SendStoreRequest
from services.scheduler.core.hybrid_memory import name_in
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.memory import NO_PARENT
from services.scheduler.core.transfer.hand_over import partial_hash
from shared.blocks import BlockHash, hash_chain, split_hashes
from shared.ids import Attempt, EngineId, NodeId, RequestId
from shared.kv_groups import KvCacheGroup
from shared.messages.kvstore import Find, Reserve
from shared.messages.scheduler import GenerateRequest
from shared.messages.worker import Transfer
from shared.packing import pack, unpack
from tests.support.engines.checking_worker import generate
from tests.support.engines.engines_and_store import EnginesAndStore
from tests.support.engines.loads import assert_failed_load_leaves_cached, computed, expect_right

P, D = EngineId("p"), EngineId("d")
PROMPT = [5 + i % 17 for i in range(200)]
"""12 full blocks, and half of one."""
WINDOW = KvCacheGroup(layers=2, window=20)
GROUPS = (KvCacheGroup(layers=2), WINDOW, WINDOW)
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=32, max_running=4)


def engines_of_groups(*names: str, blocks: int = 100, slots: int = 120) -> EnginesAndStore:
    return EnginesAndStore(*(names or ("p", "d")), limits=LIMITS, blocks=blocks, slots=slots, groups=GROUPS)


def request(prompt: list[int], name: str = "r", **more: object) -> GenerateRequest:
    return generate(name, prompt, max_tokens=20, ignore_eos=True, **more)  # type: ignore[arg-type]


def copied(engines: EnginesAndStore, name: str, kind: str) -> int:
    """Records of the store that the engine's plans copy."""
    return sum(len(unpack(each.blocks)) for each in transfers(engines, name) if each.kind == kind)


def transfers(engines: EnginesAndStore, name: str) -> list[Transfer]:
    return [transfer for plan in engines[name].sent_plans for transfer in plan.transfers]


def names_of(prompt: list[int], group: int = 0) -> list[BlockHash]:
    return [name_in(group, name) for name in hash_chain(pack(prompt), None, 16)]


@pytest.mark.parametrize("length", [1, 16, 17, 20, 37, 48, 100, 200])
def test_the_decode_engine_loads_what_each_group_still_sees(length: int) -> None:
    """A token behind the prompt sees 19 of it by a window: two blocks, or those that there are."""
    engines, asked = engines_of_groups(), request(PROMPT[:length], decode_on=D)
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert computed(engines, "d") == 19, "what was drawn, and nothing of the prompt"
    seen = -(-length // 16) - max(0, length - 19) // 16
    assert copied(engines, "d", "load") == -(-length // 16) + 2 * seen
    partial = partial_hash(RequestId("r"), Attempt(1))
    assert not any(engines.store.place_of(name_in(group, partial)) for group in range(3)), "of use to nobody any more"
    engines.check_nothing_is_held()


def test_windows_that_were_overwritten_before_they_were_saved_are_not_missed() -> None:
    """There is room for the request alone, and the store replies when all of it is computed: 14 blocks, and for each
    window the 5 that it spans together with a step."""
    engines, asked = engines_of_groups(blocks=1 + 14 + 5 * 2), request(PROMPT, decode_on=D)
    engines["p"].send(asked)
    engines["p"].answer()
    while engines["p"].step():
        pass
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert copied(engines, "p", "save") < 13 * 3, "some were gone"
    assert engines["p"].engine.counters.blocks_unsaved > 0
    engines.check_nothing_is_held()


def test_a_block_that_sees_everything_is_missed() -> None:
    """Its name is lost before it is saved: the request is decoded where it is."""
    engines, asked = engines_of_groups(), request(PROMPT, decode_on=D)
    engines["p"].send(asked)
    engines["p"].answer()
    state = engines["p"].engine.epoch_state
    assert state is not None
    state.memory.index.remove(state.memory.index.block_of[names_of(PROMPT)[1]])
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P


def test_a_beginning_that_others_computed_is_looked_up_where_it_ends() -> None:
    """First for as much as could be there; then for what was found, as windows before that begin elsewhere."""
    engines, first, second = engines_of_groups(), request(PROMPT, "a"), request(PROMPT[:100] + [9] * 60, "b")
    engines["p"].send(first)
    engines.settle()
    engines["d"].send(second)
    engines.settle()
    expect_right(engines, second)
    lookups = [each.request for each in engines["d"].outputs if isinstance(each, SendStoreRequest)]
    asked = [len(list(split_hashes(each.hashes))) for each in lookups if isinstance(each, Find)]
    assert asked == [9 + 2 * 2, 6 + 2 * 2]
    assert computed(engines, "d") == 160 - 96 + 19
    engines.check_nothing_is_held()


def test_a_beginning_whose_window_is_gone_counts_up_to_there() -> None:
    engines, asked = engines_of_groups(), request(PROMPT, "b")
    engines["p"].send(request(PROMPT, "a"))
    engines.settle()
    gone = engines.store.place_of(names_of(PROMPT, 2)[11])
    assert gone is not None
    engines.store.evict(gone)
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") == 200 - 11 * 16 + 19


def test_a_load_that_fails_leaves_what_was_cached() -> None:
    """D has the first 96 tokens, and windows at their end: these are there again for who computes from there on."""
    engines, asked = engines_of_groups(), request(PROMPT, "b")
    assert_failed_load_leaves_cached(engines, request(PROMPT, "a"), request(PROMPT[:97], "c"), asked)


def test_windows_have_no_parents() -> None:
    """So the store forgets those of the middle of a prompt, which nobody uses, before the end."""
    engines = engines_of_groups("p")
    engines["p"].send(request(PROMPT[:48]))
    engines.settle()
    reserved = [each.request for each in engines["p"].outputs if isinstance(each, SendStoreRequest)]
    parents: dict[bytes, bytes] = {}
    for each in reserved:
        if isinstance(each, Reserve):
            parents.update(zip(split_hashes(each.hashes), split_hashes(each.parents), strict=True))
    whole, windows = names_of(PROMPT[:48]), names_of(PROMPT[:48], 1)
    assert [parents[name] for name in whole] == [NO_PARENT, *whole[:2]]
    assert [parents[name] for name in windows] == [NO_PARENT] * 3


def test_another_nodes_store_is_told_of_what_will_be_loaded() -> None:
    engines = engines_of_groups()
    engines["p"].send(decoded_elsewhere(request(PROMPT, decode_on=D)))
    engines["p"].answer()
    [ahead] = [each for each in engines["p"].outputs if isinstance(each, SendPrefetch)]
    partial = partial_hash(RequestId("r"), Attempt(1))
    last = [name_in(group, name) for name in (names_of(PROMPT)[11], partial) for group in range(3)]
    assert list(split_hashes(ahead.prefetch.hashes)) == [*names_of(PROMPT)[:11], *last]
    engines.settle()


def decoded_elsewhere(asked: GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        asked.generation, asked.detokenizer, decode_on=asked.decode_on, decode_node=NodeId("another")
    )
