"""Speculation changes how fast tokens come, never which: whoever drafts, in every situation a scheduler can make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from services.worker.backend import run_step
from services.worker.batch.batch import DraftTokens
from services.worker.executor.drafting import FORGETS_AFTER
from services.worker.executor.host_runner import HostRunner
from services.worker.ops.interface import OpsName
from services.worker.speculation.draft_model import DraftModelProposer
from services.worker.speculation.hidden_state_proposer import HiddenStateProposer
from services.worker.speculation.ngram import NgramProposer
from services.worker.speculation.proposer import DraftRequest, Proposer
from services.worker.speculation.settings import SpeculationSettings
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.quantised_files import quantised
from tests.support.models.tiny_drafters import make_draft, make_eagle, make_eagle3, make_medusa
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import Runner, launching
from tests.support.worker.oracle import Oracle
from tests.support.worker.plan_driver import GREEDY, Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 24


def backend_of(path: Path, *, ops: OpsName = "torch", speculation: SpeculationSettings | None = None) -> HostRunner:
    return tiny_backend(path, ops=ops, speculation=speculation)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["stepping", "launching"])
def plain(request: pytest.FixtureRequest, model: TinyModel) -> Runner:
    backend = backend_of(model.path)
    return launching(backend) if request.param == "launching" else backend


def prompt(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


def repetitive(length: int) -> list[int]:
    """A prompt with something to look up."""
    period = prompt(7, seed=5)
    return [period[i % 7] for i in range(length)]


PROMPTS = [repetitive(40), prompt(1), prompt(15, 1), prompt(16, 2), prompt(33, 3), repetitive(70), prompt(5, 4)]

SAMPLINGS = [
    GREEDY,
    SamplingOptions(seed=5, temperature=0.7),
    SamplingOptions(seed=6, temperature=1.2, top_p=0.8),
    SamplingOptions(seed=7, temperature=1.0, top_k=5, repetition_penalty=1.3),
    SamplingOptions(seed=8, temperature=0.0, presence_penalty=0.9, frequency_penalty=0.4),
    SamplingOptions(seed=9, temperature=0.0, logit_bias=((17, 4.0), (30, -9.0)), logprobs=3),
    SamplingOptions(seed=10, temperature=0.9, min_p=0.1, logprobs=2),
]


def run(runner: Runner, *, speculate: int, budget: int = 512) -> tuple[list[Sequence], Driver]:
    runner.reset()
    driver = Driver(runner, budget=budget, speculate=speculate)
    sequences = [
        driver.add(tokens, OUTPUT, sampling=sampling, min_tokens=9, stop_token_ids=tuple(range(40, 90)))
        for tokens, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    driver.run()
    return sequences, driver


def proposed(runner: Runner, proposer: Proposer | None) -> Runner:
    """`runner` with another proposer: weights are the dear part of a backend."""
    runner.rank.drafting.draft_by(proposer)
    return runner


@pytest.fixture(params=["torch", "native", "launched"])
def made(request: pytest.FixtureRequest, model: TinyModel) -> Callable[..., Runner]:
    """Makes a backend, on these operations; or one of launches, on torch's."""

    def make(speculation: SpeculationSettings | None = None) -> Runner:
        launched = request.param == "launched"
        backend = backend_of(model.path, ops="torch" if launched else request.param, speculation=speculation)
        return launching(backend) if launched else backend

    return make


@pytest.mark.parametrize("budget", [512, 23])
def test_every_request_gets_the_tokens_and_logprobs_it_would_have_got(made: Callable[..., Runner], budget: int) -> None:
    runner = made()
    expected, _ = run(runner, speculate=0, budget=budget)
    oracle = Oracle()
    oracle.known = {tuple(s.tokens[: s.prompt_length]): s.output for s in expected}
    sequences, driver = run(proposed(runner, oracle), speculate=4, budget=budget)
    assert [s.output for s in sequences] == [s.output for s in expected]
    assert 0 < driver.accepted < driver.drafted, "some drafts right, some wrong, or nothing was tried"
    for sequence, plain_one in zip(sequences, expected, strict=True):
        assert [entry.token for entry in sequence.logprobs] == [entry.token for entry in plain_one.logprobs]
        for entry, one in zip(sequence.logprobs, plain_one.logprobs, strict=True):
            assert entry.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in one.top]


