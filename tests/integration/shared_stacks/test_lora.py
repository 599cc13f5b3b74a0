"""LoRA adapters through whole stacks by the `openai` SDK: what `transformers` generates with each merged."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack
from tests.support.models.tiny_models import TinyModel
from tests.support.paths import DEMO_MODEL

PROMPT = "Once upon a time there was a lighthouse. " * 8
LENGTH = 24


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


def wanted(adapter: TinyModel, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text: str = tokenizer.decode(adapter.greedy(tokenizer(prompt)["input_ids"], LENGTH), skip_special_tokens=True)
    return text


async def complete(client: AsyncOpenAI, model: str, prompt: str) -> tuple[str, int]:
    """The text, and how many tokens of the prompt came from a cache."""
    answer = await client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=LENGTH, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, 0 if details is None else details.cached_tokens or 0


@pytest.mark.features("LoRA", "prefix cache")
async def test_adapters_beside_the_model_say_what_merged_weights_say(
    client: AsyncOpenAI, stack: RunningStack, adapters: dict[str, TinyModel]
) -> None:
    """At the same time, of the same prompt: of which each finds only its own blocks cached."""
    names = [stack.model, *adapters]
    first = await asyncio.gather(*(complete(client, name, PROMPT) for name in names))
    again = await asyncio.gather(*(complete(client, name, PROMPT) for name in names))
    for name, (text, cached), (repeated, cached_then) in zip(names, first, again, strict=True):
        assert text == repeated
        if name in adapters:
            assert text == wanted(adapters[name], PROMPT)
            assert cached == 0
        assert cached_then > 0
    assert len({text for text, _ in first}) == 3


async def test_adapters_are_listed_with_their_parent(client: AsyncOpenAI, stack: RunningStack) -> None:
    found = {model.id: model.model_dump() for model in (await client.models.list()).data}
    assert found["pirate"]["parent"] == found["org/poet"]["parent"] == stack.model
    assert found[stack.model]["parent"] is None
    assert (await client.models.retrieve("org/poet")).id == "org/poet"
    with pytest.raises(openai.NotFoundError, match="The model `admiral` does not exist"):
        await client.completions.create(model="admiral", prompt="Hello")


@pytest.mark.features("LoRA", "prefill/decode", "chunked prefill")
async def test_a_prompt_is_handed_over_with_its_adapter(pools: RunningStack, adapters: dict[str, TinyModel]) -> None:
    async with client_of(pools.url) as client:
        base, _ = await complete(client, pools.model, PROMPT)
        text, cached = await complete(client, "pirate", PROMPT)
    assert text == wanted(adapters["pirate"], PROMPT) != base
    assert cached == 0
