"""Prompts of embeddings through whole stacks by the `openai` SDK: what `transformers` makes of `inputs_embeds`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from torch import Tensor
from transformers import AutoTokenizer

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack
from tests.support.models.embedded_prompts import greedy_of_rows, own_embeddings, prompt_embeds_field, random_rows
from tests.support.models.tiny_adapters import demo_reference
from tests.support.models.tiny_models import TinyModel
from tests.support.paths import DEMO_MODEL

LENGTH = 24


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


@pytest.fixture(scope="module")
def demo() -> TinyModel:
    demo = demo_reference()
    demo.reference.generation_config.eos_token_id = None  # a stack is asked to ignore it, too
    return demo


def wanted(rows: Tensor, demo: TinyModel, count: int = LENGTH) -> str:
    text: str = AutoTokenizer.from_pretrained(DEMO_MODEL).decode(
        greedy_of_rows(demo.reference, rows, count), skip_special_tokens=True
    )
    return text


async def complete(client: AsyncOpenAI, stack: RunningStack, *rows: Tensor, **more: Any) -> Any:
    """Greedy; `rows`: of each prompt."""
    encoded = [prompt_embeds_field(each) for each in rows]
    extra = {"prompt_embeds": encoded[0] if len(encoded) == 1 else encoded, **more.pop("extra_body", {})}
    settings = {"model": stack.model, "prompt": "", "temperature": 0, "max_tokens": LENGTH, **more}
    return await client.completions.create(extra_body=extra, **settings)


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


@pytest.mark.features("prompt embeds", "prefix cache", "chunked prefill", "n > 1", "logprobs")
async def test_rows_say_what_the_library_says_of_them(
    client: AsyncOpenAI, stack: RunningStack, demo: TinyModel
) -> None:
    """Several prompts of different types, text beside them, and again from the cache; placeholders never meet."""
    rows = [random_rows(demo.reference, 90, 1), random_rows(demo.reference, 20, 2).to(torch.bfloat16)]
    ignore = {"ignore_eos": True}
    text = "Once upon a time"
    answer = await complete(client, stack, *rows, prompt=text, n=2, logprobs=1, extra_body=ignore)
    plain = await client.completions.create(
        model=stack.model, prompt=text, temperature=0, max_tokens=LENGTH, extra_body=ignore
    )
    expected = [*(wanted(each, demo) for each in rows), plain.choices[0].text]
    assert [choice.text for choice in answer.choices] == [each for each in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == 110 + plain.usage.prompt_tokens
    again = await complete(client, stack, rows[0], extra_body=ignore)
    assert (again.choices[0].text, cached(again)) == (expected[0], 80)
    other = torch.cat((rows[0][:40], random_rows(demo.reference, 9, 3)))
    shared = await complete(client, stack, other, extra_body=ignore)
    assert (shared.choices[0].text, cached(shared)) == (wanted(other, demo), 32)


async def test_a_models_own_embeddings_say_what_its_tokens_say(
    client: AsyncOpenAI, stack: RunningStack, demo: TinyModel
) -> None:
    tokens = AutoTokenizer.from_pretrained(DEMO_MODEL)("There was a lighthouse by the sea.")["input_ids"]
    plain = await client.completions.create(model=stack.model, prompt=tokens, temperature=0, max_tokens=LENGTH)
    rows = await complete(client, stack, own_embeddings(demo.reference, tokens))
    assert rows.choices[0].text == plain.choices[0].text
    assert rows.usage.prompt_tokens == plain.usage.prompt_tokens == len(tokens)


@pytest.mark.features("prompt embeds", "guided")
async def test_what_follows_may_be_guided(client: AsyncOpenAI, stack: RunningStack, demo: TinyModel) -> None:
    answer = await complete(
        client, stack, random_rows(demo.reference, 12, 4), extra_body={"guided_choice": ["seven hens", "a boat"]}
    )
    assert answer.choices[0].text in ("seven hens", "a boat")


@pytest.mark.features("prompt embeds", "re-dispatch")
async def test_a_stream_outlives_its_engine(client: AsyncOpenAI, stack: RunningStack, demo: TinyModel) -> None:
    rows, count = random_rows(demo.reference, 50, 5), 160
    stream = await complete(client, stack, rows, stream=True, max_tokens=count, extra_body={"ignore_eos": True})
    text, pid = "", None
    async for chunk in stream:
        text += chunk.choices[0].text
        if text and pid is None:
            pid = stack.kill("engine-1-rank0")
    assert pid is not None
    await asyncio.to_thread(stack.replaced, "engine-1-rank0", pid)
    assert text == wanted(rows, demo, count)


@pytest.mark.features("prompt embeds", "LoRA")
async def test_adapters_compute_them(
    client: AsyncOpenAI, stack: RunningStack, adapters: dict[str, TinyModel], demo: TinyModel
) -> None:
    rows = random_rows(demo.reference, 30, 8)
    answer = await complete(client, stack, rows, model="pirate")
    assert answer.choices[0].text == wanted(rows, adapters["pirate"]) != wanted(rows, demo)


@pytest.mark.features("prompt embeds", "tool calls", "prefix cache")
async def test_parts_of_a_chat_stand_where_its_template_puts_them(
    client: AsyncOpenAI, stack: RunningStack, demo: TinyModel
) -> None:
    tokenizer, rows = AutoTokenizer.from_pretrained(DEMO_MODEL), random_rows(demo.reference, 40, 9)
    texts = "Tell me of", "and of the sea."
    content: Any = [
        {"type": "text", "text": texts[0]},
        {"type": "prompt_embeds", "data": prompt_embeds_field(rows)},
        {"type": "text", "text": texts[1]},
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|rows|>"]})
    shown = [{"role": "user", "content": "\n".join((texts[0], "<|rows|>", texts[1]))}]
    ids = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
    place = ids.index(tokenizer.convert_tokens_to_ids("<|rows|>"))
    parts = own_embeddings(demo.reference, ids[:place]), rows, own_embeddings(demo.reference, ids[place + 1 :])
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": LENGTH,
        "extra_body": {"ignore_eos": True},
    }
    answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == wanted(torch.cat(parts), demo)
    assert answer.usage.prompt_tokens == len(ids) - 1 + len(rows)
    again = await client.chat.completions.create(**asked)
    assert (again.choices[0].message.content, cached(again) > 32) == (answer.choices[0].message.content, True)
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    called = await client.chat.completions.create(
        **{**asked, "max_tokens": 60, "extra_body": {}}, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    assert called.choices[0].message.tool_calls[0].function.name == "look"


async def test_what_is_wrong_with_rows_is_said(client: AsyncOpenAI, stack: RunningStack, demo: TinyModel) -> None:
    with pytest.raises(openai.BadRequestError, match=r"shape \[3, 5\] is not allowed; \[tokens, ") as error:
        await complete(client, stack, torch.zeros(3, 5))
    assert error.value.param == "prompt_embeds"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await complete(client, stack, random_rows(demo.reference, 2100, 6))


@pytest.mark.features("prompt embeds", "prefill/decode", "chunked prefill")
async def test_they_are_handed_over(pools: RunningStack, demo: TinyModel) -> None:
    rows = random_rows(demo.reference, 150, 7)
    async with client_of(pools.url) as client:
        answer = await complete(client, pools, rows, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == wanted(rows, demo)
