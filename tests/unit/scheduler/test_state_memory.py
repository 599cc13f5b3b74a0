"""Prefixes of models with states: where checkpoints are made, who goes on from them, and who gives his place up."""

from __future__ import annotations

from services.scheduler.core.events import Output
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.sequence import QueueKey, Sequence
from services.scheduler.core.state_memory import StateBlockAllocator
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import Ring, plans

COMMON = list(range(4, 20)) * 2
"""Two blocks."""
LIMITS = EngineLimits(max_batch_tokens=200, max_running=8, run_ahead=0)


def ring(checkpoints: int, limits: EngineLimits = LIMITS) -> Ring:
    return Ring(limits, num_blocks=64, state_checkpoints=checkpoints)


def memory_of(ring: Ring) -> StateBlockAllocator:
    assert ring.engine.epoch_state is not None
    memory = ring.engine.epoch_state.memory
    assert isinstance(memory, StateBlockAllocator)
    return memory


def ask(ring: Ring, name: str, prompt: list[int], **more: object) -> list[StepPlan]:
    """All plans of one request that is computed alone."""
    made: list[StepPlan] = plans(ring.send(generate(name, prompt, **{"max_tokens": 1, **more})))  # type: ignore[arg-type]
    while ring.plans:
        made += plans(list[Output](ring.step()))
    return made


def test_a_prompt_leaves_a_checkpoint_behind_the_last_block_that_others_could_use() -> None:
    one = ring(3)
    first, second, *_ = ask(one, "a", [*COMMON, *range(10)])
    assert [work.count for work in (*first.work, *second.work)] == [32, 10]
    assert ([copy.checkpoint for copy in first.checkpoints], second.checkpoints) == ([2], ())
    (again, *_) = ask(one, "b", [*COMMON, *range(10)])
    assert (again.new[0].computed, [copy.checkpoint for copy in again.restored]) == (32, [2])
    assert [work.count for work in again.work] == [10]


def test_what_two_prompts_have_in_common_has_a_checkpoint_from_the_second_one_on() -> None:
    one, ends = ring(3), [[9] * 20, [8] * 20, [7] * 20]
    computed = []
    for number, end in enumerate(ends):
        made = ask(one, f"r{number}", [*COMMON, *end])
        computed.append((made[0].new[0].computed, [work.count for plan in made for work in plan.work]))
    assert computed == [(0, [48, 4]), (0, [32, 16, 4]), (32, [16, 4])]


def test_of_many_that_come_at_once_the_second_computes_for_all_behind_it() -> None:
    """What the first two have in common is known when the second one's turn comes; the others wait for it, and two of
    them share a block more."""
    one, begun = ring(8), dict[int, int]()
    one.send(generate("first of all", [3] * 40, max_tokens=1))
    for number, third in enumerate((9, 8, 8, 7)):
        one.send(generate(f"r{number}", [*COMMON, *[third] * 16, *[number] * 20], max_tokens=1))
    while one.plans:
        begun |= {new.sequence: new.computed for plan in plans(list[Output](one.step())) for new in plan.new}
    assert [begun[sequence] for sequence in sorted(begun)] == [0, 0, 48, 32]


def test_the_least_recently_used_checkpoint_gives_its_place_up() -> None:
    one, prompts = ring(2), [[number] * 20 for number in (4, 5, 6)]
    for number, prompt in enumerate([prompts[0], prompts[1], prompts[0], prompts[2]]):
        ask(one, f"r{number}", prompt)
    begun = [ask(one, f"again{number}", prompt)[0].new[0].computed for number, prompt in enumerate(prompts)]
    assert begun == [16, 0, 0], "the second prompt's took the third one's place again"


def test_a_request_that_is_to_leave_nothing_leaves_no_checkpoint() -> None:
    one = ring(2)
    assert [work.count for plan in ask(one, "a", [*COMMON, 5], prefix_caching=False) for work in plan.work] == [33]
    assert not memory_of(one).place_of


def test_who_is_preempted_goes_on_from_its_own_checkpoint() -> None:
    """Two grow until only one has room."""
    limits = EngineLimits(max_batch_tokens=64, max_running=2, run_ahead=0)
    one = Ring(limits, num_blocks=8, state_checkpoints=4)
    for name, token in (("a", 4), ("b", 5)):
        one.send(generate(name, [token] * 36, max_tokens=50, ignore_eos=True))
    begun = []
    while one.plans:
        begun += [new.computed for new in one.plans[0].new]
        one.step()
    assert begun[:2] == [0, 0]
    assert begun[2:], "somebody is preempted"
    assert all(computed >= 32 for computed in begun[2:])
    assert memory_of(one).free_blocks == 8


def test_what_a_bad_sequence_leaves_is_forgotten() -> None:
    one = ring(2)
    one.send(generate("a", [*COMMON, 5], max_tokens=30))
    memory, state = memory_of(one), one.engine.epoch_state
    assert state is not None
    assert len(memory.place_of) == 1
    memory.forget_names(next(iter(state.queues.by_id.values())))
    assert (len(memory.place_of), len(memory.free_places)) == (0, 2)


def test_a_checkpoint_stays_until_the_workers_are_told_who_goes_on_from_it() -> None:
    """Its sequence may be given its first work in a later plan than the one that gives it its blocks."""
    memory = StateBlockAllocator(32, BLOCK_SIZE, checkpoints=1)

    def computed(ticket: int, token: int) -> Sequence:
        member = Sequence(generate("r", [token] * 20), QueueKey(0, 0.0, ticket), 100, frozenset(), BLOCK_SIZE)
        memory.adopt(member, memory.cached_blocks(member))
        if not member.tokens.planned:
            memory.grow(member, BLOCK_SIZE)
            member.tokens.set_planned(memory.step_end(member, 20))
            memory.index_full_blocks(member)
        return member

    computed(1, 4)
    (made,) = memory.take_checkpoints()
    adopting = computed(2, 4)
    computed(3, 5)
    assert (adopting.tokens.planned, memory.take_checkpoints()) == (BLOCK_SIZE, ())
    assert [copy.checkpoint for copy in memory.take_restored([adopting])] == [made.checkpoint]
    computed(4, 6)
    assert [copy.checkpoint for copy in memory.take_checkpoints()] == [made.checkpoint]
