"""What the engine asks the KV store, loads from it and saves there, event by event."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import (
    EndProcess,
    Output,
    ReleaseLease,
    SendPlan,
    SendStoreRequest,
    StoreGone,
    StoreReady,
    StoreReplied,
    TimePassed,
    WorkersReady,
)
from services.scheduler.core.limits import EngineLimits, EngineRole
from services.scheduler.core.transfer.saves import (
    MAX_BLOCKS_BESIDE_DECODES,
    MAX_GATHER_SECONDS,
    PROMPT_GATHER_SECONDS,
)
from shared.blocks import hash_chain
from shared.ids import Attempt, Incarnation, NodeId, RequestId
from shared.messages.kvstore import Attach, Commit, Find, FindReply, KvStoreRefusal, Reserve
from shared.messages.scheduler import Cancel, TransferProgress
from shared.messages.worker import StepPlan, Transfer
from shared.packing import pack, unpack
from tests.support.engines.checking_store import LAYOUT, split
from tests.support.engines.checking_worker import card, generate, right_output
from tests.support.engines.engines_and_store import EnginesAndStore, Side

PROMPT = [5 + i % 17 for i in range(37)]
LONG = [5 + i % 18 for i in range(150)]


def saved(prompt: list[int] = PROMPT, **more: object) -> EnginesAndStore:
    """Engine "a" has computed `prompt` and saved it; "b" knows nothing of it."""
    engines = EnginesAndStore("a", "b", **more)  # type: ignore[arg-type]
    engines["a"].send(generate("before", prompt, max_tokens=1))
    engines.settle()
    assert engines.store.committed == len(prompt) // 16
    return engines


def transfers(outputs: list[Output]) -> list[Transfer]:
    return [transfer for output in outputs if isinstance(output, SendPlan) for transfer in output.plan.transfers]


def plans(outputs: list[Output]) -> list[StepPlan]:
    return [output.plan for output in outputs if isinstance(output, SendPlan)]


def asked(outputs: list[Output], kind: type) -> list[object]:
    return [o.request for o in outputs if isinstance(o, SendStoreRequest) and isinstance(o.request, kind)]


def released(outputs: list[Output]) -> list[int]:
    return [output.release.lease for output in outputs if isinstance(output, ReleaseLease)]


def computed(side: Side) -> int:
    return sum(work.count for plan in side.sent_plans for work in plan.work)


def expect_right(engines: EnginesAndStore, name: str, prompt: list[int], **options: object) -> None:
    stream = engines.stream(name)
    assert (stream.tokens, stream.finish) == right_output(generate(name, prompt, **options), 256)  # type: ignore[arg-type]


# ---- finding and loading


@pytest.mark.parametrize(("load_seconds", "cached", "declined"), [(0.001, 32, 0), (1.0, 0, 1)])
def test_what_was_measured_to_be_computed_sooner_is_not_loaded(load_seconds: float, cached: int, declined: int) -> None:
    engines = saved()
    b = engines["b"]
    state = b.engine.epoch_state
    assert state is not None
    state.transfers.costs.record_step(1000, 10.0)
    state.transfers.costs.record_load(1, load_seconds, engines.now)
    b.send(generate("r", PROMPT, max_tokens=3))
    engines.settle()
    expect_right(engines, "r", PROMPT, max_tokens=3)
    assert engines.stream("r").cached_tokens == cached
    assert b.engine.counters.loads_declined == declined
    engines.check_nothing_is_held()


def test_the_store_is_told_what_computing_a_block_takes_and_another_node_is_not_waited_for_longer() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    state = a.engine.epoch_state
    assert state is not None
    state.transfers.costs.record_step(1000, 10.0)  # 0.16 s for a block
    there = replace(generate("r", PROMPT, max_tokens=1), kv_source=NodeId("elsewhere"))
    (question,) = asked(a.send(there), Find)
    assert isinstance(question, Find)
    assert question.block_seconds == pytest.approx(0.16)
    assert question.deadline == pytest.approx(2 * 0.16)


def test_what_another_engine_saved_is_loaded_and_counts_as_cached() -> None:
    engines = saved()
    engines["b"].send(generate("r", PROMPT, max_tokens=3))
    engines.settle()
    expect_right(engines, "r", PROMPT, max_tokens=3)
    assert engines.stream("r").cached_tokens == 32
    assert computed(engines["b"]) == 37 - 32 + 2
    assert engines["b"].engine.counters.blocks_loaded == 2
    report = engines["b"].report
    assert (report.prompt_tokens, report.cached_tokens, report.loaded_tokens) == (37, 32, 32)
    engines.check_nothing_is_held()


def test_what_was_loaded_is_shared_like_what_was_computed_and_not_saved_again() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    engines.settle()
    before = len(b.outputs)
    b.send(generate("again", PROMPT, max_tokens=1))
    engines.settle()
    assert engines.stream("again").cached_tokens == 32
    assert (engines["b"].report.cached_tokens, engines["b"].report.loaded_tokens) == (64, 32)
    assert asked(b.outputs, Reserve) == []
    assert not transfers(b.outputs[before:])


def test_the_store_is_asked_only_for_what_our_own_memory_lacks() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    a.send(generate("r", PROMPT, max_tokens=1))
    engines.settle()
    assert asked(a.send(generate("same", PROMPT, max_tokens=1)), Find) == []
    (question,) = asked(a.send(generate("more", PROMPT[:32] + [6] * 20, max_tokens=1)), Find)
    assert isinstance(question, Find)
    assert split(question.hashes) == hash_chain(pack(PROMPT[:32] + [6] * 20), None, 16)[2:]
    assert asked(a.send(generate("short", [9] * 16, max_tokens=1)), Find) == [], "the last token is always computed"


def test_while_the_store_is_asked_others_go_on_and_newcomers_pass() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1, arrival=1.0))
    assert b.phases == ["seeking"]
    (plan, *_) = plans(b.send(generate("short", [7] * 9, max_tokens=5, arrival=2.0)))
    assert [len(unpack(new.tokens)) for new in plan.new] == [9]


def test_while_blocks_are_loaded_others_are_planned() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("other", [7] * 9, max_tokens=100, ignore_eos=True))
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    for _ in range(5):
        b.step()
    assert sorted(b.phases) == ["decoding", "loading"]
    assert len(engines.stream("other").tokens) == 5
    assert b.copy()
    assert "loading" not in b.phases


def test_a_load_is_a_plan_of_its_own_where_nothing_else_is_to_be_done() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    before = len(b.outputs)
    b.answer()
    (plan,) = plans(b.outputs[before:])
    assert (plan.work, plan.new, [t.kind for t in plan.transfers]) == ((), (), ["load"])
    assert len(unpack(plan.transfers[0].blocks)) == 2


def test_only_when_every_rank_has_copied_the_blocks_are_they_used() -> None:
    engines = saved(ranks=3)
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    b.step()
    for rank in (2, 0):
        assert b.copy(rank)
        assert b.phases == ["loading"]
    assert b.copy(1)
    assert b.phases == ["decoding"]
    engines.settle()
    expect_right(engines, "r", PROMPT, max_tokens=1)


def test_a_report_that_was_lost_is_made_good_by_the_lifecycle() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    b.step()
    assert b.worker.copy(0) is not None, "and nobody hears of it"
    b.report_progress()
    assert b.phases == ["decoding"]
    b.send(TransferProgress(rank=7, epoch=Incarnation(1), done=9))  # no such rank
    engines.settle()
    engines.check_nothing_is_held()


@pytest.mark.parametrize("answer", ["late", "nothing", "not served", "another file"])
def test_without_a_good_answer_the_prompt_is_computed(answer: str) -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=3))
    (ask,) = b.asked
    given = {
        "late": None,
        "nothing": FindReply(arena=engines.store.arena, slots=b"", generations=b""),
        "not served": KvStoreRefusal("unknown layout"),
        "another file": FindReply(arena=engines.store.arena + 1, slots=pack([0]), generations=bytes(8)),  # type: ignore[arg-type]
    }
    b.asked.clear()
    outputs = b.send(StoreReplied(ask.request, given[answer]))
    assert len(plans(outputs)) > 0
    assert len(released(outputs)) == 1, "it may have pinned something all the same"
    assert len(asked(outputs, Attach)) == (answer in ("not served", "another file"))
    engines.settle()
    expect_right(engines, "r", PROMPT, max_tokens=3)
    assert engines.stream("r").cached_tokens == 0
    engines.check_nothing_is_held()


def test_a_load_that_fails_on_one_rank_is_computed_instead() -> None:
    engines = saved(ranks=2)
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=3))
    b.answer()
    b.step()
    assert b.copy(0)
    assert b.copy(1, fails=True)
    engines.settle()
    expect_right(engines, "r", PROMPT, max_tokens=3)
    assert engines.stream("r").cached_tokens == 0
    assert b.engine.counters.loads_failed == 1
    engines.check_nothing_is_held()


def test_one_copy_of_a_block_is_loaded_for_all_who_want_it() -> None:
    engines = saved()
    b = engines["b"]
    for name in ("x", "y", "z"):
        b.send(generate(name, PROMPT, max_tokens=2))
    while b.asked:
        b.answer()
    assert sorted(b.phases) == ["loading", "seeking", "seeking"]
    engines.settle()
    for name in ("x", "y", "z"):
        expect_right(engines, name, PROMPT, max_tokens=2)
        assert engines.stream(name).cached_tokens == 32
    assert b.engine.counters.blocks_loaded == 2
    engines.check_nothing_is_held()


def test_where_the_load_of_another_fails_the_next_one_tries_itself() -> None:
    engines = saved()
    b = engines["b"]
    for name in ("x", "y"):
        b.send(generate(name, PROMPT, max_tokens=2))
    while b.asked:
        b.answer()
    b.step()
    b.copy(fails=True)
    engines.settle()
    assert [engines.stream(name).cached_tokens for name in ("x", "y")] == [0, 32]
    engines.check_nothing_is_held()


def test_what_was_found_is_looked_up_again_where_its_turn_comes_too_late() -> None:
    engines = saved(limits=EngineLimits(max_running=1, plan_late=False), lease_seconds=10.0)
    b = engines["b"]
    b.send(generate("first", [7] * 9, max_tokens=40, ignore_eos=True))
    b.send(generate("r", PROMPT, max_tokens=2))
    b.answer()
    engines.now += 7.0
    engines.settle()
    assert len(asked(b.outputs, Find)) == 2
    assert engines.stream("r").cached_tokens == 32
    engines.check_nothing_is_held()


def test_an_engine_with_a_full_line_counts_those_that_are_looked_up() -> None:
    engines = saved(limits=EngineLimits(max_running=1, max_waiting=2, plan_late=False))
    b = engines["b"]
    for name in ("w", "x", "y", "z"):
        b.send(generate(name, PROMPT, max_tokens=2))
    assert b.phases == ["seeking", "seeking", "seeking"], "one for the place in the batch, and two that wait"
    assert engines.told[-1].request == "z"


@pytest.mark.parametrize("phase", ["seeking", "waiting", "loading", "prefilling", "decoding"])
def test_a_cancel_in_any_phase_frees_all(phase: str) -> None:
    engines = saved(limits=EngineLimits(max_running=1, max_batch_tokens=1, plan_late=False))
    b = engines["b"]
    if phase == "waiting":
        b.send(generate("busy", [7] * 3, max_tokens=30, ignore_eos=True))
    b.send(generate("r", PROMPT, max_tokens=10, ignore_eos=True))
    sequence = b.engine.requests[RequestId("r")]
    engines.until(lambda: sequence.phase == phase)
    b.send(Cancel(RequestId("r"), Attempt(1)))
    engines.settle()
    engines.check_nothing_is_held()


def test_a_cancelled_load_keeps_its_blocks_until_the_ranks_are_done_and_then_shares_them() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    outputs = b.send(Cancel(RequestId("r"), Attempt(1)))
    assert b.free == 30
    assert released(outputs) == [], "the ranks are still reading"
    engines.settle()
    engines.check_nothing_is_held()
    b.send(generate("next", PROMPT, max_tokens=1))
    engines.settle()
    assert engines.stream("next").cached_tokens == 32
    assert b.engine.counters.blocks_loaded == 2, "once"


def test_a_new_epoch_gives_back_what_was_found_and_leaves_alone_what_may_still_be_written() -> None:
    engines = saved()
    b = engines["b"]
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    b.new_workers()
    engines.settle()
    engines.check_nothing_is_held()
    b.send(generate("writes", LONG, max_tokens=1))
    engines.until(lambda: b.engine.epoch_state is not None and b.engine.epoch_state.transfers.saves.copying)
    b.new_workers()
    engines.settle()
    assert not b.engine.store.held
    assert engines.store.reserved, "until it runs out: a rank may be writing there"


# ---- saving


def test_blocks_are_saved_once_they_are_computed_and_held_until_they_are_copied() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    a.send(generate("r", PROMPT, max_tokens=1))
    a.answer()  # nothing is found
    a.step()
    (reserve,) = asked(a.outputs, Reserve)
    assert isinstance(reserve, Reserve)
    assert split(reserve.hashes) == hash_chain(pack(PROMPT), None, 16)
    assert split(reserve.parents) == [bytes(16), split(reserve.hashes)[0]]
    assert reserve.tokens == bytes([16, 16])
    a.answer()
    assert [t.kind for plan in a.plans for t in plan.transfers] == ["save"]
    assert a.free == 30
    a.step()
    a.copy()
    assert a.free == 32
    assert len(asked(a.outputs, Commit)) == 1
    engines.settle()
    assert engines.store.committed == 2
    assert a.engine.counters.blocks_saved == 2


def test_output_is_saved_too() -> None:
    engines = EnginesAndStore("a", "b")
    engines["a"].send(generate("r", PROMPT, max_tokens=30, ignore_eos=True))
    engines.settle()
    tokens = engines.stream("r").tokens
    engines["b"].send(generate("turn", PROMPT + tokens + [5, 6], max_tokens=1))
    engines.settle()
    assert engines.stream("turn").cached_tokens == 64


def test_blocks_that_are_there_already_are_not_copied_again() -> None:
    engines = saved()
    engines.store.evict(1)
    engines["b"].send(generate("r", PROMPT, max_tokens=1))
    engines["b"].answer(lost=True)
    engines.settle()
    (transfer,) = transfers(engines["b"].outputs)
    assert (transfer.kind, len(unpack(transfer.blocks))) == ("save", 1)
    assert engines.store.committed == 2
    engines.check_nothing_is_held()


def test_saving_gives_way_to_decoding() -> None:
    engines = EnginesAndStore("a", blocks=400, slots=200, limits=EngineLimits(plan_late=False, max_batch_tokens=4096))
    a = engines["a"]
    a.send(generate("decodes", [7] * 5, max_tokens=200, ignore_eos=True))
    for i in range(10):
        a.send(generate(f"r{i}", [4 + i, *LONG[: 16 * 8]], max_tokens=1))
    engines.until(lambda: engines.store.committed >= 80)
    for plan in a.sent_plans:
        blocks = sum(len(unpack(transfer.blocks)) for transfer in plan.transfers)
        if any(work.count == 1 for work in plan.work):
            assert blocks <= MAX_BLOCKS_BESIDE_DECODES
    assert max(sum(len(unpack(t.blocks)) for t in plan.transfers) for plan in a.sent_plans) > 1


def test_no_more_than_a_quarter_of_memory_is_on_its_way_to_the_store() -> None:
    engines = EnginesAndStore("a", blocks=16, slots=100)
    a = engines["a"]
    for i in range(3):
        a.send(generate(f"r{i}", [4 + i, *LONG[:70]], max_tokens=1))
        for _ in range(10):
            a.step()
            if a.asked and isinstance(a.asked[0].request, Find):
                a.answer()
    questions = [q for q in asked(a.outputs, Reserve) if isinstance(q, Reserve)]
    assert sum(len(question.tokens) for question in questions) == 4
    engines.settle()
    engines.check_nothing_is_held()


def test_blocks_that_are_taken_before_they_are_copied_are_not_saved() -> None:
    engines = EnginesAndStore("a", blocks=8, slots=100)
    a = engines["a"]
    a.send(generate("r", PROMPT, max_tokens=1))
    a.answer()
    a.step()
    assert isinstance(a.asked[0].request, Reserve)
    a.send(generate("big", LONG[20:140], max_tokens=1))
    engines.until(lambda: not a.asked or not isinstance(a.asked[-1].request, Find))
    engines.settle()
    engines.check_nothing_is_held()
    engines["a"].new_workers()
    a.send(generate("again", PROMPT, max_tokens=1))
    engines.settle()
    expect_right(engines, "again", PROMPT, max_tokens=1)


@pytest.mark.parametrize("kind", [Reserve, Commit])
def test_a_save_that_is_not_answered_holds_nothing(kind: type) -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    a.send(generate("r", PROMPT, max_tokens=1))
    while not isinstance(a.asked[0].request if a.asked else None, kind):
        assert a.answer() or a.step() or a.copy()
    a.answer(lost=True)
    engines.settle()
    engines.check_nothing_is_held()


# ---- the store's life


def test_a_store_is_attached_when_it_and_the_workers_are_there_in_any_order() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    assert a.engine.store.attached
    a.send(StoreGone())
    assert not a.engine.store.attached
    (attach,) = asked(a.send(StoreReady(Incarnation(2))), Attach)
    assert attach == Attach(LAYOUT, card().name)
    assert asked(a.send(StoreReady(Incarnation(2))), Attach) == [], "it is asked already"
    assert len(asked(a.send(StoreReady(Incarnation(3))), Attach)) == 1, "whom we asked is no more"


def test_a_store_that_does_not_serve_us_is_asked_again_after_a_while() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    engines.store.serves = False
    a.send(StoreReady(Incarnation(2)))
    a.answer()
    assert asked(a.send(TimePassed()), Attach) == []
    engines.now += 2.0
    assert len(asked(a.send(TimePassed()), Attach)) == 1


def test_workers_that_cannot_share_their_blocks_need_no_store() -> None:
    engines = EnginesAndStore("a")
    a = engines["a"]
    a.send(WorkersReady(card(), 32, world_size=1, layout=None))
    assert not a.engine.store.attached
    outputs = a.send(generate("r", PROMPT, max_tokens=1))
    assert asked(outputs, Find) == []


def test_a_restarted_store_knows_no_lease_and_the_engine_none_either() -> None:
    for turns in range(10):
        engines = saved()
        b = engines["b"]
        b.send(generate("r", PROMPT, max_tokens=3))
        b.send(generate("s", LONG, max_tokens=3))
        for _ in range(turns):
            engines.turn()
        engines.store.restart(other_file=False)
        for side in engines.sides.values():
            side.send(StoreReady(engines.store.incarnation))
        engines.settle()
        expect_right(engines, "r", PROMPT, max_tokens=3)
        expect_right(engines, "s", LONG, max_tokens=3)
        engines.check_nothing_is_held()


def test_copying_that_never_ends_ends_the_engine_though_steps_go_on() -> None:
    engines = saved(limits=EngineLimits(step_timeout=1.0, plan_late=False))
    b = engines["b"]
    b.send(generate("other", [7] * 9, max_tokens=200, ignore_eos=True))
    b.send(generate("r", PROMPT, max_tokens=1))
    b.answer()
    for _ in range(3):
        b.step()
    engines.now += 0.9
    b.step()
    assert b.send(TimePassed()) == []
    engines.now += 0.2
    outputs = b.engine.handle(TimePassed(), engines.now)
    assert [o for o in outputs if isinstance(o, EndProcess)] == [
        EndProcess("copying blocks from or to the KV store took longer than 1 s")
    ]


def test_a_node_is_used_in_an_owners_name() -> None:
    with pytest.raises(ValueError, match="an owner's name"):
        EngineRole("mixed", NodeId("n"))


# ---- preempted sequences are swapped


def crowded(*, slots: int = 64, load_seconds: float | None = None) -> Side:
    """An engine of little memory, in which four requests take blocks from each other; all end as they would alone."""
    engines = EnginesAndStore("a", blocks=12, slots=slots)
    a = engines["a"]
    state = a.engine.epoch_state
    assert state is not None
    if load_seconds is not None:
        state.transfers.costs.record_step(1000, 10.0)  # 0.16 s for a block
    wanted = {f"r{i}": [5 + i] * 20 for i in range(4)}
    for name, prompt in wanted.items():
        a.send(generate(name, prompt, max_tokens=60, ignore_eos=True))
    for _ in range(10_000):
        if load_seconds is not None:
            state.transfers.costs.record_load(1, load_seconds, engines.now)
        if not engines.turn():
            break
    assert state.planner.preemption.count > 0
    for name, prompt in wanted.items():
        expect_right(engines, name, prompt, max_tokens=60, ignore_eos=True)
    engines.check_nothing_is_held()
    return a


def test_a_preempted_sequence_loads_what_it_had_computed() -> None:
    a = crowded()
    counters = a.engine.counters
    assert counters.swapped_in > 0
    assert counters.blocks_loaded > 0
    without = crowded(slots=1)
    assert computed(a) < computed(without), "what is loaded is not computed again"


def test_a_preempted_sequence_is_computed_where_that_is_sooner() -> None:
    counters = crowded(load_seconds=1.0).engine.counters
    assert (counters.swapped_in, counters.blocks_loaded) == (0, 0)
    assert counters.recomputed > 0
    assert counters.loads_declined > 0
    assert crowded(load_seconds=0.001).engine.counters.swapped_in > 0


def test_what_is_not_saved_yet_is_saved_at_once_and_overwritten_last() -> None:
    engines = EnginesAndStore("a", blocks=12)
    a = engines["a"]
    a.send(generate("r", PROMPT[:20], max_tokens=100, ignore_eos=True))
    engines.until(lambda: engines.store.committed)
    (sequence,) = a.engine.requests.values()
    state = a.engine.epoch_state
    assert state is not None
    known = len(sequence.tokens.hashes)
    while len(sequence.tokens.hashes) == known:  # another block is full, and waits for more to be saved with
        a.step()
    newest, before = sequence.tokens.hashes[-1], len(a.outputs)
    state.planner.preemption._preempt(sequence)
    engines.settle()
    reserves = asked(a.outputs[before:], Reserve)
    assert isinstance(reserves[0], Reserve)
    assert split(reserves[0].hashes)[-1] == newest, "before it is gathered with others"
    expect_right(engines, "r", PROMPT[:20], max_tokens=100, ignore_eos=True)


def test_blocks_of_answers_wait_longer_for_others_than_those_of_prompts() -> None:
    engines = EnginesAndStore("a", blocks=64)
    a, asked_at = engines["a"], list[float]()
    begun = engines.now
    a.send(generate("r", PROMPT[:20], max_tokens=230, ignore_eos=True))
    while a.engine.requests:
        before = len(a.outputs)
        engines.now += 0.01
        engines.turn()
        asked_at += [engines.now] * len(asked(a.outputs[before:], Reserve))
    assert PROMPT_GATHER_SECONDS <= asked_at[0] - begun < MAX_GATHER_SECONDS
    waits = [after - before for before, after in pairwise(asked_at[:-1])]  # what is left at the end waits for nothing
    assert len(waits) > 1
    assert min(waits) >= MAX_GATHER_SECONDS
