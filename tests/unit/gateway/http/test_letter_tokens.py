"""Which tokens the letters of `/v1/decisions` are, and how often a tokenizer is asked for them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.api.decisions.request import read_decisions
from services.gateway.api.generation import GenerationRequest
from services.gateway.http.apis.decisions import MAX_ENDS, LetterTokens
from services.gateway.tokenizer_client import TokenizerClient
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt, Prompt, TextPrompt
from tests.support.models.tiny_tokenizers import byte_level
from tests.unit.gateway.api.test_every_field import CARD, LIMITS


class CountedTokenizer(TokenizerClient):
    """A tokenizer in this process; every chat ends in the last text that was said to it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def prompt_ids(self, generation: GenerationRequest, prompt: Prompt) -> list[int]:
        self.asked.append(type(prompt).__name__)
        text = prompt.text if isinstance(prompt, TextPrompt) else said(prompt)
        return byte_level().encode(text, add_special_tokens=False).ids

    async def text(self, model: ModelCard, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.asked.append("ids")
        return byte_level().decode(ids, skip_special_tokens=skip_special_tokens)


def said(prompt: Prompt) -> str:
    assert isinstance(prompt, ChatPrompt)
    messages = msgspec.json.decode(prompt.messages)
    return str(messages[-1]["content"])


def asked(text: str = "It rains.") -> GenerationRequest:
    question: dict[str, Any] = {"type": "predicate", "instructions": "Is it so?"}
    body = msgspec.json.encode({"input": text, "questions": [question]})
    return read_decisions(body, [CARD], LIMITS).generation


async def test_letters_are_the_tokens_that_they_are_behind_the_prompt() -> None:
    vocabulary, tokens = byte_level().get_vocab(), LetterTokens(CountedTokenizer())
    a, b = await tokens.behind(asked(), "AB")
    assert vocabulary["A"] in a
    assert vocabulary["B"] in b
    assert not set(a) & set(b)


async def test_a_tokenizer_is_asked_for_letters_once_for_a_model_and_an_end() -> None:
    tokenizer = CountedTokenizer()
    tokens, generation = LetterTokens(tokenizer), asked()
    first = await tokens.behind(generation, "AB")
    spelled = ["ids", *["TextPrompt"] * 5]
    assert tokenizer.asked == ["ChatPrompt", *spelled]
    del tokenizer.asked[:]
    assert await tokens.behind(asked("Another input."), "AB") == first
    assert tokenizer.asked == ["ChatPrompt"]
    del tokenizer.asked[:]
    assert (await tokens.behind(generation, "ABCD"))[:2] == first
    assert tokenizer.asked == ["ChatPrompt", *spelled], "of letters that were not asked for yet"
    del tokenizer.asked[:]
    reloaded = replace(generation, model=replace(generation.model, created=generation.model.created + 1))
    assert await tokens.behind(reloaded, "AB") == first
    assert tokenizer.asked == ["ChatPrompt", *spelled], "another model may have the name by now"


async def test_ends_that_were_not_asked_for_lately_are_forgotten() -> None:
    tokenizer = CountedTokenizer()
    tokens, generation = LetterTokens(tokenizer), asked()
    models = [replace(generation.model, created=i) for i in range(MAX_ENDS + 1)]
    for model in models[:MAX_ENDS]:
        await tokens.behind(replace(generation, model=model), "A")
    await tokens.behind(replace(generation, model=models[0]), "A")
    await tokens.behind(replace(generation, model=models[-1]), "A")
    del tokenizer.asked[:]
    await tokens.behind(replace(generation, model=models[0]), "A")
    assert tokenizer.asked == ["ChatPrompt"]
    await tokens.behind(replace(generation, model=models[1]), "A")
    assert tokenizer.asked.count("ids") == 1
