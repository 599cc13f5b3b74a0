"""How many drafts are planned: as many as pay, on devices of every kind, and what that is judged by."""

from __future__ import annotations

import math
from random import Random

import pytest

from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import Limits, SpeculationPolicy
from services.scheduler.core.sequence import Acceptance, Rank, Sequence
from services.scheduler.core.speculation import RowCost, Speculation
from shared.messages.generation import Grammar
from shared.messages.scheduler import Generate
from tests.honest_worker import HonestWorker, card, generate
from tests.unit.test_scheduler_engine import PROMPT, Ring


def sequence_of(request: Generate) -> Sequence:
    ring = Ring()
    ring.send(request)
    return ring.engine.requests[request.generation.request]


def policy(most: int, policy: SpeculationPolicy = "dynamic", jump_ahead: int = 0) -> Speculation:
    speculation = Speculation(most, jump_ahead, policy)
    speculation.begin(1, 1000, guided=False)
    return speculation


def test_ranks_that_draft_nothing_are_asked_for_nothing() -> None:
    assert policy(0).begin(3, 1000, guided=False) == 0
    assert policy(5, "off").begin(3, 1000, guided=False) == 0


def test_drafts_take_at_most_a_quarter_of_the_budget_and_nothing_from_who_decodes() -> None:
    assert policy(5).begin(3, 1000, guided=False) == 250
    assert policy(5).begin(950, 1000, guided=False) == 50


def test_where_rows_cost_nothing_as_much_is_drafted_as_can_be() -> None:
    speculation = policy(5)
    sequence = sequence_of(generate("a", PROMPT))
    for rows in (1, 6, 3, 6, 1):
        speculation.took(1, rows - 1, 0.005, 1)
    speculation.begin(1, 1000, guided=False)
    assert speculation.wanted(sequence) == 5


def test_where_every_row_costs_as_much_as_it_brings_nothing_is_drafted() -> None:
    speculation = policy(5)
    sequence = sequence_of(generate("a", PROMPT))
    for rows in (100, 150, 120, 180):
        speculation.took(rows, 0, rows * 0.001, rows)
    speculation.begin(100, 1000, guided=False)
    assert speculation.wanted(sequence) == 0


def test_the_length_follows_from_acceptance_and_what_a_row_costs() -> None:
    """A fifth of the time is rows': a draft must be accepted with probability 0.2."""
    speculation = policy(8)
    sequence = sequence_of(generate("a", PROMPT))
    for rows in (8, 12, 10, 8, 12, 10):
        speculation.took(rows, 0, 0.040 + rows * 0.001, 10)
    for _ in range(100):
        speculation.tried(sequence, 8, 2)
    speculation.begin(10, 1000, guided=False)
    rate = sequence.acceptance.rate(0.7)
    assert rate == pytest.approx(2 / 3, abs=0.02)
    assert speculation.wanted(sequence) == math.floor(math.log(0.2) / math.log(rate))


def test_a_sequence_whose_drafts_fail_stops_drafting_and_tries_again_later() -> None:
    speculation = policy(4)
    good, bad = sequence_of(generate("a", PROMPT)), sequence_of(generate("b", PROMPT))
    for _ in range(50):
        for rows in (8, 12):
            speculation.took(rows, 0, 0.040 + rows * 0.001, 10)
        speculation.tried(good, 4, 4)
        speculation.tried(bad, 4, 0)
    speculation.begin(10, 1000, guided=False)
    assert (speculation.wanted(good), speculation.wanted(bad)) == (4, 0)
    waited = next(step for step in range(1000) if speculation.wanted(bad))
    assert 20 < waited < 300


def test_sequences_with_a_grammar_may_jump_ahead_where_nothing_else_is_drafted() -> None:
    speculation = policy(0, jump_ahead=6)
    assert speculation.begin(1, 1000, guided=False) == 0
    assert speculation.begin(1, 1000, guided=True) == 250
    assert speculation.wanted(sequence_of(generate("a", PROMPT))) == 0
    guided = Sequence(generate("b", PROMPT, grammar=Grammar("json", "{}")), sequence_rank(), 99, frozenset())
    assert speculation.wanted(guided) == 6


def sequence_rank() -> Rank:
    return sequence_of(generate("r", PROMPT)).rank


def test_acceptance_is_the_share_of_drafts_that_had_a_chance() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.7) == 0.7
    for _ in range(500):
        acceptance.note(4, 1)  # the second was rejected, the third and fourth never had a chance
    assert acceptance.rate(0.5) == pytest.approx(0.5)


