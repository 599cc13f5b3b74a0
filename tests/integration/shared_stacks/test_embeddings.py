"""Embeddings through whole stacks by the `openai` SDK, beside generation: equal to what `transformers` computes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import cohere
import httpx2
import numpy as np
import ollama
import openai
import pytest
import torch
from openai import AsyncOpenAI
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from tests.support.cluster.conversations import client_of, stream_chat
from tests.support.cluster.stack import RunningStack
from tests.support.paths import DEMO_MODEL

TEXTS = [
    "The capital of France is Paris.",
    "Once upon a time there was a lighthouse. " * 20,
    "fox",
    "Spell the word lantern, and count from 3 to 12. " * 6,
]


class Reference:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self.model: Any = AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        states: Tensor = self.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def last(self, tokens: list[int], dimensions: int | None = None) -> Tensor:
        return torch.nn.functional.normalize(self.hidden(tokens)[-1][:dimensions], dim=0)

    def mean(self, tokens: list[int]) -> Tensor:
        return torch.nn.functional.normalize(self.hidden(tokens).mean(0), dim=0)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


def equal(found: list[float], wanted: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


async def test_vectors_are_the_librarys_beside_streams(
    client: AsyncOpenAI, stack: RunningStack, reference: Reference
) -> None:
    """By the SDK's own encoding, base64; the second time from the prefix cache, but for the last tokens."""
    streams = [
        asyncio.create_task(stream_chat(client, stack.model, f"Tell me a story ({i})", max_tokens=60)) for i in range(4)
    ]
    for _ in range(2):
        answer = await client.embeddings.create(model=stack.model, input=TEXTS)
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        for text, one in zip(TEXTS, answer.data, strict=True):
            equal(one.embedding, reference.last(reference.tokens(text)))
        assert answer.usage.prompt_tokens == sum(len(reference.tokens(text)) for text in TEXTS)
    assert all(stream.finish for stream in await asyncio.gather(*streams))


async def test_token_ids_floats_and_dimensions(client: AsyncOpenAI, stack: RunningStack, reference: Reference) -> None:
    ids = [reference.tokens(text) for text in TEXTS]
    answer = await client.embeddings.create(model=stack.model, input=ids, encoding_format="float", dimensions=16)
    for tokens, one in zip(ids, answer.data, strict=True):
        equal(one.embedding, reference.last(tokens, 16))
    alone = await client.embeddings.create(model=stack.model, input=ids[0], extra_body={"normalize": False})
    equal(alone.data[0].embedding, reference.hidden(ids[0])[-1])


async def test_a_chat_has_the_vector_of_its_template(
    client: AsyncOpenAI, stack: RunningStack, reference: Reference
) -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS[:2]]
    answer = await client.embeddings.create(model=stack.model, input=[], extra_body={"messages": chats})
    for chat, one in zip(chats, answer.data, strict=True):
        tokens = reference.tokenizer.apply_chat_template(chat)["input_ids"]
        equal(one.embedding, reference.last(tokens))


async def test_vectors_by_coheres_client(stack: RunningStack, reference: Reference) -> None:
    async with cohere.AsyncClientV2("no key", base_url=stack.url) as client:
        answer = await client.embed(
            model=stack.model, input_type="search_query", texts=TEXTS, embedding_types=["float", "ubinary"]
        )
    tokens = [reference.tokens(text) for text in TEXTS]
    assert answer.embeddings.float_ is not None
    for wanted, one in zip(tokens, answer.embeddings.float_, strict=True):
        equal(one, reference.last(wanted))
    assert answer.embeddings.ubinary is not None
    assert answer.embeddings.ubinary[0] == np.packbits(reference.last(tokens[0]).numpy() >= 0).tolist()
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens == sum(map(len, tokens))


