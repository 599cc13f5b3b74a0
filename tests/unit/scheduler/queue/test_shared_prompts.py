"""Equal prompts that come together are computed once, and their blocks are in every one's table."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.queue.shared_prompts import MAX_WAITS, SharedPrompts
from services.scheduler.core.sequence import QueueKey, Sequence
from shared.messages.worker import StepPlan
from shared.packing import unpack
from tests.support.engines.checking_worker import card, generate, right_output
from tests.support.engines.single_engine import Ring

LONG = [4 + i % 17 for i in range(100)]


def computed(plans: list[StepPlan]) -> int:
    """Prompt tokens that `plans` compute."""
    return sum(work.count for plan in plans for work in plan.work if work.count > 1 or not work.sample)


class Counting(Ring):
    """Remembers how many tokens of prompts were computed."""

    def __init__(self, limits: EngineLimits | None = None, num_blocks: int = 64) -> None:
        self.tokens = 0
        super().__init__(limits, num_blocks)

    def step(self) -> list:  # type: ignore[type-arg]
        self.tokens += computed(self.plans[:1])
        return super().step()


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("budget", [2048, 40])
@pytest.mark.parametrize("choices", [2, 5])
def test_choices_of_one_request_compute_its_prompt_once(choices: int, budget: int, run_ahead: int) -> None:
    ring = Counting(EngineLimits(run_ahead=run_ahead, max_batch_tokens=budget, max_running=16))
    ring.send(generate("other", [20, 21], max_tokens=4, ignore_eos=True))
    names = [f"a{number}" for number in range(choices)]
    for name in names:
        ring.send(generate(name, LONG, max_tokens=6, ignore_eos=True))
    tables = []
    while ring.plans:
        ring.step()
        tables.append(
            [s.blocks.numbers[:6] for n, s in ring.engine.requests.items() if n != "other" and s.blocks.numbers]
        )
    assert ring.tokens == 2 + 100 + (choices - 1) * 4, "the block that is not full is everybody's own"
    assert any(len(together) == choices and len(set(map(tuple, together))) == 1 for together in tables)
    right = right_output(generate("x", LONG, max_tokens=6, ignore_eos=True), ring.context)[0]
    assert all(ring.output_of(name) == right for name in names)
    assert ring.engine.counters.prompts_shared >= choices - 1


def test_who_shares_only_the_beginning_computes_the_rest_in_the_next_plan() -> None:
    ring = Counting(EngineLimits(run_ahead=0))
    ring.send(generate("first", [20], max_tokens=1))
    ring.send(generate("a", LONG, max_tokens=2, ignore_eos=True))
    ring.send(generate("b", [*LONG[:20], 23], max_tokens=2, ignore_eos=True))
    ring.step()
    assert [(new.computed, len(unpack(new.tokens))) for new in ring.plans[0].new] == [(0, 100)]
    ring.step()
    assert [(new.computed, len(unpack(new.tokens))) for new in ring.plans[0].new] == [(16, 21)]
    ring.finish()
    assert ring.tokens == 100 + 5


def test_with_its_workers_gone_nobody_waits_for_anybody() -> None:
    ring = Counting(EngineLimits(max_batch_tokens=32, max_running=8))
    for name in "ab":
        ring.send(generate(name, LONG, max_tokens=3, ignore_eos=True))
    ring.send(WorkersReady(card(), 64))
    assert not ring.engine.requests


def test_prompts_that_fill_no_block_but_the_last_wait_for_nobody() -> None:
    ring = Counting(EngineLimits(run_ahead=0))
    ring.send(generate("first", [20], max_tokens=1))
    for name in "abc":
        ring.send(generate(name, LONG[:16], max_tokens=3, ignore_eos=True))
    ring.step()
    assert len(ring.plans[0].new) == 3
    assert ring.engine.counters.prompts_shared == 0


def test_other_salts_share_nothing() -> None:
    ring = Counting()
    for salt in ("x", "y"):
        ring.send(generate(salt, LONG, max_tokens=3, ignore_eos=True, cache_salt=salt))
    ring.finish()
    assert (ring.tokens, ring.engine.counters.prompts_shared) == (200, 0)


def test_those_that_wait_let_others_pass() -> None:
    ring = Counting(EngineLimits(run_ahead=0))
    ring.send(generate("first", [20], max_tokens=1))
    for name, prompt in (("a", LONG), ("b", LONG), ("c", [20, 21, 22])):
        ring.send(generate(name, prompt, max_tokens=3, ignore_eos=True))
    ring.step()
    assert [len(unpack(new.tokens)) for new in ring.plans[0].new] == [100, 3]


# ---- who waits for whom


def sequences(*prompts: list[int]) -> list[Sequence]:
    """All of them beside the line."""
    made = []
    for ticket, prompt in enumerate(prompts):
        sequence = Sequence(generate(f"r{ticket}", prompt), QueueKey(0, 0.0, ticket), 999, frozenset(), 16)
        sequence.move("seeking")
        made.append(sequence)
    return made


def test_when_the_one_that_computes_leaves_all_who_wait_for_it_go_on() -> None:
    prompts = SharedPrompts(lambda _owner, _blocks: None)
    a, b, c, d = sequences(LONG, LONG, LONG, LONG)
    prompts.start(a)
    assert [prompts.wait(other, 0) for other in (b, c, d)] == [True, True, True]
    d.move("ended")
    assert (prompts.waiting, prompts.stop(a), prompts.waiting) == (2, [b, c], 0)
    assert not prompts.wait(b, 0), "nobody computes it any more"
    prompts.start(b)
    assert prompts.wait(c, 0)


def test_each_waits_for_what_it_shares_and_no_longer() -> None:
    prompts = SharedPrompts(lambda _owner, _blocks: None)
    a, b, c = sequences(LONG, [*LONG[:32], *[3] * 20], LONG)
    prompts.start(a)
    assert [prompts.wait(other, 0) for other in (b, c)] == [True, True]
    told = []
    for blocks in range(1, 7):
        a.blocks.indexed = blocks
        told.append(prompts.progress(a))
    assert told == [[], [b], [], [], [], [c]]
    assert not prompts.wait(b, 2)


def test_what_is_computed_already_is_waited_for_by_nobody() -> None:
    prompts = SharedPrompts(lambda _owner, _blocks: None)
    a, b = sequences(LONG, LONG)
    prompts.start(a)
    a.blocks.indexed = 2
    assert prompts.progress(a) == []
    assert not prompts.wait(b, 1), "the index should have had the second block: it was lost, and is computed"
    assert prompts.wait(b, 2)


def test_nobody_waits_without_end() -> None:
    prompts = SharedPrompts(lambda _owner, _blocks: None)
    a, b = sequences(LONG, LONG)
    waits = []
    for _ in range(MAX_WAITS + 1):
        prompts.start(a)
        waits.append(prompts.wait(b, 0))
        prompts.stop(a)
    assert waits == [True] * MAX_WAITS + [False]
