"""The demo model's text: the same for the same seed, and never a held-out question in it."""

import json
import re
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer

from tests.demo_training import evaluation
from tests.demo_training.architecture import END_OF_TEXT_ID, END_OF_TURN_ID
from tests.demo_training.examples import Example, Exchange, Kind, Passage, draw_for_training, draw_held_out, is_held_out
from tests.demo_training.mixture import DRAWS, training_examples
from tests.demo_training.packing import ROW_LENGTHS, Encoder, batches, fill_rows
from tests.demo_training.texts import capitals, letters, passages, records, stories
from tests.demo_training.vocabulary import CHAT_TEMPLATE, VOCABULARY_SIZE, save_tokenizer, train_tokenizer

pytestmark = pytest.mark.slow

KINDS = tuple(DRAWS)
SAMPLE = 6_000


@pytest.fixture(scope="module")
def sample() -> list[Example]:
    return list(islice(training_examples(1), SAMPLE))


@pytest.fixture(scope="module")
def tokenizer(sample: list[Example]) -> Tokenizer:
    return train_tokenizer(sample)


def asked(example: Example) -> str:
    """What decides the answer: the system prompt and every turn up to the last question, or the passage's beginning."""
    if isinstance(example, Passage):
        return example.prompt
    earlier = [f"{turn.question}\n{turn.answer}" for turn in example.turns[:-1]]
    return "\n".join([example.system or "", *earlier, example.turns[-1].question])


def test_the_same_seed_gives_the_same_text(sample: list[Example]) -> None:
    assert list(islice(training_examples(1), 500)) == sample[:500]


def test_another_seed_gives_another_text(sample: list[Example]) -> None:
    assert list(islice(training_examples(2), 500)) != sample[:500]


def test_no_training_example_has_a_held_out_key(sample: list[Example]) -> None:
    assert not [example.key for example in sample if is_held_out(example)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_question_occurs_in_training(kind: Kind) -> None:
    rng = Random(3)
    trained = {asked(draw_for_training(DRAWS[kind], rng)) for _ in range(3_000)}
    held_out = {asked(draw_held_out(DRAWS[kind], rng)) for _ in range(300)}
    assert not trained & held_out


@pytest.mark.parametrize("kind", KINDS)
def test_the_evaluation_asks_different_held_out_questions(kind: Kind) -> None:
    questions = evaluation.questions(kind, 40)
    assert len({example.key for example in questions}) == 40
    assert all(is_held_out(example) for example in questions)
    assert questions == evaluation.questions(kind, 40)


def test_held_out_sums_are_held_out_in_both_orders_and_in_plain_text() -> None:
    rng = Random(4)
    kinds: tuple[Kind, ...] = ("arithmetic", "completion")
    trained = "\n".join(asked(draw_for_training(DRAWS[kind], rng)) for kind in kinds for _ in range(4_000))
    for _ in range(300):
        key = draw_held_out(DRAWS["arithmetic"], rng).key
        if key.startswith("arithmetic|add"):
            _, a, b = key.split()
            for first, second in ((a, b), (b, a)):
                assert not re.search(rf"\b{first}( plus | \+ |\+| and ){second}\b", trained), key


def test_every_country_has_one_capital_and_the_table_is_whole() -> None:
    assert len(capitals.CAPITALS) > 190
    assert all(country and capital and country == country.strip() for country, capital in capitals.CAPITALS.items())
    assert capitals.full_answer("the United States") == "The capital of the United States is Washington, D.C."


def test_json_answers_parse_and_hold_words_of_the_question() -> None:
    rng = Random(5)
    for _ in range(200):
        turn = records.draw(rng).turns[0]
        assert all(str(value) in turn.question for value in json.loads(turn.answer).values())


def test_spelling_answers_are_the_letters_of_the_word() -> None:
    rng = Random(6)
    for _ in range(200):
        turn = letters.spell(rng).turns[0]
        assert turn.answer.replace("-", "") in turn.question.lower()


def test_the_judge_of_stories_accepts_what_the_grammar_tells() -> None:
    rng = Random(8)
    told = [stories.draw(rng).turns[0] for _ in range(200)]
    assert all(stories.is_good(turn.question, turn.answer) for turn in told)


def test_the_judge_of_stories_refuses_another_hero_a_cut_story_and_a_stuck_one() -> None:
    rng = Random(9)
    told = [stories.draw(rng).turns[0] for _ in range(50)]
    for turn in told:
        cut = turn.answer.rsplit(". ", 1)[0]
        stuck = turn.answer + " " + turn.answer
        assert not stories.is_good(turn.question, cut)
        assert not stories.is_good(turn.question, stuck)
    foxes = [turn for turn in told if " fox" in turn.question]
    others = [turn for turn in told if "fox" not in turn.question + turn.answer]
    assert not any(stories.is_good(fox.question, other.answer) for fox in foxes for other in others)


def test_a_chat_is_encoded_as_the_chat_template_writes_it(tokenizer: Tokenizer, tmp_path, sample) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 2048)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    encoder = Encoder(tokenizer)
    for example in sample[:200]:
        if isinstance(example, Exchange):
            said = [*evaluation.messages(example), {"role": "assistant", "content": example.turns[-1].answer}]
            text = reader.apply_chat_template(said, tokenize=False)
            assert encoder.document(example)[0] == reader.encode(text, add_special_tokens=False)[: ROW_LENGTHS[-1]]
    assert reader.chat_template == CHAT_TEMPLATE