async def test_vectors_by_ollamas_client(stack: RunningStack, reference: Reference) -> None:
    async with ollama.AsyncClient(host=stack.url) as client:
        answer = await client.embed(model=f"{stack.model}:latest", input=TEXTS, dimensions=16)
        cut = await client.embed(model=stack.model, input=TEXTS[0], options={"num_ctx": 2}, keep_alive="5m")
        alone = await client.embeddings(model=stack.model, prompt=TEXTS[1])
        for refused in (
            client.embed(model=stack.model, input=" a" * 3000, truncate=False),
            client.embed(model=stack.model, input="a", keep_alive=0),
        ):
            with pytest.raises(ollama.ResponseError) as error:
                await refused
            assert error.value.status_code == 400
        assert "embedding" in ((await client.show(stack.model)).capabilities or ())
    tokens = [reference.tokens(text) for text in TEXTS]
    for wanted, one in zip(tokens, answer.embeddings, strict=True):
        equal(list(one), reference.last(wanted, 16))
    assert (answer.model, answer.prompt_eval_count) == (stack.model, sum(map(len, tokens)))
    equal(list(cut.embeddings[0]), reference.last(tokens[0][:2]))
    equal(list(alone.embedding), reference.hidden(tokens[1])[-1])


async def test_many_inputs_of_one_request(client: AsyncOpenAI, stack: RunningStack, reference: Reference) -> None:
    """More than an engine runs at once; equal prompts too."""
    inputs = [[5 + i % 7, 9, 11 + i % 300] for i in range(300)]
    answer = await client.embeddings.create(model=stack.model, input=inputs)
    assert [one.index for one in answer.data] == list(range(300))
    for number in (0, 133, 299):
        equal(answer.data[number].embedding, reference.last(inputs[number]))


async def test_a_large_answer_is_whole_and_counts_no_more_once_it_is_sent(
    stack: RunningStack, reference: Reference
) -> None:
    """Vectors of all tokens, 1.3 MB of them."""
    inputs = [[5 + (i * 7 + j) % 900 for i in range(320)] for j in range(4)]
    async with httpx2.AsyncClient(base_url=stack.url, timeout=60) as http:
        answer = (await http.post("/pooling", json={"input": inputs, "task": "token_embed", "normalize": False})).json()
        page = (await http.get("/metrics")).text
    assert [len(each["data"]) for each in answer["data"]] == [320] * 4
    equal(answer["data"][3]["data"][-1], reference.hidden(inputs[3])[-1])
    held = [line.split()[-1] for line in page.splitlines() if line.startswith("baton_gateway_body_bytes")]
    assert held
    assert set(held) == {"0.0"}


async def test_what_is_wrong_with_an_input_is_said(client: AsyncOpenAI, stack: RunningStack) -> None:
    longest = (await client.models.retrieve(stack.model)).model_dump()["max_model_len"]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
        await client.embeddings.create(model=stack.model, input=[[5] * (longest + 1)])
    assert (error.value.param, error.value.code) == ("input", "context_length_exceeded")
    assert len((await client.embeddings.create(model=stack.model, input=[[5] * longest])).data) == 1
    with pytest.raises(openai.BadRequestError, match="input: at least one token"):
        await client.embeddings.create(model=stack.model, input="", extra_body={"add_special_tokens": False})


async def test_means_are_computed_whole_where_prompts_have_engines_of_their_own(
    pools: RunningStack, reference: Reference
) -> None:
    """In chunks of 96 tokens; nothing is handed over, and nothing comes from a cache."""
    async with client_of(pools.url) as client:
        for _ in range(2):
            answer = await client.embeddings.create(model=pools.model, input=TEXTS)
            for text, one in zip(TEXTS, answer.data, strict=True):
                equal(one.embedding, reference.mean(reference.tokens(text)))


async def test_a_batch_has_the_vectors_of_its_requests(stack: RunningStack, client: AsyncOpenAI) -> None:
    bodies: list[Any] = [{"model": stack.model, "input": text} for text in TEXTS[:3]]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
        for number, body in enumerate(bodies)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.05)
    assert (batch.status, batch.output_file_id is not None) == ("completed", True)
    answers = [json.loads(line) for line in (await client.files.content(batch.output_file_id or "")).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]
    for body, answer in zip(bodies, answers, strict=True):
        plain = await client.embeddings.create(**body, encoding_format="float")
        assert answer["response"]["body"]["data"][0]["embedding"] == pytest.approx(plain.data[0].embedding, abs=1e-5)