def test_rows_of_one_size_say_nothing_new_of_what_a_row_costs() -> None:
    cost = RowCost()
    for rows in (4, 8, 12, 4, 8):
        cost.note(rows, 0.010 + rows * 0.002, 4)
    assert cost.slope == pytest.approx(0.002)
    for _ in range(300):
        cost.note(16, 0.5, 4)
    assert cost.slope > 0


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a*")])
def test_an_engine_whose_ranks_only_jump_ahead_drafts_for_guided_sequences_alone(grammar: Grammar | None) -> None:
    ring = Ring(Limits(run_ahead=0))
    ring.worker = HonestWorker(32, accepts=lambda most: most)
    ring.send(WorkersReady(card(256), 32, max_jump_ahead=4))
    ring.plans.clear()
    ring.send(generate("a", PROMPT, max_tokens=6, ignore_eos=True))
    ring.send(generate("b", [*PROMPT, 5], max_tokens=6, ignore_eos=True, grammar=grammar))
    drafts: dict[int, int] = {}
    while ring.plans or ring.worker.compiling:
        if not ring.plans:
            ring.send(ring.worker.compile())
            continue
        for work in ring.plans[0].work:
            drafts[work.sequence] = max(work.speculate, drafts.get(work.sequence, 0))
        ring.step()
    assert drafts == {1: 0, 2: 0 if grammar is None else 4}


class Engine:
    """Steps of one policy on a device of which a step takes `fixed` + `row` seconds for each row."""

    def __init__(self, sequences: int, most: int, *, fixed: float, row: float, acceptance: float) -> None:
        self.policy = Speculation(most, 0, "dynamic")
        ring = Ring(Limits(max_running=sequences))
        for number in range(sequences):
            ring.send(generate(f"r{number}", [4 + number % 20]))
        self.sequences = list(ring.engine.requests.values())
        self.fixed, self.row, self.acceptance = fixed, row, acceptance
        self.luck = Random(5)

    def run(self, steps: int) -> tuple[float, float]:
        """Tokens a second, and drafts for each sequence and step."""
        seconds = tokens = drafts = 0.0
        for _ in range(steps):
            room = self.policy.begin(len(self.sequences), 2048, guided=False)
            drafted = yielded = 0
            for sequence in self.sequences:
                wanted = min(self.policy.wanted(sequence), room) if room else 0
                room -= wanted
                accepted = next((i for i in range(wanted) if self.luck.random() >= self.acceptance), wanted)
                if wanted:
                    self.policy.tried(sequence, wanted, accepted)
                drafted, yielded = drafted + wanted, yielded + accepted + 1
            took = (self.fixed + self.row * (len(self.sequences) + drafted)) * self.luck.uniform(0.95, 1.05)
            self.policy.took(len(self.sequences), drafted, took, yielded)
            seconds, tokens, drafts = seconds + took, tokens + yielded, drafts + drafted
        return tokens / seconds, drafts / steps / len(self.sequences)


@pytest.mark.parametrize("sequences", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("fixed", "row"), [(0.005, 0.00001), (0.002, 0.0005), (0.0001, 0.001)])
def test_as_many_drafts_are_made_as_pay(sequences: int, acceptance: float, fixed: float, row: float) -> None:
    """Of what the best fixed length would bring nine tenths at least: the rest is what trying costs."""
    engine = Engine(sequences, 4, fixed=fixed, row=row, acceptance=acceptance)
    engine.run(200)
    rate, _ = engine.run(500)

    def fixed_rate(drafts: int) -> float:
        tokens = sum(acceptance**place for place in range(drafts + 1))
        return sequences * tokens / (fixed + row * sequences * (1 + drafts))

    best = max(fixed_rate(drafts) for drafts in range(5))
    assert rate > 0.9 * best


def test_what_did_not_pay_is_tried_again_when_it_does() -> None:
    engine = Engine(1, 4, fixed=0.001, row=0.001, acceptance=0.05)
    engine.run(300)
    assert engine.run(300)[1] < 0.5
    engine.acceptance = 0.95
    engine.run(300)
    assert engine.run(300)[1] > 3


def test_a_device_that_gets_slower_by_the_row_is_noticed_though_all_steps_have_one_size() -> None:
    engine = Engine(16, 4, fixed=0.005, row=0.00001, acceptance=0.6)
    engine.run(300)
    assert engine.run(100)[1] > 3.5
    engine.fixed, engine.row = 0.0001, 0.001
    engine.run(300)
    assert engine.run(100)[1] < 1
