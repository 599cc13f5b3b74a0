"""BART through a whole stack by the `openai` SDK: what `transformers` generates of its prompts; and whoever dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from tests.integration.cluster.test_features_together import federated
from tests.support.cluster.batches import batch_of
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_encoder_decoders import END, POSITIONS, EncoderDecoder, make_encoder_decoder

NAME = "summariser"
PROMPTS = ["The quick brown fox jumps over the lazy dog", "Hello there, how are you today?", "one two three"]
OUTPUT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EncoderDecoder:
    return make_encoder_decoder(tmp_path_factory.mktemp("bart"), "bart", seed=2)


@pytest.fixture(scope="module")
def stack(model: EncoderDecoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    with running_stack(folder, model=model.path, engines=2, more=(f"--served-model-name={NAME}",)) as stack:
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client.with_options(timeout=150)


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "temperature": 0, "max_tokens": OUTPUT, **more}


@pytest.mark.features("encoder-decoder", "n > 1", "logprobs", "prefix cache")
async def test_prompts_are_answered_as_by_the_library(client: AsyncOpenAI, model: EncoderDecoder) -> None:
    """Several prompts, of text and of tokens, more than once; a beginning of the client's own; what is left out of a
    prompt that is too long; and how many tokens there are."""
    ids = [model.ids(each) for each in PROMPTS]
    wanted = [model.generated(each, OUTPUT) for each in ids]
    assert len({tuple(each) for each in wanted}) == len(wanted)
    answer = await client.completions.create(
        **greedy(prompt=PROMPTS, n=2, logprobs=1), extra_body={"return_token_ids": True}
    )
    for i, choice in enumerate(answer.choices):
        assert choice.to_dict()["token_ids"] == wanted[i // 2], i
        assert choice.to_dict()["prompt_token_ids"] == ids[i // 2]
        assert choice.text == model.text(wanted[i // 2])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(each) + len(model.start) for each in ids)
    begin = [9, 8, 7]
    begun = await client.completions.create(
        **greedy(prompt=ids[0]), extra_body={"decoder_prompt": begin, "return_token_ids": True}
    )
    assert begun.choices[0].to_dict()["token_ids"] == model.generated(ids[0], OUTPUT, (model.start[0], *begin))
    long = "one two three four five six seven eight nine ten " * 40
    cut = await client.completions.create(
        **greedy(prompt=long),
        extra_body={"truncate_prompt_tokens": -1, "truncation_side": "right", "return_token_ids": True},
    )
    assert cut.choices[0].to_dict()["token_ids"] == model.generated([*model.ids(long)[: POSITIONS - 1], END], OUTPUT)


@pytest.mark.features("encoder-decoder", "guided")
async def test_answers_follow_a_grammar(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        **greedy(prompt=PROMPTS[0]), extra_body={"structured_outputs": {"choice": ["fox", "dog"]}}
    )
    assert answer.choices[0].text in ("fox", "dog")


@pytest.mark.features("encoder-decoder", "prompt logprobs", refused=True)
@pytest.mark.features("encoder-decoder", "beam search", refused=True)
@pytest.mark.features("encoder-decoder", "tool calls", refused=True)
@pytest.mark.features("encoder-decoder", "images", refused=True)
async def test_what_cannot_be_had_of_it_is_a_400(client: AsyncOpenAI, stack: RunningStack) -> None:
    for fields, why in (
        ({"prompt": "one two three four five six seven eight nine ten " * 40}, "the model's encoder takes 96"),
        ({"prompt": []}, "prompt"),
        ({"echo": True}, "echo: not allowed for this model"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: not allowed for this model"),
        ({"use_beam_search": True}, "use_beam_search: not allowed for this model"),
        ({"decoder_prompt": ["a"]}, "decoder_prompt: \\['a'\\] is not allowed; a string or token ids"),
        ({"decoder_prompt": [10**6]}, "decoder_prompt: 1000000 at 0 is not allowed"),
        ({"decoder_prompt": [7] * POSITIONS}, "maximum context length"),
        ({"truncate_prompt_tokens": POSITIONS + 1}, "for as many as the model's encoder takes"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.completions.create(model=NAME, prompt="Hello", extra_body=fields)
    for pool in ("prefill", "decode"):
        why = f"{pool}: an encoder reads the model's prompts, and engines hand nothing over"
        refused = await asyncio.to_thread(stack.baton, "scale", f"{pool}=1")
        assert refused.returncode != 0
        assert why in refused.stderr
        async with httpx2.AsyncClient(base_url=stack.url, timeout=60) as http:
            answer = await http.post("/admin/scale", json={"service": pool, "count": 1})
        assert answer.status_code == 409
        assert why in answer.json()["error"]["message"]
    async with httpx2.AsyncClient(base_url=stack.url, timeout=60) as http:
        for path, body in (
            ("/generate", {"text": "Hello"}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
            ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, path
            assert "answers prompts of /v1/completions alone" in answer.json()["error"]["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    for content, more in (("Hello", {}), ([image], {}), ("Hello", {"tools": [tool]})):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}], **more)


async def test_lines_of_a_batch_are_answered_as_by_the_library(
    stack: RunningStack, model: EncoderDecoder, tmp_path: Path
) -> None:
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": greedy(prompt=prompt)}
        for prompt in PROMPTS
    ]
    answers = await batch_of(stack, lines, tmp_path)
    said = {name: body["choices"][0]["text"] for name, body in answers.items()}
    assert said == {each: model.text(model.generated(model.ids(each), OUTPUT)) for each in PROMPTS}


@pytest.mark.slow
@pytest.mark.features("encoder-decoder", "federation")
def test_another_cluster_writes_what_is_read_here(model: EncoderDecoder, tmp_path: Path) -> None:
    """Read by the encoder here, as engines here are drained, and written there."""

    async def asked(stack: RunningStack) -> list[str]:
        async with client_of(stack.url) as client:
            answer = await client.completions.create(**greedy(prompt=PROMPTS))
        return [each.text for each in answer.choices]

    with federated(tmp_path, [f"--served-model-name={NAME}", f"--model={model.path}"]) as clusters:
        said = asyncio.run(asked(clusters.home))
    assert said == [model.text(model.generated(model.ids(each), OUTPUT)) for each in PROMPTS]


@pytest.mark.features("encoder-decoder", "re-dispatch")
async def test_whoever_dies_leaves_the_text_as_it_would_have_been(
    client: AsyncOpenAI, model: EncoderDecoder, stack: RunningStack
) -> None:
    """The encoder while it is asked, then each engine while the text is streamed."""
    wanted = [model.text(model.generated(model.ids(each), OUTPUT)) for each in PROMPTS]
    stack.kill("encoder-1", signal.SIGSTOP)
    asked = asyncio.create_task(client.completions.create(**greedy(prompt="one two four")))
    await asyncio.sleep(0.5)
    stack.kill("encoder-1")
    assert (await asked).choices[0].text == model.text(model.generated(model.ids("one two four"), OUTPUT))
    # Not both at once: of two deaths within a trial the request would be to blame (ADR 22).
    for rank, prompt, text in zip(("engine-1-rank0", "engine-2-rank0"), PROMPTS, wanted, strict=False):
        stream = await client.completions.create(**greedy(prompt=prompt), stream=True)
        said = ""
        async for event in stream:
            if not said:
                stack.kill(rank)
            said += event.choices[0].text
        assert said == text
