"""How many drafts are planned: as many as pay, on devices of every kind, and what that is judged by."""

from __future__ import annotations

from random import Random

import pytest

from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import EngineLimits, SpeculationPolicy
from services.scheduler.core.planning.draft_costs import DraftCosts, FittedLine
from services.scheduler.core.planning.speculation import MAX_TRIAL_INTERVAL, SpeculationBudget
from services.scheduler.core.sequence import AcceptanceRate, QueueKey, Sequence
from shared.messages.generation import Grammar
from shared.messages.scheduler import GenerateRequest
from tests.support.engines.checking_worker import HonestWorker, card, generate
from tests.support.engines.single_engine import PROMPT, Ring


def sequence_of(request: GenerateRequest) -> Sequence:
    ring = Ring()
    ring.send(request)
    return ring.engine.requests[request.generation.request]


def policy(most: int, policy: SpeculationPolicy = "dynamic", jump_ahead: int = 0) -> SpeculationBudget:
    return SpeculationBudget(most, jump_ahead, policy)


def begun(speculation: SpeculationBudget, decodes: int, budget: int = 1000, *, guided: bool = False) -> int:
    """Room of the first step that tries to draft: what steps take without comes before."""
    for _ in range(4):
        speculation.record_step(decodes, 0, 0, 0.001, decodes)
    return speculation.start_step(decodes, budget, guided=guided)


def test_ranks_that_draft_nothing_are_asked_for_nothing() -> None:
    assert begun(policy(0), 3) == 0
    assert begun(policy(5, "off"), 3) == 0


def test_drafts_take_at_most_a_quarter_of_the_budget_and_nothing_from_who_decodes() -> None:
    assert begun(policy(5), 3) == 250
    assert begun(policy(5), 950) == 50


def test_what_a_step_takes_without_drafts_is_measured_before_any_are_made() -> None:
    speculation = policy(5)
    assert speculation.start_step(3, 1000, guided=False) == 0
    assert begun(speculation, 3) > 0
    assert speculation.start_step(30, 1000, guided=False) == 0, "nothing is known of so many"


def test_sequences_with_a_grammar_may_jump_ahead_where_nothing_else_is_drafted() -> None:
    speculation = policy(0, jump_ahead=6)
    assert begun(speculation, 1) == 0
    assert speculation.start_step(1, 1000, guided=True) == 250
    assert speculation.drafts_for(sequence_of(generate("a", PROMPT))) == 0
    guided = Sequence(generate("b", PROMPT, grammar=Grammar("json", "{}")), sequence_rank(), 99, frozenset(), 16)
    assert speculation.drafts_for(guided) == 6


def test_what_grammars_force_is_drafted_where_guessing_does_not_pay() -> None:
    speculation = policy(3, jump_ahead=6)
    plain = sequence_of(generate("a", PROMPT))
    guided = Sequence(generate("b", PROMPT, grammar=Grammar("json", "{}")), sequence_rank(), 99, frozenset(), 16)
    for _ in range(80):  # drafts take as long as ten steps, and none stands
        asked = 2 * speculation.drafts_for(plain) if speculation.start_step(2, 1000, guided=True) else 0
        speculation.record_step(2, asked, asked, 0.001 * (10 if asked else 1), 2)
        if asked:
            speculation.record_drafts(plain, asked, 0)
            speculation.record_drafts(guided, 3, 3)
    assert speculation.start_step(2, 1000, guided=True) > 0
    assert (speculation.drafts_for(plain), speculation.drafts_for(guided)) == (0, 6)


def sequence_rank() -> QueueKey:
    return sequence_of(generate("r", PROMPT)).queue_key


def test_acceptance_is_the_share_of_drafts_that_had_a_chance() -> None:
    acceptance = AcceptanceRate()
    assert acceptance.rate(0.7) == 0.7
    for _ in range(500):
        acceptance.record(4, 1)  # the second was rejected, the third and fourth never had a chance
    assert acceptance.rate(0.5) == pytest.approx(0.5)


