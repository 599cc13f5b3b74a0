"""The `openai` SDK drives every endpoint of a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from shared.bus.memory_bus import MemoryBus
from tests.support.gateway.fake_services import MODEL, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

HELLO: Any = [{"role": "user", "content": "hello you there"}]


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


async def test_a_chat_is_answered_whole(stack: GatewayStack) -> None:
    answer = await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", said(5), "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_is_streamed_in_the_order_that_clients_expect(stack: GatewayStack) -> None:
    stream = await stack.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    first, *contents, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.content for chunk in contents)
    assert [chunk.choices[0].finish_reason for chunk in contents] == [None] * len(contents)
    assert last.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == said(8)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_choices_differ_in_their_seeds_and_share_the_prompt(stack: GatewayStack) -> None:
    answer = await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, n=2, max_tokens=3, seed=40)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [said(3), said(3)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert sorted(message.sampling.seed for message in stack.ring.seen) == [40, 41]


async def test_several_choices_are_streamed_side_by_side(stack: GatewayStack) -> None:
    texts = {0: "", 1: ""}
    stream = await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, n=2, max_tokens=6, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: said(6), 1: said(6)}


@pytest.mark.parametrize("streamed", [False, True])
async def test_chats_show_log_probabilities(stack: GatewayStack, streamed: bool) -> None:
    arguments: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    content: list[Any] = []
    if streamed:
        async for chunk in await stack.openai.chat.completions.create(stream=True, **arguments):
            if chunk.choices[0].logprobs is not None:
                content += chunk.choices[0].logprobs.content
    else:
        answer = await stack.openai.chat.completions.create(**arguments)
        content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["Paris", " is"]
    assert bytes(content[0].bytes) == b"Paris"
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.5]


async def test_a_completion_is_answered_whole_and_defaults_to_16_tokens(stack: GatewayStack) -> None:
    answer = await stack.openai.completions.create(model=MODEL, prompt="once upon")
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.choices[0].text) == ("text_completion", said(16))
    assert answer.choices[0].finish_reason == "length"


async def test_a_completion_is_streamed(stack: GatewayStack) -> None:
    stream = await stack.openai.completions.create(model=MODEL, prompt="once", max_tokens=4, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == said(4)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_batch_of_prompts_comes_back_in_order(stack: GatewayStack) -> None:
    answer = await stack.openai.completions.create(model=MODEL, prompt=["a", "b c"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("Say: ", "Say: "), ([0, 1], "Paris is")])
async def test_a_prompt_is_echoed_as_text(stack: GatewayStack, prompt: Any, text: str, streamed: bool) -> None:
    arguments: Any = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": 2}
    if streamed:
        chunks = [chunk async for chunk in await stack.openai.completions.create(stream=True, **arguments)]
        got = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        got = (await stack.openai.completions.create(**arguments)).choices[0].text
    assert got == text + said(2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_show_log_probabilities_with_offsets(stack: GatewayStack, streamed: bool) -> None:
    arguments: Any = {"model": MODEL, "prompt": "x", "max_tokens": 3, "logprobs": 1}
    tokens: list[str] = []
    offsets: list[int] = []
    if streamed:
        async for chunk in await stack.openai.completions.create(stream=True, **arguments):
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    else:
        shown = (await stack.openai.completions.create(**arguments)).choices[0].logprobs
        tokens, offsets = shown.tokens, shown.text_offset
        assert shown.top_logprobs[0] == {"Paris": -0.5}
    assert tokens == ["Paris", " is", " the"]
    assert offsets == [0, 5, 8]


async def test_models_are_listed_with_their_context_length(stack: GatewayStack) -> None:
    models = (await stack.openai.models.list()).data
    assert [(model.id, model.max_model_len) for model in models] == [(MODEL, 2048)]  # type: ignore[attr-defined]
    assert (await stack.openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await stack.openai.models.retrieve("other")


async def test_a_field_out_of_range_is_named(stack: GatewayStack) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    assert "-1" in error.value.message


async def test_an_unknown_model_is_not_found(stack: GatewayStack) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await stack.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert error.value.code == "model_not_found"


async def test_a_verdict_of_the_ring_is_the_clients_error(stack: GatewayStack) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await stack.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "REJECT"}])
    assert error.value.param == "messages"
    with pytest.raises(openai.RateLimitError) as busy:
        await stack.openai.completions.create(model=MODEL, prompt="REJECT OVERLOAD", stream=True)
    assert busy.value.response.headers["retry-after"] == "3"


async def test_an_error_inside_a_stream_is_an_event(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, attempts=2) as stack:
        pieces: list[str] = []

        async def read() -> None:
            async for chunk in await stack.openai.completions.create(model=MODEL, prompt="FAIL ALWAYS", stream=True):
                pieces.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="attempts failed"):
            await read()
        assert "".join(pieces) == said(3)


async def test_a_key_is_asked_for_where_keys_are_set(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, api_keys=("other", "key-1")) as stack:
        await stack.openai.models.list()
        with pytest.raises(openai.AuthenticationError):
            await stack.openai.with_options(api_key="wrong").models.list()
        for free in ("/health", "/live", "/ready", "/metrics"):
            assert (await stack.http.get(free)).status_code == 200
        assert (await stack.http.post("/tokenize", content=b"{}")).status_code == 401
