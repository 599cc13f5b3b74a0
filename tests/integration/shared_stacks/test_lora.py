"""LoRA adapters through whole stacks by the `openai` SDK: what `transformers` generates with each merged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack
from tests.support.models.tiny_adapters import demo_reference, write_adapter
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


async def manage(stack: RunningStack, action: str, **body: object) -> tuple[int, str]:
    """Status and text of the answer."""
    async with httpx2.AsyncClient(base_url=stack.url, timeout=DEADLINE) as http:
        answer = await http.post(f"/v1/{action}_lora_adapter", json=body)
    return answer.status_code, answer.text


async def complete_once_known(client: AsyncOpenAI, model: str) -> str:
    """By whichever gateway, which may know it a moment later than the one that was told to load it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return (await complete(client, model, PROMPT))[0]
            except openai.NotFoundError:
                await asyncio.sleep(0.05)


async def until_unknown(client: AsyncOpenAI, model: str) -> None:
    """By whichever gateway. Where one has not heard of it yet, the engine or a coordinator refuses."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                await complete(client, model, "Hello")
            except openai.NotFoundError:
                return
            except openai.BadRequestError as error:
                if error.param != "model":
                    raise


async def test_an_adapter_is_loaded_outlives_its_engine_and_is_unloaded(
    client: AsyncOpenAI, stack: RunningStack, tmp_path: Path
) -> None:
    late = write_adapter(demo_reference(), tmp_path / "late", r=4, seed=3, strength=0.1)
    added = (200, "Success: LoRA adapter 'late' added successfully.")
    assert await manage(stack, "load", lora_name="late", lora_path=str(late.path)) == added
    text = wanted(late, PROMPT)
    assert await complete_once_known(client, "late") == text
    status, said = await manage(stack, "load", lora_name="late", lora_path=str(late.path))
    assert (status, "has already been loaded" in said) == (400, True)

    changed = write_adapter(demo_reference(), tmp_path / "late", r=4, seed=4, strength=0.1)
    assert await manage(stack, "load", lora_name="late", lora_path=str(late.path), load_inplace=True) == added
    anew = wanted(changed, PROMPT)
    assert await complete_once_known(client, "late") == anew != text
    text = anew

    pid = stack.kill("engine-1-rank0")
    stack.replaced("engine-1-rank0", pid)
    assert await complete_once_known(client, "late") == text
    listed = await asyncio.to_thread(stack.baton, "lora", "list")
    assert [line.split() for line in listed.stdout.splitlines() if line.startswith("late")] == [["late", stack.model]]
    done = await asyncio.to_thread(stack.baton, "lora", "unload", "late")
    assert "removed successfully" in done.stdout, done.stderr
    await until_unknown(client, "late")


async def test_what_cannot_be_loaded_is_refused_and_leaves_nothing_behind(
    stack: RunningStack, adapters: dict[str, TinyModel], tmp_path: Path
) -> None:
    wide = write_adapter(demo_reference(), tmp_path / "wide", r=32, modules=("q_proj",))
    for status, complaint, body in (
        (404, "adapter_config.json: there is no such file", {"lora_name": "a", "lora_path": str(tmp_path / "none")}),
        (400, "r = 32 is not supported; 1 to max_lora_rank", {"lora_name": "a", "lora_path": str(wide.path)}),
        (400, "the model itself has this name", {"lora_name": stack.model, "lora_path": "/x"}),
        (400, "lora_path", {"lora_name": "a"}),
    ):
        found, said = await manage(stack, "load", **body)
        assert (found, complaint in said) == (status, True), said
    status, said = await manage(stack, "unload", lora_name="a")
    assert (status, "The lora adapter 'a' cannot be found." in said) == (404, True)
    status, said = await manage(stack, "unload", lora_name="pirate")
    assert (status, "was given by --lora" in said) == (400, True)
    text = await asyncio.to_thread(stack.baton, "lora", "load", "a", str(wide.path))
    assert (text.returncode, "r = 32 is not supported" in text.stderr) == (1, True)


async def test_without_a_registry_nothing_is_loaded_at_run_time(pools: RunningStack) -> None:
    status, said = await manage(pools, "load", lora_name="a", lora_path="/x")
    assert (status, "--lora-registry allows it" in said) == (404, True)


@pytest.mark.features("LoRA", "prefill/decode", "chunked prefill")
async def test_a_prompt_is_handed_over_with_its_adapter(pools: RunningStack, adapters: dict[str, TinyModel]) -> None:
    async with client_of(pools.url) as client:
        base, _ = await complete(client, pools.model, PROMPT)
        text, cached = await complete(client, "pirate", PROMPT)
    assert text == wanted(adapters["pirate"], PROMPT) != base
    assert cached == 0
