"""What answers tell of prompts and of tokens, in vLLM's and OpenAI's shapes, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import MODEL, said, word
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

PROMPT = "one two three"
"""Three tokens for the fake ring: 0, 1 and 2."""


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


async def complete(stack: GatewayStack, **fields: Any) -> dict[str, Any]:
    answer = await stack.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def chat(stack: GatewayStack, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    answer = await stack.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def streamed(stack: GatewayStack, endpoint: str, **fields: Any) -> list[dict[str, Any]]:
    async with stack.http.stream("POST", f"/v1/{endpoint}", json={**fields, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def tokenizes(stack: GatewayStack) -> list[Tokenize]:
    return [message for message in stack.ring.seen if isinstance(message, Tokenize)]


SCORES = [
    None,
    {
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": word(1)},
        "2": {"logprob": -1.5, "rank": 2, "decoded_token": word(2)},
    },
    {
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": word(2)},
        "3": {"logprob": -1.5, "rank": 2, "decoded_token": word(3)},
    },
]


async def test_a_completion_tells_them_with_each_choice(stack: GatewayStack) -> None:
    answer = await complete(stack, prompt_logprobs=2, n=2)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [SCORES, SCORES]
    assert (await complete(stack))["choices"][0]["prompt_logprobs"] is None


async def test_a_chat_tells_them_once(stack: GatewayStack) -> None:
    answer = await chat(stack, prompt_logprobs=2)
    assert answer["prompt_logprobs"] == SCORES
    assert answer["usage"]["prompt_tokens"] == 3


async def test_no_most_likely_tokens_are_asked_for_with_zero(stack: GatewayStack) -> None:
    answer = await chat(stack, prompt_logprobs=0)
    assert [None if entry is None else list(entry) for entry in answer["prompt_logprobs"]] == [None, ["1"], ["2"]]


async def test_a_request_whose_scores_were_lost_is_tried_again(stack: GatewayStack) -> None:
    answer = await complete(stack, prompt=f"{PROMPT} UNSCORED", prompt_logprobs=1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == 4
    assert answer["choices"][0]["text"] == said(2)
    assert [message.attempt for message in tokenizes(stack)] == [1, 2]


async def test_an_attempt_that_goes_on_behind_the_first_token_scores_nothing_again(stack: GatewayStack) -> None:
    await complete(stack, prompt=f"{PROMPT} FAIL", prompt_logprobs=1, max_tokens=8)
    assert [message.sampling.prompt_logprobs for message in tokenizes(stack)] == [1, None]


async def test_an_echo_is_scored_like_the_rest(stack: GatewayStack) -> None:
    answer = await complete(stack, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    shown = choice["logprobs"]
    assert choice["text"] == PROMPT + said(2)
    assert shown["tokens"] == [word(0), word(1), word(2), word(0), word(1)]
    assert shown["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert shown["top_logprobs"] == [None, *({token: -0.5} for token in shown["tokens"][1:])]
    assert shown["text_offset"][3:] == [len(PROMPT), len(PROMPT) + len(word(0))]
    assert choice["prompt_logprobs"] is None


async def test_an_echo_streams_its_scores_ahead(stack: GatewayStack) -> None:
    chunks = await streamed(stack, "completions", prompt=PROMPT, max_tokens=2, echo=True, logprobs=1, n=2)
    whole = (await complete(stack, echo=True, logprobs=1))["choices"][0]
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for c in own for value in c["logprobs"][name]] == values, name


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_is_the_prompt_and_its_scores(stack: GatewayStack, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        chunks = await streamed(stack, "completions", **fields, stream_options={"include_usage": True})
        (choice,), usage = chunks[0]["choices"], chunks[-1]["usage"]
    else:
        answer = await complete(stack, **fields)
        (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


async def test_token_ids_come_with_the_text(stack: GatewayStack) -> None:
    (choice,) = (await complete(stack, return_token_ids=True))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([0, 1, 2], [0, 1])
    answer = await chat(stack, return_token_ids=True)
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([0, 1, 2], [0, 1])
    assert (await complete(stack))["choices"][0]["token_ids"] is None


async def test_the_prompt_s_text_comes_where_it_is_wanted(stack: GatewayStack) -> None:
    (choice,) = (await complete(stack, return_prompt_text=True))["choices"]
    answer = await chat(stack, return_prompt_text=True)
    assert choice["prompt_text"] == PROMPT
    assert answer["prompt_text"] == "Paris is the"  # as the fake ring spells the three tokens
    assert choice["text"] == (await complete(stack))["choices"][0]["text"]
    assert "prompt_text" not in (await complete(stack))["choices"][0]


async def test_token_ids_are_streamed_the_prompts_once(stack: GatewayStack) -> None:
    chunks = await streamed(stack, "completions", prompt=PROMPT, max_tokens=3, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == [0, 1, 2]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[0, 1, 2], None, None]
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"messages": messages, "max_tokens": 3, "return_token_ids": True, "return_prompt_text": True}
    chunks = await streamed(stack, "chat/completions", **asked)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[0, 1, 2], None, None, None]
    assert [chunk.get("prompt_text") for chunk in chunks] == ["Paris is the", None, None, None]


async def test_tokens_may_be_named_by_their_ids(stack: GatewayStack) -> None:
    (choice,) = (await complete(stack, logprobs=1, echo=True, return_tokens_as_token_ids=True))["choices"]
    names = [f"token_id:{i}" for i in (0, 1, 2, 0, 1)]
    assert choice["logprobs"]["tokens"] == names
    assert [list(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [[name] for name in names[1:]]
    answer = await chat(stack, logprobs=True, return_tokens_as_token_ids=True)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], bytes(first["bytes"])) == ("token_id:0", b"token_id:0")


async def test_what_the_tokenizer_must_know_reaches_it(stack: GatewayStack) -> None:
    await complete(stack, bad_words=["Paris"], truncate_prompt_tokens=2, thinking_token_budget=5)
    (message,) = tokenizes(stack)
    assert (message.bad_words, message.truncate_prompt_tokens) == (("Paris",), 2)
    assert message.sampling.thinking_budget == 5
    assert message.model == MODEL


async def test_a_truncated_prompt_is_echoed_as_it_was_used(stack: GatewayStack) -> None:
    (choice,) = (await complete(stack, echo=True, truncate_prompt_tokens=2, return_token_ids=True))["choices"]
    assert choice["text"] == word(1) + word(2) + said(2)
    assert choice["prompt_token_ids"] == [1, 2]
    right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    (choice,) = (await complete(stack, echo=True, **right, return_token_ids=True))["choices"]
    assert (choice["text"], choice["prompt_token_ids"]) == (word(0) + word(1) + said(2), [0, 1])
    *_, message = tokenizes(stack)
    assert (message.truncate_prompt_tokens, message.truncation_side) == (2, "right")
