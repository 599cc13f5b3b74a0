"""One stack serves two models with vocabularies of their own, by the `openai` SDK: what `transformers` generates with
each; and what happens to one is nothing to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from shared.bus import EndpointError
from shared.topics import ADMIN
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_adapters import demo_reference
from tests.support.models.tiny_models import TinyModel, make_model, write_word_tokenizer
from tests.support.paths import DEMO_MODEL

DEMO, TINY, SMALL = "org/demo", "tiny", "small"
TALE, WORDS = "Once upon a time there was", [3, 14, 15, 9]
LENGTH = 24


class Models(NamedTuple):
    stack: RunningStack
    tiny: TinyModel

    def expected(self, model: str, length: int = LENGTH) -> str:
        if model == TINY:
            return " ".join(f"w{token}" for token in self.tiny.greedy(WORDS, length))
        tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        tokens = demo_reference().greedy(tokenizer(TALE)["input_ids"], length)
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def pids(self, model: str) -> dict[str, int | None]:
        """Of the model's own processes."""
        return {member.instance: member.pid for member in self.stack.state.members if member.model == model}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    tiny = make_model("llama", folder / "weights")
    write_word_tokenizer(tiny.path)
    with running_stack(
        folder,
        kvstore="32MiB",
        settings=(f"{TINY}/engines=2", f"{TINY}/max_model_len=128", f"{TINY}/alias={SMALL},org/small"),
        more=(f"--model={DEMO}={DEMO_MODEL}", f"--model={TINY}={tiny.path}"),
        wait_for_engines=2.0,
    ) as stack:
        yield Models(stack, tiny)


@pytest.fixture
async def client(models: Models) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(models.stack.url) as client:
        yield client


async def refused(client: AsyncOpenAI, model: str) -> openai.InternalServerError:
    """Who places requests hears a moment later that somebody drains. One that came before the gateway had heard it is
    kept, and waits for an engine as long as any open request: it is given up here."""
    async with asyncio.timeout(90):
        while True:
            try:
                await complete(client.with_options(timeout=5), model)
            except openai.InternalServerError as error:
                return error
            except openai.APITimeoutError:
                continue


async def complete(client: AsyncOpenAI, model: str, length: int = LENGTH) -> str:
    prompt: str | list[int] = TALE if model == DEMO else WORDS
    answer = await client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].text


async def admin(stack: RunningStack, endpoint: str, **body: object) -> object:
    async with stack.bus() as bus:
        return await bus.request_raw(f"{ADMIN}.{endpoint}", json.dumps(body).encode(), DEADLINE)


async def test_both_answer_at_the_same_time_what_each_says_alone(models: Models, client: AsyncOpenAI) -> None:
    asked = (DEMO, TINY, DEMO, SMALL, DEMO, TINY)
    client = client.with_options(max_retries=8)  # a gateway with one model is ready
    texts = await asyncio.gather(*(complete(client, model) for model in asked))
    for model, text in zip(asked, texts, strict=True):
        assert text.strip() == models.expected(DEMO if model == DEMO else TINY).strip()


async def test_each_is_listed_and_found_and_no_other(models: Models, client: AsyncOpenAI) -> None:
    found = {model.id: model.model_dump() for model in (await client.models.list()).data}
    assert set(found) == {DEMO, TINY, SMALL, "org/small"}
    assert found[SMALL]["root"] == TINY
    assert found[SMALL]["max_model_len"] == 128
    assert found[TINY]["max_model_len"] == 128 != found[DEMO]["max_model_len"]
    assert (await client.models.retrieve(DEMO)).id == DEMO
    assert (await client.models.retrieve("org/small")).id == "org/small"
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        await client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        await client.completions.create(model="other", prompt="a")
    async with httpx2.AsyncClient(base_url=models.stack.url, timeout=DEADLINE) as http:
        unnamed = await http.post("/v1/completions", json={"prompt": "a"})
    assert unnamed.status_code == 400
    assert "required where several models are served" in unnamed.json()["error"]["message"]


async def test_figures_are_of_each(models: Models, client: AsyncOpenAI) -> None:
    await asyncio.gather(complete(client, DEMO), complete(client, SMALL))
    async with httpx2.AsyncClient(base_url=models.stack.url, timeout=DEADLINE) as http:
        page = (await http.get("/metrics")).text
    for name in ("requests_total", "time_to_first_token_seconds_count", "generation_tokens_total"):
        for model in (DEMO, TINY):
            assert any(
                line.startswith(f"baton_gateway_{name}{{") and f'model="{model}"' in line for line in page.splitlines()
            )


async def test_one_without_engines_or_tokenizer_is_refused_and_the_other_answers(
    models: Models, client: AsyncOpenAI
) -> None:
    stack, once = models.stack, client.with_options(max_retries=0)
    for instance, missing in (("org-demo-engine-1", "scheduler"), ("org-demo-tokenizer-1", "tokenizer")):
        with pytest.raises(EndpointError, match=r"is the last ready .* of model org/demo"):
            await admin(stack, "drain", instance=instance)
        await admin(stack, "drain", instance=instance, force=True)
        refusal = await refused(once, DEMO)
        assert f"no {missing} is ready" in refusal.message
        async with httpx2.AsyncClient(base_url=stack.url, timeout=DEADLINE) as http:
            ready = [await http.get(f"/ready{query}") for query in ("", f"?model={DEMO}", f"?model={TINY}")]
        assert [each.status_code for each in ready] == [200, 503, 200]
        assert ready[0].json()["models_not_served"] == 1
        assert refusal.status_code == 503
        assert "retry-after" in refusal.response.headers
        assert await complete(once, TINY)
        await admin(stack, "undrain", instance=instance)
        assert (await complete(client.with_options(max_retries=8), DEMO)).strip() == models.expected(DEMO).strip()


async def test_the_engines_of_one_are_killed_and_the_other_goes_on(models: Models, client: AsyncOpenAI) -> None:
    before = models.pids(TINY)
    stream = asyncio.create_task(complete(client.with_options(max_retries=0), TINY, 100))
    victims = {name: models.stack.kill(name) for name in ("org-demo-engine-1", "org-demo-engine-1-rank0")}
    texts = [await complete(client.with_options(max_retries=0), TINY) for _ in range(4)]
    assert {text.strip() for text in texts} == {models.expected(TINY).strip()}
    assert (await stream).strip() == models.expected(TINY, 100).strip()
    for name, pid in victims.items():
        models.stack.replaced(name, pid)
    assert (await complete(client.with_options(max_retries=8), DEMO)).strip() == models.expected(DEMO).strip()
    assert models.pids(TINY) == before


def test_pools_are_scaled_by_model(models: Models) -> None:
    stack = models.stack
    refused = stack.baton("scale", "engines=2")
    assert refused.returncode != 0
    assert "engines are of one model each; there are org/demo, tiny" in refused.stderr
    wanted = {"service": "engines", "count": 1}
    assert "engines are of one model each" in httpx2.post(f"{stack.url}/admin/scale", json=wanted).text
    less = httpx2.post(f"{stack.url}/admin/scale", json={**wanted, "model": TINY}).raise_for_status().json()
    assert sorted(less["stopping"]) == ["tiny-engine-2", "tiny-engine-2-rank0"]
    stack.until(lambda state: "tiny-engine-2" not in {member.instance for member in state.members})
    assert json.loads(stack.baton("ps", "--json").stdout)["models"] == [DEMO, TINY]
    planned = stack.baton("plan", "--ttft-ms=100")
    assert planned.returncode != 0
    assert "sizes the engines of one model; the stack serves org/demo, tiny" in planned.stderr
