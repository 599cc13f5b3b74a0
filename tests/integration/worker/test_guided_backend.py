"""Output of real models under grammars: documents are valid, whatever else a request or its neighbours ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.speculation.settings import SpeculationSettings
from shared.messages.generation import Grammar, SamplingOptions
from tests.support.models.tiny_drafters import make_eagle
from tests.support.models.tiny_models import TinyModel
from tests.support.paths import DEMO_MODEL
from tests.support.worker.guided_documents import Case, cases, practical
from tests.support.worker.guided_engine import AT_ONCE, GuidedEngine, guided_backend, spelling_model
from tests.support.worker.plan_driver import Sequence

PROMPT = [5, 17, 31, 8]
SCHEMA = {
    "type": "object",
    "properties": {
        "location": {"enum": ["Paris", "Rome"]},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "additionalProperties": False,
    "required": ["location", "unit", "days"],
}
FORCING = Grammar("json", json.dumps(SCHEMA), compact=True)
GREEDY = SamplingOptions(seed=0, temperature=0.0)
RANDOM = SamplingOptions(seed=11, temperature=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return spelling_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def path(model: TinyModel) -> Path:
    return model.path


@pytest.fixture(scope="module")
def engine(path: Path) -> GuidedEngine:
    return GuidedEngine(guided_backend(path))


@pytest.fixture(scope="module")
def drafting(path: Path) -> GuidedEngine:
    """The same, with tokens that grammars force drafted."""
    return GuidedEngine(guided_backend(path), speculate=8)


@pytest.fixture(scope="module")
def looking_up(path: Path) -> GuidedEngine:
    """The same, with n-grams drafted too."""
    return GuidedEngine(
        guided_backend(path, SpeculationSettings(method="ngram", num_speculative_tokens=4)), speculate=8
    )


def closing(engine: GuidedEngine) -> tuple[tuple[int, float], ...]:
    """A leaning to tokens that end strings and lists: random weights would go on for ever."""
    pieces = engine.compiler.spelling().pieces
    ends = [token for token, piece in enumerate(pieces) if piece[:1] in (b'"', b"]", b"}")]
    return tuple((token, 4.0) for token in [*ends, *engine.stops])


def documents(engine: GuidedEngine, chosen: list[Case], most: int) -> tuple[int, int]:
    """Checks a document for each of `chosen`: how many were written, and how many more were cut."""
    written = cut = 0
    bias = closing(engine)
    for first in range(0, len(chosen), AT_ONCE):
        batch: list[tuple[Case, Sequence]] = []
        for number, case in enumerate(chosen[first : first + AT_ONCE], start=first):
            sampling = SamplingOptions(seed=number, temperature=1.0, logit_bias=bias)
            try:
                batch.append((case, engine.add(PROMPT, case.grammar(compact=number % 3 > 0), sampling, most)))
            except GrammarRefused:
                continue
        engine.run()
        for case, sequence in batch:
            text = engine.text(sequence)
            cut += text is None
            if text is not None:
                written += 1
                assert case.valid(json.loads(text)), (case.name, case.schema, text)
    return written, cut


@pytest.mark.slow
def test_documents_of_a_model_with_random_weights_satisfy_their_schemas(engine: GuidedEngine) -> None:
    written, cut = documents(engine, cases()[::3], most=100)
    assert written > 130
    assert cut < written / 3


def test_documents_satisfy_their_schemas_while_drafts_are_verified(looking_up: GuidedEngine) -> None:
    before = looking_up.drafted
    written, _ = documents(looking_up, practical()[::4], most=120)
    assert written > 15
    assert looking_up.drafted > before


def test_documents_of_the_demo_model_satisfy_their_schemas() -> None:
    engine = GuidedEngine(guided_backend(DEMO_MODEL), speculate=8)
    written, _ = documents(engine, practical()[2::4], most=80)
    assert written > 12


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_forced_tokens_change_no_output_and_save_steps(
    engine: GuidedEngine, drafting: GuidedEngine, sampling: SamplingOptions
) -> None:
    plain = engine.add(PROMPT, FORCING, sampling)
    engine.run()
    jumped = drafting.add(PROMPT, FORCING, sampling)
    driver = drafting.driver
    drafting.run()
    assert jumped.output == plain.output
    assert driver.drafted > 0


@pytest.mark.slow
def test_forced_tokens_are_accepted_by_a_model_that_spells_as_its_tokenizer_does() -> None:
    plain, jumping = (GuidedEngine(guided_backend(DEMO_MODEL), speculate=count) for count in (0, 8))
    outputs = []
    for engine in (plain, jumping):
        sequence, driver = engine.add(PROMPT, FORCING, GREEDY), engine.driver
        engine.run()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert driver.accepted >= 4


def test_requests_without_a_grammar_are_not_changed_by_neighbours_with_one(engine: GuidedEngine) -> None:
    def mixed(grammar: Grammar | None) -> list[list[int]]:
        free = [engine.add([7, 9 + i], None, sampling, 30) for i, sampling in enumerate((GREEDY, RANDOM))]
        for _ in range(3 if grammar is not None else 0):
            engine.add(PROMPT, grammar, RANDOM, 30)
        engine.run()
        return [sequence.output for sequence in free]

    assert mixed(FORCING) == mixed(None)


def test_sequences_with_a_grammar_have_chains_beside_trees(
    engine: GuidedEngine, model: TinyModel, tmp_path: Path
) -> None:
    head = str(make_eagle(model, tmp_path / "eagle"))
    trees = SpeculationSettings(
        method="eagle",
        num_speculative_tokens=4,
        model=head,
        speculative_eagle_topk=3,
        speculative_eagle_min_path_prob=0.0,
    )
    branching, said = GuidedEngine(guided_backend(model.path, trees), speculate=8), []
    for each in (engine, branching):
        asked = [
            each.add([7, 9 + number], FORCING if number % 2 else None, sampling, 30)
            for number, sampling in enumerate((GREEDY, GREEDY, RANDOM, RANDOM))
        ]
        each.run()
        said.append([one.output for one in asked])
    assert said[0] == said[1]
    assert branching.drafted > 0


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_state_rebuilt_by_replay_equals_the_live_one(
    engine: GuidedEngine, drafting: GuidedEngine, sampling: SamplingOptions
) -> None:
    """After a preemption, and on an engine that resumes what another has put out."""
    live = engine.add(PROMPT, FORCING, sampling)
    engine.run()
    cuts = range(1, len(live.output), 3)
    preempted = {cut: engine.add(PROMPT, FORCING, sampling) for cut in cuts}
    resumed = [drafting.add(PROMPT, FORCING, sampling, output=live.output[:cut]) for cut in cuts]
    for step in range(1, len(live.output)):
        engine.driver.step()
        if step in preempted:
            engine.driver.preempt(preempted[step])
    engine.run()
    drafting.run()
    assert [sequence.output for sequence in (*preempted.values(), *resumed)] == [live.output] * 2 * len(cuts)


def test_grammars_of_the_other_back_end_are_drafted_ahead_and_replayed_alike(path: Path) -> None:
    """What forced tokens, n-grams and preemption leave of a document is what one step after another writes."""
    ngrams = SpeculationSettings(method="ngram", num_speculative_tokens=4)
    plain, drafting = (
        GuidedEngine(guided_backend(path, method, "llguidance"), speculate=ahead)
        for method, ahead in ((None, 0), (ngrams, 8))
    )
    live = [plain.add(PROMPT, FORCING, sampling) for sampling in (GREEDY, RANDOM)]
    plain.run()
    drafted = [drafting.add(PROMPT, FORCING, sampling) for sampling in (GREEDY, RANDOM)]
    drafting.driver.step()
    drafting.driver.step()
    drafting.driver.preempt(drafted[0])
    driver = drafting.driver
    drafting.run()
    assert [sequence.output for sequence in drafted] == [sequence.output for sequence in live]
    assert driver.drafted > 0
    assert all(json.loads(plain.text(sequence) or "")["days"] in range(1, 15) for sequence in live)
    with pytest.raises(GrammarRefused, match="structural tags need --grammar-backend xgrammar or auto"):
        plain.add(PROMPT, Grammar("structural_tag", "{}"), GREEDY)


def test_everything_else_that_a_request_asks_for_holds_beside_the_grammar(engine: GuidedEngine) -> None:
    """And where both cannot hold, the grammar does."""
    digits = Grammar("regex", "[0-9]{4}")
    pieces = engine.compiler.spelling().pieces
    of = {piece: token for token, piece in reversed(list(enumerate(pieces)))}
    asked: dict[str, Any] = {
        "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 50.0},
        "cuts": {"top_k": 1, "top_p": 0.5, "min_p": 0.5},
        "bias": {"logit_bias": ((of[b"7"], 100.0),)},
        "bad words": {"bad_words": tuple((of[b"%d" % digit],) for digit in range(9))},
        "log-probabilities": {"logprobs": 2},
    }
    drawn = {
        what: engine.add(PROMPT, digits, SamplingOptions(seed=3, temperature=1.0, **more))
        for what, more in asked.items()
    }
    late = engine.add(PROMPT, digits, RANDOM, min_tokens=30)
    engine.run()
    texts = {what: engine.text(sequence) or "" for what, sequence in drawn.items()}
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts.values()), texts
    assert texts["bias"] == "7777"
    assert texts["bad words"] == "9999"
    assert re.fullmatch("[0-9]{4}", engine.text(late) or ""), "the end of the grammar comes before min_tokens"


EXPRESSIONS: list[tuple[Grammar, str]] = [
    (Grammar("regex", r"(\d{1,3}\.){3}\d{1,3}"), r"(\d{1,3}\.){3}\d{1,3}"),
    (Grammar("regex", "[a-f]+(, [a-f]+){0,2}!"), "[a-f]+(, [a-f]+){0,2}!"),
    (Grammar("choice", '["yes", "no", "söder \\"x\\" \\\\ 😀", "new\\nline"]'), 'yes|no|söder "x" \\\\ 😀|new\nline'),
    (Grammar("grammar", 'root ::= part ("+" part)*\npart ::= [0-9] | "(" root ")"'), r"[0-9+()]+"),
    (Grammar("grammar", 'root ::= "é" [α-ω]{2,4}'), "é[α-ω]{2,4}"),
]


@pytest.mark.parametrize(("grammar", "expression"), EXPRESSIONS, ids=lambda value: str(value)[:40])
def test_output_matches_expressions_as_a_whole(drafting: GuidedEngine, grammar: Grammar, expression: str) -> None:
    bias = closing(drafting)
    drawn = [
        drafting.add(PROMPT, grammar, SamplingOptions(seed=seed, temperature=1.0, logit_bias=bias), 60)
        for seed in range(12)
    ]
    drafting.run()
    texts = [text for sequence in drawn if (text := drafting.text(sequence)) is not None]
    assert len(texts) > 6
    assert all(re.fullmatch(expression, text) for text in texts), texts


def test_a_grammar_binds_behind_its_mark(engine: GuidedEngine) -> None:
    """What comes before, and what stands behind the mark in its own token, is the model's affair."""
    mark = "z"
    behind = Grammar("regex", "[0-9]{3}", after=mark)
    drawn = [engine.add([11, seed], behind, SamplingOptions(seed=seed, temperature=1.5), 120) for seed in range(24)]
    engine.run()
    pieces = engine.compiler.spelling().pieces
    texts = [[pieces[token].decode(errors="replace") for token in sequence.output] for sequence in drawn]
    bound = ["".join(text[place + 1 :]) for text in texts if (place := first_with(mark, text)) is not None]
    assert any(text.endswith("</s>") for text in bound)
    assert all(re.fullmatch(r"\d{3}</s>|\d{0,3}", text) for text in bound), bound


def first_with(mark: str, pieces: list[str]) -> int | None:
    return next((place for place, piece in enumerate(pieces) if mark in piece), None)