def test_the_tokenizer_gives_back_any_text_and_splits_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    for text in ("34 + 57 = 91", "こんにちは 🚀", "a\tb\n\n  c", '{"name": "Zoë"}'):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("123").tokens == ["1", "2", "3"]
    assert tokenizer.token_to_id("<|endoftext|>") == END_OF_TEXT_ID
    assert tokenizer.token_to_id("<|end|>") == END_OF_TURN_ID


def test_documents_share_rows_without_seeing_each_other(tokenizer: Tokenizer, sample: list[Example]) -> None:
    encoder = Encoder(tokenizer)
    documents = [encoder.document(example) for example in sample[:60]]
    rows = fill_rows(documents)
    assert sum(len(row) for length in rows for row in rows[length]) == len(documents)
    learnt = 0
    for batch in batches(documents, 4096):
        learnt += int((batch.targets >= 0).sum())
        starts = (batch.positions == 0) & (batch.ids != END_OF_TEXT_ID)  # the rest of a row is filled with it
        # Where a document starts, attention sees that one position and nothing before it.
        assert bool((batch.mask[:, 0].sum(-1)[starts] == 1).all())
        shifted = batch.ids.roll(-1, dims=1)
        wanted = batch.targets >= 0
        assert bool((batch.targets[wanted] == shifted[wanted]).all())
    assert learnt == sum(sum(counts[1:]) for _, counts in documents)


def test_a_passage_about_capitals_may_go_on_with_what_is_true_and_with_nothing_else() -> None:
    assert passages.states_capitals("The capital of Ghana is Accra.")
    assert passages.states_capitals("The capital of Ghana is Accra. Eritrea's capital is Asmara.")
    assert passages.states_capitals("The capital of Mali is the city of Bamako.")
    assert not passages.states_capitals("The capital of Ghana is Accra. The capital of Eritrea is Accra.")
    assert not passages.states_capitals("The capital of Ghana is Accra. The")
    assert not passages.states_capitals("The capital of Ghana is Asmara.")


def test_only_passages_that_break_off_before_a_capital_are_judged_so() -> None:
    rng = Random(5)
    for _ in range(100):
        example = passages.capital(rng)
        assert passages.asks_capital(example.prompt)
        assert passages.states_capitals(example.prompt + example.continuation)
        assert not passages.asks_capital(passages.resident(rng).prompt)
        assert not passages.asks_capital(passages.sum_of(rng).prompt)