def test_looking_up_ngrams_drafts_and_changes_nothing(plain: Runner) -> None:
    expected, _ = run(proposed(plain, None), speculate=0)
    sequences, driver = run(proposed(plain, NgramProposer(most=5, longest=4, shortest=1)), speculate=5)
    assert [s.output for s in sequences] == [s.output for s in expected]
    assert driver.drafted > 0


def test_prefix_hits_and_preemption_with_rejected_drafts_behind_them_change_nothing(plain: Runner) -> None:
    common = repetitive(40)
    prompts = [[*common, *prompt(9, 1)], [*common, *prompt(3, 2)], prompt(20, 3)]
    expected = []
    for speculate in (0, 4):
        plain.reset()
        proposed(plain, NgramProposer(most=4, longest=3, shortest=1))
        driver = Driver(plain, budget=29, speculate=speculate)
        first = driver.add(prompts[0], OUTPUT)
        while not first.output:
            driver.step()
        sharing = driver.add(prompts[1], OUTPUT)
        assert driver.share_prefix(sharing, first) == 2 * BLOCK_SIZE
        preempted = driver.add(prompts[2], OUTPUT)
        while len(preempted.output) < 6:
            driver.step()
        driver.preempt(preempted)
        driver.run()
        expected.append([first.output, sharing.output, preempted.output])
    assert expected[0] == expected[1]


def test_drafts_stop_where_the_context_ends(model: TinyModel, plain: Runner) -> None:
    tokens = repetitive(POSITIONS - 6)
    outputs = []
    for speculate in (0, 8):
        plain.reset()
        proposed(plain, NgramProposer(most=8, longest=3, shortest=1))
        driver = Driver(plain, speculate=speculate)
        sequence = driver.add(tokens, 7)
        driver.run()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert len(tokens) + len(outputs[1]) == POSITIONS + 1


