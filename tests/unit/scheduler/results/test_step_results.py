"""Steps that yield several tokens: what is reserved, given back and dropped."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.results.step_results import WrongYield
from services.scheduler.core.sequence import Sequence
from shared.ids import Attempt, RequestId
from shared.messages.generation import TokenLogprobs
from shared.messages.scheduler import Cancel, SampledTokens, StepFinished
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import EOS, TIMING, HonestWorker, card, continuation, generate, right_output
from tests.support.engines.single_engine import PROMPT, Ring

ALL, NONE = (lambda most: most), (lambda most: 0)


class DraftingRing(Ring):
    """An engine whose worker drafts up to `most` tokens, of which `accepts` says how many are right."""

    def __init__(self, most: int, accepts: object, *, run_ahead: int = 1, num_blocks: int = 32) -> None:
        limits = EngineLimits(run_ahead=run_ahead, speculation="fixed")
        super().__init__(limits, num_blocks)
        self.worker = HonestWorker(num_blocks, accepts=accepts)  # type: ignore[arg-type]
        self.send(WorkersReady(card(256), num_blocks, max_speculate=most))
        self.plans.clear()

    def only(self) -> Sequence:
        (sequence,) = self.engine.requests.values()
        return sequence


def spoken(plan: StepPlan, tokens: list[int]) -> StepFinished:
    """The result of a plan of one work."""
    (work,) = plan.work
    sampled = SampledTokens(work.sequence, tuple(tokens), drafted=work.speculate)
    return StepFinished(epoch=plan.epoch, step=plan.step, sampled=(sampled,), timing=TIMING)


def test_a_plan_reserves_the_most_that_its_step_can_yield() -> None:
    ring = DraftingRing(5, ALL, run_ahead=2)
    ring.send(generate("a", PROMPT, ignore_eos=True))
    assert [(w.count, w.speculate, w.sample) for p in ring.plans for w in p.work] == [
        (20, 0, True),
        (1, 5, True),
        (1, 5, True),
    ]
    sequence = ring.only()
    assert (sequence.tokens.planned, sequence.tokens.length, len(sequence.blocks.numbers)) == (32, 33, 2)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_what_was_not_yielded_is_planned_again_in_the_same_blocks(run_ahead: int) -> None:
    ring = DraftingRing(5, NONE, run_ahead=run_ahead)
    ring.send(generate("a", PROMPT, max_tokens=24, ignore_eos=True))
    most = 0
    while ring.plans:
        most = max(most, len(ring.only().blocks.numbers))
        ring.step()
    assert ring.output_of("a") == right_output(generate("a", PROMPT, max_tokens=24, ignore_eos=True), 256)[0]
    assert (most, ring.free) == (3, 32), "44 tokens fit three blocks"


def test_nothing_is_drafted_beyond_the_limit_even_if_all_that_is_in_flight_is_accepted() -> None:
    ring = DraftingRing(5, ALL, run_ahead=2)
    ring.send(generate("a", PROMPT, max_tokens=9, ignore_eos=True))
    assert [w.speculate for p in ring.plans for w in p.work] == [0, 5, 1]
    ring.finish()
    assert [len(e.tokens) for e in ring.entries] == [1, 6, 2]
    assert (ring.entries[-1].finish, ring.free) == ("length", 32)


def test_when_less_came_than_was_reserved_planning_goes_on_up_to_the_limit() -> None:
    ring = DraftingRing(5, NONE, run_ahead=2)
    ring.send(generate("a", PROMPT, max_tokens=9, ignore_eos=True))
    ring.finish()
    assert len(ring.output_of("a")) == 9
    assert ring.free == 32


@pytest.mark.parametrize("place", [0, 1, 3])
def test_tokens_behind_a_stop_reach_nobody(place: int) -> None:
    ring = DraftingRing(3, ALL)
    ring.send(generate("a", PROMPT, stop_token_ids=(9,)))
    ring.send(spoken(ring.plans.pop(0), [5]))
    tokens = [4, 5, 6, 7]
    tokens[place] = 9
    ring.send(spoken(ring.plans.pop(0), tokens))
    assert ring.output_of("a") == [5, *tokens[: place + 1]]
    assert [e.finish for e in ring.entries] == [None, "stop"]
    assert ring.entries[-1].stop_token == 9
    for plan in ring.plans:
        ring.send(spoken(plan, [4]))
    assert ring.output_of("a") == [5, *tokens[: place + 1]]
    assert (ring.engine.idle, ring.free, ring.engine.counters.output_tokens) == (True, 32, place + 2)


def test_a_stop_within_a_step_before_the_least_length_is_none() -> None:
    ring = DraftingRing(3, ALL)
    ring.send(generate("a", PROMPT, min_tokens=3))
    ring.send(spoken(ring.plans.pop(0), [5]))
    ring.send(spoken(ring.plans.pop(0), [EOS, 6, EOS, 7]))
    assert ring.output_of("a") == [5, EOS, 6, EOS]
    assert ring.entries[-1].finish == "stop"


def test_log_probabilities_behind_a_stop_are_dropped_with_their_tokens() -> None:
    ring = DraftingRing(3, ALL)
    ring.send(generate("a", PROMPT))
    ring.send(spoken(ring.plans.pop(0), [5]))
    plan = ring.plans.pop(0)
    tokens = (4, EOS, 6)
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
    sampled = SampledTokens(plan.work[0].sequence, tokens, logprobs, 3)
    ring.send(StepFinished(epoch=plan.epoch, step=plan.step, sampled=(sampled,), timing=TIMING))
    assert ring.entries[-1].logprobs == logprobs[:2]


@pytest.mark.parametrize("tokens", [[], [4, 5, 6, 7, 8]])
def test_a_yield_that_was_not_planned_is_a_bug(tokens: list[int]) -> None:
    ring = DraftingRing(3, ALL)
    ring.send(generate("a", PROMPT))
    ring.send(spoken(ring.plans.pop(0), [5]))
    with pytest.raises(WrongYield):
        ring.send(spoken(ring.plans.pop(0), tokens))


def test_blocks_that_drafts_filled_are_found_by_the_next_prompt_and_hold_what_they_should() -> None:
    ring = DraftingRing(4, ALL)
    first = generate("a", PROMPT, max_tokens=30, ignore_eos=True)
    ring.send(first)
    ring.finish()
    whole = PROMPT + ring.output_of("a")
    ring.send(generate("b", whole, max_tokens=5, ignore_eos=True))
    assert ring.plans[0].new[0].computed == 48
    ring.finish()
    assert ring.output_of("b") == continuation(whole, 5)


def test_a_sequence_that_is_preempted_with_drafts_in_flight_goes_on_from_what_they_yield() -> None:
    ring = DraftingRing(3, lambda most: most // 2, run_ahead=2, num_blocks=6)
    requests = [generate(name, PROMPT[:15], max_tokens=60, ignore_eos=True, arrival=at) for at, name in enumerate("ab")]
    for request in requests:
        ring.send(request)
    ring.finish()
    assert ring.engine.epoch_state is not None
    assert ring.engine.epoch_state.planner.preemption.count > 0
    for request in requests:
        assert ring.output_of(request.generation.request) == right_output(request, ring.context)[0]


def test_drafts_take_no_block_that_a_running_sequence_needs_for_its_next_token() -> None:
    ring = DraftingRing(16, NONE, num_blocks=3)
    ring.send(generate("a", PROMPT[:15], max_tokens=30, ignore_eos=True))
    ring.send(generate("b", PROMPT[:14], max_tokens=1, ignore_eos=True))
    free = []
    while ring.plans:
        ring.step()
        free.append(ring.free)
    assert ring.engine.epoch_state is not None
    assert ring.engine.epoch_state.planner.preemption.count == 0
    assert len(ring.output_of("a")) == 30


def test_a_request_that_is_cancelled_with_drafts_in_flight_gives_all_its_blocks_back() -> None:
    ring = DraftingRing(5, ALL, run_ahead=2)
    ring.send(generate("a", PROMPT, ignore_eos=True))
    ring.step()
    ring.send(Cancel(RequestId("a"), Attempt(1)))
    assert ring.free == 32
    ring.finish()
    check(ring.engine)


def test_an_engine_counts_what_was_drafted_and_accepted() -> None:
    ring = DraftingRing(2, ALL)
    ring.send(generate("a", PROMPT, max_tokens=7, ignore_eos=True))
    ring.finish()
    tally = ring.engine.counters
    assert (tally.drafted, tally.accepted, tally.speculated, tally.speculated_tokens) == (4, (2, 2), 2, 6)
