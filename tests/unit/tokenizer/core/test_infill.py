"""Text around a gap is put together as models of code publish it, and what they write behind a gap ends the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.config import TokenizerConfig
from services.tokenizer.core.chat_template import ChatTemplates
from services.tokenizer.core.encoder import PromptEncoder
from services.tokenizer.core.vocabulary import Vocabulary
from shared.config import ConfigError, load_config
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestRejected
from shared.messages.generation import StopConditions
from shared.messages.tokenizer import Encode, EncodeReply, InfillPrompt
from shared.models.tokenizer_files import load_tokenizer
from shared.packing import unpack
from tests.support.models import tiny_tokenizers
from tests.unit.tokenizer.core.test_encoder import tokenize

GAP = InfillPrompt("def add(a, b):\n    return ", "\n\nprint(add(1, 2))")


def encoder(folder: Path, marks: list[str], template: str | None = None) -> tuple[PromptEncoder, Tokenizer]:
    """Of a byte-level vocabulary with these added tokens, which are not special, as Qwen's are not."""
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    files = load_tokenizer(tiny_tokenizers.write_model(folder, tokenizer))
    made = PromptEncoder(Vocabulary(files), ChatTemplates({}), files.special_tokens, infill_template=template)
    return made, files.tokenizer


def route(made: PromptEncoder, prompt: InfillPrompt = GAP) -> Route:
    found = made.route(tokenize(prompt), prompt)
    assert isinstance(found, Route)
    return found


@pytest.mark.parametrize(
    ("marks", "published"),
    [
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix>{}<fim_suffix>{}<fim_middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]{1}[PREFIX]{0}"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral"],
)
def test_a_prompt_is_as_the_models_authors_write_it(tmp_path: Path, marks: list[str], published: str) -> None:
    made, tokenizer = encoder(tmp_path, [*marks, "<|fim_pad|>", "<file_sep>"])
    expected = tokenizer.encode(published.format(GAP.prefix, GAP.suffix)).ids
    generation = route(made).generation
    assert unpack(generation.tokens) == expected
    ends = {tokenizer.token_to_id(each) for each in (*marks, "<|fim_pad|>", "<file_sep>")}
    assert ends == set(generation.stopping.stop_token_ids)
    shown = made.answer(Encode(GAP))
    assert isinstance(shown, EncodeReply)
    assert unpack(shown.tokens) == expected


def test_stops_of_the_client_stay_and_ignore_eos_adds_none(tmp_path: Path) -> None:
    made, _ = encoder(tmp_path, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    for ignore_eos, count in ((False, 4), (True, 1)):
        own = StopConditions(stop_token_ids=(5,), ignore_eos=ignore_eos)
        found = made.route(replace(tokenize(GAP), stopping=own), GAP)
        assert isinstance(found, Route)
        assert len(found.generation.stopping.stop_token_ids) == count
        assert found.generation.stopping.stop_token_ids[0] == 5


def test_a_template_of_the_operators_goes_before_the_vocabulary(tmp_path: Path) -> None:
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<gap>"]
    made, tokenizer = encoder(tmp_path, marks, "<fim_suffix>{suffix}<fim_prefix>{prefix}<gap>")
    text = f"<fim_suffix>{GAP.suffix}<fim_prefix>{GAP.prefix}<gap>"
    assert unpack(route(made).generation.tokens) == tokenizer.encode(text).ids
    assert set(route(made).generation.stopping.stop_token_ids) == set(map(tokenizer.token_to_id, marks))
    braces = InfillPrompt("{suffix}", "{prefix}{}")
    text = "<fim_suffix>{prefix}{}<fim_prefix>{suffix}<gap>"
    assert unpack(route(made, braces).generation.tokens) == tokenizer.encode(text).ids


def test_a_model_without_such_tokens_refuses_a_suffix(tmp_path: Path) -> None:
    made, _ = encoder(tmp_path, ["<fim_prefix>", "<fim_suffix>"])
    refused = made.route(tokenize(GAP), GAP)
    assert isinstance(refused, RequestRejected)
    assert (refused.kind, refused.field) == ("invalid_request", "suffix")
    assert "tokenizer.infill_template" in refused.message


@pytest.mark.parametrize("template", ["{prefix}", "{prefix}{suffix}{suffix}"])
def test_a_template_without_both_texts_ends_the_start(template: str) -> None:
    with pytest.raises(ConfigError, match=r"infill_template = .*: must have \{prefix\} and \{suffix\}, each once"):
        load_config("tokenizer", TokenizerConfig, ["--model=/model", f"--infill-template={template}"], {})
