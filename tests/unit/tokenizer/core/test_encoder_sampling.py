"""Sampling parameters given as text become the token ids that vLLM makes of them; thoughts are bounded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.tokenizer.core.chat_template import ChatTemplates
from services.tokenizer.core.encoder import PromptEncoder
from services.tokenizer.core.template_files import read_templates
from services.tokenizer.core.vocabulary import Vocabulary
from shared.ids import Attempt, GatewayId, ModelName, RequestId
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestRejected
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.tokenizer import ChatPrompt, Prompt, TextPrompt, Tokenize, TokenPrompt
from shared.models.tokenizer_files import load_tokenizer
from shared.packing import pack, unpack
from tests.support.models import tiny_tokenizers
from tests.support.paths import DEMO_MODEL

THOUGHTS = "{%- if thinking == 'open' -%}<think>\n{%- elif thinking == 'closed' -%}<think>\n\n</think>\n\n{%- endif -%}"
CHAT = b'[{"role": "user", "content": "Hello"}]'


def encoding_of(folder: Path) -> PromptEncoder:
    files = load_tokenizer(folder)
    return PromptEncoder(Vocabulary(files), ChatTemplates(read_templates(files)), files.special_tokens)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with a template that knows thoughts."""
    folder = tmp_path_factory.mktemp("thinking")
    for path in DEMO_MODEL.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text((DEMO_MODEL / "chat_template.jinja").read_text() + THOUGHTS)
    return folder


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_fallback(strip=True))


def sent(encoding: PromptEncoder, prompt: Prompt, budget: int | None = None, **more: Any) -> Route | RequestRejected:
    message = Tokenize(
        request=RequestId("r"),
        attempt=Attempt(1),
        gateway=GatewayId("gateway-1"),
        model=ModelName("demo"),
        prompt=prompt,
        sampling=SamplingOptions(seed=7, thinking_budget=budget),
        stopping=StopConditions(),
        **more,
    )
    return encoding.route(message, prompt)


def routed(encoding: PromptEncoder, prompt: Prompt, **more: Any) -> Generation:
    outcome = sent(encoding, prompt, **more)
    assert isinstance(outcome, Route)
    return outcome.generation


def vllms(tokenizer: Any, words: list[str]) -> list[tuple[int, ...]]:
    """`SamplingOptions.update_from_tokenizer` of vLLM."""
    found: list[tuple[int, ...]] = []
    for word in words:
        for prefix in ("", " "):
            ids = tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            if not prefix or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


@pytest.mark.parametrize("model", ["demo", "byte fallback"])
def test_bad_words_are_those_of_vllm_and_what_it_forgets(model: str, byte_fallback: Path) -> None:
    folder = DEMO_MODEL if model == "demo" else byte_fallback
    words = ["Paris", " Paris", "the", "the lighthouse", "a", "Hello world", "ü", "  France"]
    found = routed(encoding_of(folder), TextPrompt("Hello"), bad_words=tuple(words)).sampling.bad_words
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert set(found) >= set(vllms(tokenizer, words))
    for word in words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            assert any(ids[-len(banned) :] == banned for banned in found), spelling


def test_a_word_of_too_many_tokens_is_refused() -> None:
    outcome = sent(encoding_of(DEMO_MODEL), TextPrompt("Hello"), bad_words=("\U0001f98a" * 60,))
    assert isinstance(outcome, RequestRejected)
    assert (outcome.kind, outcome.field) == ("invalid_request", "bad_words")
    assert "64" in outcome.message


def test_a_prompt_keeps_its_last_tokens_or_its_first() -> None:
    encoding = encoding_of(DEMO_MODEL)
    whole = unpack(routed(encoding, TextPrompt("Once upon a time there was a fox.")).tokens)
    cut = routed(encoding, TextPrompt("Once upon a time there was a fox."), truncate_prompt_tokens=4)
    assert (unpack(cut.tokens), cut.prompt_length) == (whole[-4:], 4)
    first = routed(encoding, TokenPrompt(pack(whole)), truncate_prompt_tokens=4, truncation_side="right")
    assert unpack(first.tokens) == whole[:4]
    longer = routed(encoding, TokenPrompt(pack([5, 6])), truncate_prompt_tokens=100, resume=pack([9]))
    assert (unpack(longer.tokens), longer.prompt_length) == ([5, 6, 9], 2)


def marks(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>"))
    return start, end


def test_a_prompt_that_opens_thoughts_spends_from_the_first_token(thinking: Path) -> None:
    for prompt in (ChatPrompt(messages=CHAT, template_kwargs={"thinking": "open"}), TextPrompt("Well. <think>\n")):
        sampling = routed(encoding_of(thinking), prompt, budget=9).sampling
        assert (sampling.thinking_budget, sampling.thinking_start, sampling.thinking_end) == (9, (), marks(thinking)[1])


def test_a_prompt_that_shows_nothing_bounds_what_the_output_begins(thinking: Path) -> None:
    for prompt in (ChatPrompt(messages=CHAT), TextPrompt("Well.")):
        sampling = routed(encoding_of(thinking), prompt, budget=9).sampling
        assert (sampling.thinking_budget, sampling.thinking_start, sampling.thinking_end) == (9, *marks(thinking))


def test_a_prompt_that_closed_its_thoughts_has_nothing_to_bound(thinking: Path) -> None:
    prompt = ChatPrompt(messages=CHAT, template_kwargs={"thinking": "closed"})
    assert routed(encoding_of(thinking), prompt, budget=9).sampling.thinking_budget is None


def test_a_model_without_thoughts_refuses_a_budget() -> None:
    outcome = sent(encoding_of(DEMO_MODEL), ChatPrompt(messages=CHAT), budget=9)
    assert isinstance(outcome, RequestRejected)
    assert (outcome.kind, outcome.field) == ("invalid_request", "thinking_token_budget")


def test_what_nobody_asks_for_is_left_as_it_is() -> None:
    assert routed(encoding_of(DEMO_MODEL), TextPrompt("Hello")).sampling == SamplingOptions(seed=7)
