"""OpenAI's Decisions API on the whole stack, by its own SDK: probabilities are those of a chat's first token."""

from __future__ import annotations

import asyncio
import math
from itertools import chain
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.stack import RunningStack

LETTER = "Where is my parcel? I ordered it three weeks ago."
PLEASE = "Answer with the letter of one option and nothing else."
QUESTIONS: Any = [
    {"type": "predicate", "name": "late", "instructions": "The parcel is late."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Who answers?"}, {"type": "input_json", "data": {"a": 1}}],
        "choices": [{"value": "shipping", "description": "parcels"}, {"value": "true"}, {"value": True}],
    },
    {"type": "score", "name": "mood", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "angry"}]},
]
READ = [
    f"Question: The parcel is late.\nA: false\nB: true\n{PLEASE}",
    f'Question: Who answers?\n{{"a":1}}\nA: "shipping" - parcels\nB: "true"\nC: true\n{PLEASE}',
    f"Question: How angry?\nA: calm\nB: angry\n{PLEASE}",
]
"""What the model reads of each."""


@pytest.fixture(scope="module", params=["ring", "pools"])
def stack(request: pytest.FixtureRequest) -> RunningStack:
    return request.getfixturevalue(request.param)


async def first_token(client: AsyncOpenAI, model: str, messages: Any, letters: str) -> tuple[list[float], Any]:
    """How likely each letter is as the first token of a chat's answer, with or without a space, and what the chat
    counted."""
    of_letters = [
        [*await one_token(client, model, each), *await one_token(client, model, f" {each}")] for each in letters
    ]
    ids = list(chain.from_iterable(of_letters))
    more = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True, "ignore_eos": True}
    more["chat_template_kwargs"] = {"enable_thinking": False}
    chat: Any = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=1, temperature=0, logprobs=True, extra_body=more
    )
    [position] = chat.choices[0].logprobs.content
    found = {each.token: each.logprob for each in (*position.top_logprobs, position)}
    return [sum(math.exp(found[f"token_id:{token}"]) for token in tokens) for tokens in of_letters], chat.usage


async def one_token(client: AsyncOpenAI, model: str, text: str) -> list[int]:
    """The token that is this text; none where it takes several."""
    url = str(client.base_url).removesuffix("/v1/")
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = (await http.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
    return tokens if len(tokens) == 1 else []


async def test_each_answer_is_made_of_the_letters_probabilities(stack: RunningStack, client: AsyncOpenAI) -> None:
    decision = await client.decisions.create(model=stack.model, input=LETTER, questions=QUESTIONS)
    asked = [[{"role": "user", "content": f"{LETTER}\n\n{text}"}] for text in READ]
    read = [
        await first_token(client, stack.model, messages, letters)
        for messages, letters in zip(asked, ("AB", "ABC", "AB"), strict=True)
    ]
    late, who, mood = decision.answers
    shares = [[each / sum(found) for each in found] for found, _ in read]
    assert (late.type, late.name, who.type, who.name, mood.type, mood.name) == (
        *("predicate", "late", "choice", None, "score", "mood"),
    )
    assert late.type == "predicate"
    assert late.probability == pytest.approx(shares[0][1], rel=1e-3)
    assert who.type == "choice"
    assert [each.value for each in who.probabilities] == ["shipping", "true", True]
    assert [each.probability for each in who.probabilities] == pytest.approx(shares[1], rel=1e-3)
    assert who.choice == who.probabilities[shares[1].index(max(shares[1]))].value
    assert who.confidence == pytest.approx(max(read[1][0]), rel=1e-3)
    assert mood.type == "score"
    assert [(each.value, each.label) for each in mood.probabilities] == [(0, "calm"), (1, "angry")]
    assert mood.score == pytest.approx(shares[2][1], rel=1e-3)
    assert decision.model == stack.model
    assert decision.usage.input_tokens == sum(counted.prompt_tokens for _, counted in read)
    assert decision.usage.output_tokens == len(QUESTIONS)


async def test_an_input_of_messages_is_a_chat(stack: RunningStack, client: AsyncOpenAI) -> None:
    """A question follows what a user said, or is a turn of its own."""
    said: Any = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_text", "text": LETTER}, {"type": "input_json", "data": [{}]}]},
    ]
    told: Any = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": f"{LETTER}\n[{{}}]"}]
    answered: Any = {"role": "assistant", "content": "I do not know."}
    for input_items, messages in (
        (said, [told[0], {"role": "user", "content": f"{told[1]['content']}\n\n{READ[0]}"}]),
        ([*said, answered], [*told, answered, {"role": "user", "content": READ[0]}]),
    ):
        decision = await client.decisions.create(model=stack.model, input=input_items, questions=QUESTIONS[:1])
        (false, true), counted = await first_token(client, stack.model, messages, "AB")
        assert decision.answers[0].type == "predicate"
        assert decision.answers[0].probability == pytest.approx(true / (true + false), rel=1e-3)
        assert decision.usage.input_tokens == counted.prompt_tokens


async def test_many_questions_share_what_is_computed_of_their_input(stack: RunningStack, client: AsyncOpenAI) -> None:
    questions = [{**QUESTIONS[0], "instructions": f"Statement {i}."} for i in range(20)]
    asked: Any = {"model": stack.model, "input": LETTER * 6, "questions": questions}
    both = await asyncio.gather(client.decisions.create(**asked), client.decisions.create(**asked))
    first, second = (decision.answers for decision in both)
    assert len(first) == len(questions)
    assert first == second
    again = await client.decisions.create(**asked)
    assert again.usage.input_tokens_details.cached_tokens > 0.5 * again.usage.input_tokens
