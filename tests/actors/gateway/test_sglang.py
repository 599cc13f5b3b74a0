"""SGLang's `/generate`, through a real gateway to a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import MODEL, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


async def generate(stack: GatewayStack, **fields: Any) -> Any:
    return (await stack.http.post("/generate", json=fields)).raise_for_status().json()


async def events(stack: GatewayStack, **fields: Any) -> list[Any]:
    answer = await stack.http.post("/generate", json={**fields, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_one_prompt_has_one_answer(stack: GatewayStack) -> None:
    answer = await generate(stack, text="hello you", sampling_params={"max_new_tokens": 4}, rid="mine")
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (said(4), [0, 1, 2, 3])
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 2,
        "weight_version": "default",
        "completion_tokens": 4,
        "cached_tokens": 1,
    }
    stack.ring.script = ["a", "b"]
    ended = await generate(stack, text="hello", sampling_params={"temperature": 0})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop"}
    assert ended["meta_info"]["id"].startswith("sglang-")


async def test_several_answers_are_a_list(stack: GatewayStack) -> None:
    answers = await generate(stack, text=["a b", "c"], sampling_params={"max_new_tokens": 2, "n": 2}, rid="r")
    assert [each["meta_info"]["id"] for each in answers] == ["r_0", "r_1", "r_2", "r_3"]
    assert [each["meta_info"]["prompt_tokens"] for each in answers] == [2, 2, 1, 1]
    [alone] = await generate(stack, input_ids=[[5, 6]], sampling_params={"max_new_tokens": 1})
    assert alone["text"] == said(1)
    assert (await generate(stack, input_ids=[5, 6], sampling_params={"max_new_tokens": 1}))["output_ids"] == [0]


async def test_events_of_a_stream_have_all_until_then(stack: GatewayStack) -> None:
    seen = await events(stack, text="hello", sampling_params={"max_new_tokens": 3}, return_logprob=True)
    assert [each["text"] for each in seen] == [said(1), said(2), said(3)]
    assert [each["output_ids"] for each in seen] == [[0], [0, 1], [0, 1, 2]]
    assert [each["meta_info"]["completion_tokens"] for each in seen] == [1, 2, 3]
    assert [len(each["meta_info"]["output_token_logprobs"]) for each in seen] == [1, 2, 3]
    assert [each["meta_info"]["finish_reason"] for each in seen[:2]] == [None, None]
    assert seen[2]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert {each["index"] for each in await events(stack, text=["a", "b"])} == {0, 1}


async def test_log_probabilities_have_ids_and_texts_where_wanted(stack: GatewayStack) -> None:
    asked: Any = {"text": "hello dear you", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = (await generate(stack, **asked))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 0, None], [-0.5, 1, None]]
    assert "input_token_logprobs" not in meta
    meta = (await generate(stack, **asked, top_logprobs_num=2, return_text_in_logprobs=True, logprob_start_len=0))[
        "meta_info"
    ]
    word = said(1)
    assert meta["output_token_logprobs"][0] == [-0.5, 0, word]
    assert [token for _, token, _ in meta["output_top_logprobs"][0]] == [0, 1]
    assert meta["input_token_logprobs"][0][0] is None
    assert [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]] == [-0.5, -0.5]
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [2, 2]
    later = (await generate(stack, **asked, logprob_start_len=2))["meta_info"]
    assert len(later["input_token_logprobs"]) == 1


async def test_parameters_arrive(stack: GatewayStack) -> None:
    params = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "sampling_seed": 9,
        "min_new_tokens": 1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "no_stop_trim": True,
        "regex": "a+",
    }
    await generate(stack, text="hello", sampling_params=params, priority=2, model=MODEL)
    [sent] = [each for each in stack.ring.seen if isinstance(each, Tokenize)]
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.seed) == (0.5, 7, 9)
    assert (sent.stopping.max_tokens, sent.stopping.min_tokens, sent.stopping.include_stop) == (128, 1, True)
    assert sent.stopping.stop == ("x",)
    assert sent.grammar is not None
    assert (sent.grammar.kind, sent.grammar.text, sent.priority) == ("regex", "a+", 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "nothing": 1}, "nothing"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"odd": 1}}, "sampling_params.odd"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ],
)
async def test_what_is_refused_is_named(stack: GatewayStack, fields: dict[str, Any], param: str) -> None:
    answer = await stack.http.post("/generate", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.ring.seen == []
