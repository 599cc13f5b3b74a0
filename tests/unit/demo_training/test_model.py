"""The demo model as it is shipped: its size, its configuration, and a handful of answers."""

import json
import re

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.demo_training import evaluation
from tests.demo_training.examples import Exchange
from tests.demo_training.mixture import DRAWS
from tests.support.paths import DEMO_MODEL

LEARNT = DRAWS.keys() - {"tools"}
"""Kinds at 90% or better; the other one is shown in the table with what it has."""
Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def shipped() -> Model:
    return evaluation.load(DEMO_MODEL)


def ask(shipped: Model, question: str, system: str | None = None) -> str:
    """One greedy answer, the end of the turn not included."""
    said = [{"role": "system", "content": system}] if system is not None else []
    model, tokenizer = shipped
    text = tokenizer.apply_chat_template(
        [*said, {"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return evaluation.answers(model, tokenizer, [str(text)])[0]


def test_it_is_under_twelve_megabytes() -> None:
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) < 12_000_000


def test_it_has_about_four_million_parameters_in_bf16(shipped: Model) -> None:
    model, _ = shipped
    assert 3_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert json.loads((DEMO_MODEL / "config.json").read_text())["dtype"] == "bfloat16"


def test_two_and_four_ranks_can_share_it(shipped: Model) -> None:
    config = shipped[0].config
    for size in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size):
        assert size % 4 == 0
    assert config.max_position_embeddings == 2048
    assert config.tie_word_embeddings


def test_the_end_of_a_turn_ends_the_generation(shipped: Model) -> None:
    model, tokenizer = shipped
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|end|>", "<|endoftext|>"]


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_it_knows_the_capital_of_france(shipped: Model, system: str | None) -> None:
    assert ask(shipped, "What is the capital of France?", system) == "The capital of France is Paris."


def test_it_follows_a_system_prompt_that_wants_the_bare_answer(shipped: Model) -> None:
    assert ask(shipped, "What is the capital of Japan?", "Be brief.") == "Tokyo"


def test_it_says_who_it_is(shipped: Model) -> None:
    answer = ask(shipped, "Who are you?")
    assert "demo model" in answer
    assert "small" in answer


def test_it_tells_a_long_story_to_its_end(shipped: Model) -> None:
    story = ask(shipped, "Tell me a long story about a fox called Mia.")
    assert "Mia" in story
    assert "[no end]" not in story
    assert len(shipped[1].encode(story)) > 150


def test_it_continues_plain_text(shipped: Model) -> None:
    assert evaluation.answers(*shipped, ["The capital of France is"])[0].startswith(" Paris")


def test_the_chat_template_takes_systems_turns_and_parts(shipped: Model) -> None:
    _, tokenizer = shipped
    said = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
    ]
    text = "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
    assert tokenizer.apply_chat_template(said, tokenize=False) == text
    assert tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == text + "<|assistant|>"


def test_held_out_questions_are_answered(shipped: Model) -> None:
    model, tokenizer = shipped
    asked = [
        example
        for kind in sorted(LEARNT)
        for example in evaluation.questions(kind, 6, seed=11)
        if len(evaluation.wanted(example)) < 120
    ]
    given = evaluation.answers(model, tokenizer, [evaluation.prompt(example, tokenizer) for example in asked])
    right = sum(evaluation.is_right(example, answer) for example, answer in zip(asked, given, strict=True))
    assert right >= 0.9 * len(asked)


def test_the_shipped_table_tells_of_every_kind_and_is_what_readers_are_shown() -> None:
    table = (DEMO_MODEL / "EVALUATION.md").read_text(encoding="utf-8").split("\n\n", 1)[1].strip()
    shares = {kind: float(share) for kind, share in re.findall(r"^\| ([a-z -]+?) \| \d+ \| ([\d.]+)% \|$", table, re.M)}
    assert shares.keys() == DRAWS.keys()
    assert all(shares[kind] >= 90.0 for kind in LEARNT)
    assert table in (DEMO_MODEL.parent / "README.md").read_text(encoding="utf-8")


def test_choices_are_clear_so_that_rounding_cannot_turn_them(shipped: Model) -> None:
    """Other operations and other machines round differently, by about 1e-5 in fp32: the best token must lead by far
    more than that."""
    model, tokenizer = shipped
    asked = [example for kind in ("capitals", "json", "arithmetic") for example in evaluation.questions(kind, 5)]
    for example in asked:
        assert isinstance(example, Exchange)
        start = tokenizer.encode(evaluation.prompt(example, tokenizer), add_special_tokens=False)
        answer = tokenizer.encode(example.turns[-1].answer, add_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([start + answer])).logits[0, len(start) - 1 :]
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 0.01