def test_a_sequence_whose_context_is_full_draws_nothing_more(plain: Runner) -> None:
    proposed(plain, None).reset()
    tokens = prompt(POSITIONS)
    blocks = pack(range(POSITIONS // BLOCK_SIZE))
    new = NewSequence(
        sequence=SequenceId(0), tokens=pack(tokens), prompt_length=3, computed=0, blocks=blocks, sampling=GREEDY
    )
    first = StepPlan(
        epoch=Incarnation(1), step=0, new=(new,), work=(SequenceWork(SequenceId(0), POSITIONS, b"", True),)
    )
    assert [len(s.tokens) for s in run_step(plain, first).sampled] == [1]
    ahead = StepPlan(epoch=Incarnation(1), step=1, work=(SequenceWork(SequenceId(0), 1, b"", True, 4),))
    assert [(s.sequence, s.tokens) for s in run_step(plain, ahead).sampled] == [(0, ())]


def test_what_was_drafted_and_accepted_is_counted(plain: Runner) -> None:
    plain.reset()
    expected, _ = run(proposed(plain, None), speculate=0)
    known = expected[0]

    class Told(Oracle):
        def propose(self, asked: DraftRequest) -> DraftTokens:
            following = self._following(known.tokens[: int(asked.histories.lengths[asked.seq_indices[0]])])
            wrong = (following[1] + 1) % VOCABULARY
            return DraftTokens(np.array([[following[0], wrong, 5]], dtype=np.int32), np.array([3], dtype=np.int32))

    told = Told()
    told.known = {tuple(known.tokens[: known.prompt_length]): known.output}
    plain.reset()
    driver = Driver(proposed(plain, told), speculate=4)
    driver.add(known.tokens[: known.prompt_length], OUTPUT, min_tokens=9, stop_token_ids=tuple(range(40, 90)))
    driver.step()
    output = run_step(
        plain, StepPlan(epoch=Incarnation(1), step=1, work=(SequenceWork(SequenceId(0), 1, pack([99]), True, 4),))
    )
    assert (output.drafted, output.accepted) == (3, (1, 0, 0))
    assert [(s.tokens, s.drafted) for s in output.sampled] == [(tuple(known.output[1:3]), 3)]


METHODS = ["ngram", "suffix", "draft", "medusa", "eagle", "eagle3"]


@pytest.fixture(scope="module")
def drafters(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpeculationSettings]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "ngram": SpeculationSettings(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
        "suffix": SpeculationSettings(method="suffix", num_speculative_tokens=4),
        "draft": SpeculationSettings(
            method="draft", num_speculative_tokens=4, model=str(make_draft(model, folder / "draft"))
        ),
        "same": SpeculationSettings(method="draft", num_speculative_tokens=4, model=str(model.path)),
        "medusa": SpeculationSettings(method="medusa", model=str(make_medusa(model, folder / "medusa"))),
        "eagle": SpeculationSettings(
            method="eagle", num_speculative_tokens=4, model=str(make_eagle(model, folder / "eagle"))
        ),
        "eagle3": SpeculationSettings(
            method="eagle3", num_speculative_tokens=4, model=str(make_eagle3(model, folder / "eagle3"))
        ),
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_what_the_plain_engine_gives(
    made: Callable[..., Runner], drafters: dict[str, SpeculationSettings], method: str
) -> None:
    runner = made(drafters[method])
    expected, _ = run(runner, speculate=0)
    for speculate, budget in ((runner.max_speculate, 512), (2, 29)):
        sequences, driver = run(runner, speculate=speculate, budget=budget)
        assert [s.output for s in sequences] == [s.output for s in expected]
        assert driver.drafted > 0
    assert [[one.token for one in s.logprobs] for s in sequences] == [
        [one.token for one in s.logprobs] for s in expected
    ]


def test_a_model_that_drafts_for_itself_is_always_right(
    model: TinyModel, drafters: dict[str, SpeculationSettings]
) -> None:
    """Random draws too, by the same keys; and whatever changes logits changes the drafter's."""
    runner = backend_of(model.path, speculation=drafters["same"])
    changed = [
        SamplingOptions(seed=11, temperature=1.5, presence_penalty=1.1, bad_words=((9, 8), (7,))),
        SamplingOptions(seed=12, temperature=1.0, allowed_token_ids=tuple(range(5, 90, 3))),
    ]
    driver = Driver(runner, speculate=4, budget=64)
    for number, sampling in enumerate([*SAMPLINGS, *changed]):
        tokens = PROMPTS[3 + number % 3]
        driver.add(tokens, OUTPUT, sampling=sampling, min_tokens=9, stop_token_ids=tuple(range(40, 90)))
    driver.run()
    assert driver.accepted == driver.drafted > 0


def test_a_draft_model_may_be_quantised(tmp_path: Path) -> None:
    """By the checkpoint: the same as the model, so that it is always right."""
    quantised(tmp_path, "gptq", "llama")
    same = SpeculationSettings(method="draft", num_speculative_tokens=4, model=str(tmp_path))
    driver = Driver(tiny_backend(tmp_path, ops="native", speculation=same), speculate=4)
    driver.add(PROMPTS[3], OUTPUT)
    driver.run()
    assert driver.accepted == driver.drafted > 0


def test_a_stream_taken_up_again_anywhere_goes_on_as_it_would_have(model: TinyModel) -> None:
    """Wherever windows of drafts then begin and end: as behind the death of an engine at each position of several."""
    runner = backend_of(model.path, ops="native")
    sampling = SamplingOptions(seed=21, temperature=1.3, top_p=0.95, frequency_penalty=0.3)
    whole = Driver(runner, speculate=0)
    expected = whole.add(PROMPTS[4], OUTPUT, sampling=sampling)
    whole.run()
    oracle, length = Oracle(), expected.prompt_length
    oracle.known = {tuple(expected.tokens[:length]): expected.output}
    proposed(runner, oracle).reset()
    driver = Driver(runner, speculate=oracle.most)
    resumed = [
        driver.add(expected.tokens[: length + done], OUTPUT, sampling=sampling, prompt_length=length)
        for done in range(12)
    ]
    driver.run()
    assert 0 < driver.accepted < driver.drafted
    assert [sequence.output for sequence in resumed] == [expected.output] * len(resumed)


def test_a_draft_model_knows_which_blocks_it_has_read(
    model: TinyModel, drafters: dict[str, SpeculationSettings]
) -> None:
    """Shared prefixes are read once; what was loaded from elsewhere is read again; so it is right all the same."""
    runner = backend_of(model.path, speculation=drafters["same"])
    driver = Driver(runner, speculate=4)
    first = driver.add(repetitive(70), 12)
    while len(first.output) < 3:
        driver.step()
    sharing = driver.add([*repetitive(70)[:66], *prompt(4)], 12)
    assert driver.share_prefix(sharing, first) == 4 * BLOCK_SIZE
    driver.run()
    assert driver.accepted == driver.drafted > 0


def test_answers_are_foreseen_by_those_before_them_under_the_same_salt(
    model: TinyModel, drafters: dict[str, SpeculationSettings]
) -> None:
    runner = backend_of(model.path, speculation=drafters["suffix"])
    accepted = {}
    for who, salt in (("first", None), ("again", None), ("another", "key/"), ("its own", "key/")):
        driver = Driver(runner, speculate=4)
        driver.add(PROMPTS[0], OUTPUT, cache_salt=salt, sampling=SamplingOptions(seed=5, temperature=1.3))
        driver.run()
        accepted[who] = driver.accepted
    assert accepted["again"] == accepted["its own"] > accepted["first"] == accepted["another"]


def test_eagle_and_medusa_foresee_something(model: TinyModel, drafters: dict[str, SpeculationSettings]) -> None:
    for method in ("eagle", "medusa"):
        runner = backend_of(model.path, speculation=drafters[method])
        _, driver = run(runner, speculate=runner.max_speculate)
        assert driver.accepted > 0, method


@pytest.mark.parametrize("method", ["draft", "eagle", "eagle3"])
def test_a_chain_made_in_one_call_has_the_drafts_of_one_made_step_by_step(
    model: TinyModel, drafters: dict[str, SpeculationSettings], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = backend_of(model.path, ops="native", speculation=drafters[method])
    proposer = runner.rank.drafting.proposer
    tried = []
    for _ in range(2):
        runner.reset()
        driver = Driver(runner, speculate=4)
        for tokens in PROMPTS:
            driver.add(tokens, OUTPUT)
        driver.run()
        tried.append((driver.drafted, driver.accepted))
        if isinstance(proposer, HiddenStateProposer):
            monkeypatch.setattr(proposer._head, "draft_chain", lambda *_: None)
        elif isinstance(proposer, DraftModelProposer):
            proposer._native = None
    assert tried[0] == tried[1]
    assert tried[0][0] > 0


@pytest.mark.parametrize("method", METHODS)
def test_whoever_was_not_asked_for_long_drafts_again_when_asked(
    model: TinyModel, drafters: dict[str, SpeculationSettings], method: str
) -> None:
    """Nothing is kept for drafters meanwhile; they find their way, and the output is what it would have been."""
    runner = backend_of(model.path, speculation=drafters[method])
    tokens, outputs = repetitive(30), []
    for pause in (0, FORGETS_AFTER + 6):
        runner.reset()
        driver = Driver(runner, speculate=3 if pause else 0)
        sequence = driver.add(tokens, 60)
        other = driver.add(prompt(9, 2), 60)
        while len(sequence.output) < 20:
            driver.step()
        driver.speculate = 0
        for _ in range(pause):
            driver.step()
        before, driver.speculate = driver.drafted, 3 if pause else 0
        driver.run()
        outputs.append([sequence.output, other.output])
    assert outputs[0] == outputs[1]
    assert driver.drafted > before > 0