def test_the_threshold_is_what_a_draft_takes_by_what_a_second_brings() -> None:
    """Steps of 10 sequences in 50 ms; asking takes 5 ms, a draft 1 ms. Of 0.8, 0.64, 0.51, ... three are worth it."""
    costs = DraftCosts()
    for _ in range(10):
        costs.record_plain(10, 0.050)
    for drafted in (10, 30, 20, 10, 30, 20) * 10:
        costs.record_drafting(10, drafted, drafted // 2, 0.055 + drafted * 0.001)
    assert costs.extra.slope == pytest.approx(0.001)
    best = max(10 * sum(0.8**i for i in range(k + 1)) / (0.055 + 0.010 * k) for k in range(1, 9))
    assert costs.threshold(10, 0.8, 8) == pytest.approx(0.001 * best, rel=0.01)
    assert costs.gain(10).mean == pytest.approx(20 / 20 - 0.025 / 0.050, abs=0.05)


def test_an_interrupted_step_is_not_taken_for_what_steps_take() -> None:
    costs = DraftCosts()
    for _ in range(10):
        costs.record_plain(1, 0.001)
    costs.record_plain(1, 5.0)
    assert costs.plain.at(1) < 0.0013


def test_steps_of_one_size_say_nothing_new_of_what_a_draft_takes() -> None:
    line = FittedLine()
    for x in (4, 8, 12, 4, 8):
        line.add(x, 0.010 + x * 0.002)
    assert line.slope == pytest.approx(0.002)
    for _ in range(300):
        line.add(16, 0.5)
    assert line.slope is not None
    assert line.slope > 0


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a*")])
def test_an_engine_whose_ranks_only_jump_ahead_drafts_for_guided_sequences_alone(grammar: Grammar | None) -> None:
    ring = Ring(EngineLimits(run_ahead=0))
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


@pytest.mark.parametrize(("rows", "expected"), [(1, [4, 4]), (3, [4, 1]), (5, [3, 0])])
def test_rows_of_trees_count_and_levels_are_what_may_be_yielded(rows: int, expected: list[int]) -> None:
    """Of a budget of 64 tokens a quarter, 16 rows, may be drafts."""
    ring = Ring(EngineLimits(run_ahead=0, max_batch_tokens=64, max_running=8, speculation="fixed"))
    ring.worker = HonestWorker(32, accepts=lambda most: most)
    ring.send(WorkersReady(card(256), 32, max_speculate=4, rows_per_draft=rows))
    ring.plans.clear()
    for name in ("a", "b"):
        ring.send(generate(name, PROMPT, max_tokens=20, ignore_eos=True))
    while [work.count for work in ring.plans[0].work] != [1, 1]:
        ring.step()
    assert [work.speculate for work in ring.plans[0].work] == expected


class Engine:
    """Steps of one policy on a device of which a step takes `fixed` + `row` seconds for each row; drafting takes
    `asking` more for the step, and `draft` for each draft."""

    def __init__(
        self,
        sequences: int,
        most: int,
        *,
        fixed: float,
        row: float,
        acceptance: float,
        asking: float = 0.0,
        draft: float = 0.0,
        noise: float = 0.05,
    ) -> None:
        self.policy = SpeculationBudget(most, 0, "dynamic")
        ring = Ring(EngineLimits(max_running=sequences))
        for number in range(sequences):
            ring.send(generate(f"r{number}", [4 + number % 20]))
        self.sequences = list(ring.engine.requests.values())
        self.fixed, self.row, self.acceptance = fixed, row, acceptance
        self.asking, self.draft, self.noise = asking, draft, noise
        self.luck = Random(5)

    def run(self, steps: int) -> tuple[float, float]:
        """Tokens a second, and drafts for each sequence and step."""
        seconds = tokens = drafts = 0.0
        for _ in range(steps):
            room = self.policy.start_step(len(self.sequences), 2048, guided=False)
            drafted = yielded = 0
            for sequence in self.sequences:
                wanted = min(self.policy.drafts_for(sequence), room) if room else 0
                room -= wanted
                accepted = next((i for i in range(wanted) if self.luck.random() >= self.acceptance), wanted)
                if wanted:
                    self.policy.record_drafts(sequence, wanted, accepted)
                drafted, yielded = drafted + wanted, yielded + accepted + 1
            took = self.seconds(drafted) * self.luck.uniform(1 - self.noise, 1 + self.noise)
            self.policy.record_step(len(self.sequences), drafted, drafted, took, yielded)
            seconds, tokens, drafts = seconds + took, tokens + yielded, drafts + drafted
        return tokens / seconds, drafts / steps / len(self.sequences)

    def seconds(self, drafted: int) -> float:
        rows = self.fixed + self.row * (len(self.sequences) + drafted)
        return rows + (self.asking + self.draft * drafted if drafted else 0.0)

    def rate_of(self, drafts: int) -> float:
        """Tokens a second with always so many drafts."""
        tokens = sum(self.acceptance**place for place in range(drafts + 1))
        sequences = len(self.sequences)
        return sequences * tokens / self.seconds(sequences * drafts)


@pytest.mark.parametrize("sequences", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("fixed", "row"), [(0.005, 0.00001), (0.002, 0.0005), (0.0001, 0.001)])
@pytest.mark.parametrize(("asking", "draft"), [(0.0, 0.0), (0.001, 0.0002)])
def test_as_many_drafts_are_made_as_pay(
    sequences: int, acceptance: float, fixed: float, row: float, asking: float, draft: float
) -> None:
    """Of what the best fixed length would bring nine tenths at least: the rest is what trying costs."""
    engine = Engine(sequences, 4, fixed=fixed, row=row, acceptance=acceptance, asking=asking, draft=draft)
    engine.run(300)
    rate, _ = engine.run(500)
    assert rate > 0.9 * max(engine.rate_of(drafts) for drafts in range(5))


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("acceptance", [0.2, 0.5])
def test_drafters_that_never_pay_cost_next_to_nothing(sequences: int, acceptance: float) -> None:
    engine = Engine(
        sequences, 3, fixed=0.0005, row=0.0001, acceptance=acceptance, asking=0.0006, draft=0.0004, noise=0.3
    )
    engine.run(1500)
    rate, _ = engine.run(4000)
    assert rate > 0.98 * engine.rate_of(0)


def test_what_did_not_pay_is_tried_again_when_it_does() -> None:
    engine = Engine(1, 4, fixed=0.001, row=0.001, acceptance=0.05)
    engine.run(300)
    assert engine.run(300)[1] < 0.5
    engine.acceptance = 0.95
    engine.run(2 * MAX_TRIAL_INTERVAL)
    assert engine.run(300)[1] > 3


def test_a_device_that_gets_slower_by_the_row_is_noticed_though_all_steps_have_one_size() -> None:
    engine = Engine(16, 4, fixed=0.005, row=0.00001, acceptance=0.6)
    engine.run(300)
    assert engine.run(100)[1] > 3
    engine.fixed, engine.row = 0.0001, 0.001
    engine.run(300)
    assert engine.run(100)[1] < 1


def test_the_same_results_lead_to_the_same_plans() -> None:
    engines = [Engine(8, 4, fixed=0.002, row=0.0002, acceptance=0.6, asking=0.001, noise=0.3) for _ in range(2)]
    assert engines[0].run(500) == engines[1].run(500)


def test_what_does_not_pay_is_tried_more_and_more_seldom() -> None:
    engine = Engine(8, 3, fixed=0.001, row=0.0001, acceptance=0.2, asking=0.001, draft=0.0002)
    drafting = []
    for _ in range(4):
        drafting.append(sum(engine.run(1)[1] > 0 for _ in range(1500)))
    assert drafting[0] > drafting[-1]
    assert 0 < drafting[-1] < 30


def test_a_new_number_of_sequences_is_measured_without_drafts_first() -> None:
    engine = Engine(32, 3, fixed=0.001, row=0.00001, acceptance=0.9)
    engine.run(400)
    engine.sequences = engine.sequences[:1]
    assert engine.run(1)[1] == 0.0
    assert engine.run(300)[1] > 2
