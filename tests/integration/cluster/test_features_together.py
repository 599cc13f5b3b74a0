"""Everything at once: very different requests side by side, on stacks that differ, have one set of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import jsonschema
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.bus_moments import listening, requests_are_handed_to, tokens_are_drawn
from tests.support.cluster.conversations import client_of
from tests.support.cluster.ports import free_port
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.demo_mixture import write_demo_mixture
from tests.support.models.embedded_prompts import prompt_embeds_field, random_rows
from tests.support.models.tiny_adapters import ATTENTION, demo_reference, write_adapter
from tests.support.paths import REPOSITORY
from tests.support.plugin_packages import pip_installed

Answers = dict[str, Any]
LONG = "Ada lives in Oslo. Ben has a green boat and seven red hens. " * 12
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SMALL_STEPS = ("--max-num-seqs=24", "--max-batch-tokens=96")
"""So that the long prompt takes several."""
LITTLE_MEMORY = ("--max-model-len=1024", "--kv-memory=3MiB")
"""So that not all requests fit at once."""


async def ask(client: AsyncOpenAI, model: str, question: str, **more: Any) -> Any:
    """One greedy chat completion."""
    said: Any = [{"role": "user", "content": question}]
    return await client.chat.completions.create(model=model, messages=said, temperature=0, **more)


async def story(client: AsyncOpenAI, model: str) -> Any:
    return (await ask(client, model, "Tell me a long story about a fox called Mia.")).choices[0].message.content


async def long_prompt(client: AsyncOpenAI, model: str) -> Any:
    """A prompt of several chunks, again and again: it is cached once nobody else needs the memory."""
    texts: list[str | None] = []
    cached = 0
    while len(texts) < 2 or (cached <= 100 and len(texts) < 20):
        answer = await ask(client, model, f"{LONG} Where does Ada live?", max_tokens=24)
        texts.append(answer.choices[0].message.content)
        cached = answer.usage.prompt_tokens_details.cached_tokens
    assert len(set(texts)) == 1
    assert cached > 100
    return texts[0]


async def document(client: AsyncOpenAI, model: str) -> Any:
    """Guided, twice the same, with log-probabilities of answer and prompt."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    question = "Turn this sentence into JSON: Maria is 31 years old."
    more = {"n": 2, "logprobs": True, "top_logprobs": 1, "extra_body": {"prompt_logprobs": 0}}
    answer = await ask(client, model, question, response_format=form, max_tokens=80, **more)
    values = [json.loads(choice.message.content) for choice in answer.choices]
    for value in values:
        jsonschema.validate(value, PERSON)
    assert values[0] == values[1]
    return values[0], [likelihoods_in(choice) for choice in answer.choices], prompt_scores(answer.model_extra)


async def matching(client: AsyncOpenAI, model: str) -> Any:
    """Streamed, and guided by an expression that leaves few choices."""
    expression = r"(Paris|Rome) is the capital of (France|Italy)\."
    body = {"structured_outputs": {"regex": expression}}
    stream = await ask(client, model, "What is the capital of Italy?", stream=True, extra_body=body, max_tokens=40)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert re.fullmatch(expression, text)
    return text


async def tool(client: AsyncOpenAI, model: str) -> Any:
    more = {"n": 2, "logprobs": True, "extra_body": {"prompt_logprobs": 0}}
    answer = await ask(
        client, model, "What is the weather in Oslo?", tools=[WEATHER], tool_choice="required", max_tokens=80, **more
    )
    functions = [choice.message.tool_calls[0].function for choice in answer.choices]
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    for function in functions:
        jsonschema.validate(json.loads(function.arguments), WEATHER["function"]["parameters"])  # type: ignore[index]
    said = [(function.name, function.arguments) for function in functions]
    return said, [likelihoods_in(choice) for choice in answer.choices], prompt_scores(answer.model_extra)


async def several(client: AsyncOpenAI, model: str) -> Any:
    answer = await ask(client, model, "Spell the word butterfly.", n=3)
    texts = {choice.message.content for choice in answer.choices}
    assert len(answer.choices) == 3
    assert len(texts) == 1
    return texts.pop()


async def likelihoods(client: AsyncOpenAI, model: str) -> Any:
    answer = await ask(client, model, "What is the capital of Peru?", logprobs=True, top_logprobs=2)
    return likelihoods_in(answer.choices[0])


async def prompt_likelihoods(client: AsyncOpenAI, model: str) -> Any:
    """Of a prompt of several chunks."""
    answer = await client.completions.create(
        model=model, prompt=LONG, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    return prompt_scores(answer.choices[0].model_extra)


class Scores(list[float]):
    """Log-probabilities; equal where they differ by no more than ranks that add up in another order explain."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and list(self) == pytest.approx(list(other), abs=0.01)

    __hash__ = None


def likelihoods_in(choice: Any) -> tuple[list[str], Scores]:
    content = choice.logprobs.content
    return [each.token for each in content], Scores(each.logprob for each in content)


def prompt_scores(extra: Any) -> Scores:
    """Of each prompt token but the first."""
    told = extra["prompt_logprobs"]
    assert len(told) > 10
    return Scores(next(iter(position.values()))["logprob"] for position in told[1:])


async def beams(client: AsyncOpenAI, model: str) -> Any:
    body = {"use_beam_search": True}
    answer = await ask(client, model, "What is the capital of Chile?", n=2, max_tokens=12, extra_body=body)
    return [choice.message.content for choice in answer.choices]


async def relevance(client: AsyncOpenAI, model: str) -> Any:
    """The order of documents, of which one takes several chunks, by the cosines of embeddings."""
    documents = [LONG, "A lighthouse in the sea.", "7 + 5 = 12", "Green boats and red hens live on the farm."]
    body = {"model": model, "query": "Ben has a green boat.", "documents": documents}
    answer: Any = await client.post("/rerank", body=body, cast_to=object)
    return [each["index"] for each in answer["results"]], answer["usage"]


async def processed(client: AsyncOpenAI, model: str) -> Any:
    """Output that a logits processor begins with what the model would not say: plain with everything that is told of
    tokens, guided, and where calls are possible."""
    question = {"model": model, "prompt": "Paris is", "add_special_tokens": False}
    tokens: Any = await client.post(str(client.base_url.join("/tokenize")), body=question, cast_to=object)
    body: dict[str, Any] = {"vllm_xargs": {"begin_with": tokens["tokens"]}}
    more: dict[str, Any] = {"max_tokens": 24, "logprobs": True, "top_logprobs": 1, "n": 2}
    short = "Ada lives in Oslo. Ben has a green boat. Where does Ada live?"
    answer = await ask(client, model, short, **more, extra_body={**body, "prompt_logprobs": 0})
    texts = [choice.message.content for choice in answer.choices]
    assert [text.startswith("Paris is") for text in texts] == [True, True]
    guided = {"structured_outputs": {"regex": r"(Paris|Rome) (is|was) the capital of (France|Italy)\."}}
    under = await ask(client, model, "What is the capital of Italy?", extra_body={**body, **guided}, max_tokens=40)
    assert under.choices[0].message.content.startswith("Paris is the capital of ")
    beside = await ask(client, model, "What is the weather in Oslo?", tools=[WEATHER], extra_body=body, max_tokens=40)
    assert beside.choices[0].message.content.startswith("Paris is")
    said = [each.choices[0].message.content for each in (under, beside)]
    return texts, [likelihoods_in(choice) for choice in answer.choices], prompt_scores(answer.model_extra), said


async def embedded(client: AsyncOpenAI, model: str) -> Any:
    """Rows that no token has, beside the same number of tokens whose ids stand for them."""
    rows = prompt_embeds_field(random_rows(demo_reference().reference, 120, seed=9))
    answer = await client.completions.create(
        model=model,
        prompt=[[0] * 120],
        max_tokens=24,
        temperature=0,
        n=2,
        logprobs=1,
        extra_body={"prompt_embeds": rows},
    )
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2]
    return texts, [Scores(choice.logprobs.token_logprobs) for choice in answer.choices if choice.logprobs]  # type: ignore[arg-type]


REQUESTS: dict[str, Callable[[AsyncOpenAI, str], Awaitable[Any]]] = {
    "story": story,
    "long prompt": long_prompt,
    "document": document,
    "matching": matching,
    "tool": tool,
    "several": several,
    "likelihoods": likelihoods,
    "prompt likelihoods": prompt_likelihoods,
    "beams": beams,
    "relevance": relevance,
    "processed": processed,
    "embedded": embedded,
}


OF_THE_ADAPTER = ("document", "tool", "several", "beams", "relevance", "processed")
"""Requests that name the adapter in the model's place."""


async def all_at_once(stack: RunningStack) -> Answers:
    """Every request's answer; they run side by side."""
    async with client_of(stack.url) as client:
        named = {name: ADAPTER if name in OF_THE_ADAPTER else stack.model for name in REQUESTS}
        answers = await asyncio.gather(*(request(client, named[name]) for name, request in REQUESTS.items()))
    return dict(zip(REQUESTS, answers, strict=True))


async def crowd(stack: RunningStack, size: int, length: int = 250) -> None:
    """Grows until a little memory is not enough for it. Where it comes by a hand-over, one after the other, few long
    ones meet and many short ones may not."""
    async with client_of(stack.url) as client:
        prompts = [f"Story {number}." for number in range(size)]
        await client.completions.create(
            model=stack.model, prompt=prompts, max_tokens=length, temperature=0, extra_body={"ignore_eos": True}
        )


ADAPTER = "adapter"


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package with a logits processor is installed where stacks look for packages."""
    packages = pip_installed("sequence-processors", tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(packages), str(REPOSITORY))))
        yield


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of every stack: embeddings are served, and an adapter that changes what is said a little. It changes
    attention alone, as adapters of mixtures do."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(demo_reference(), folder, strength=0.03, modules=ATTENTION)
    return "--pooling-type=last", f"--lora={ADAPTER}={folder}", PROCESSES, TAKES_EMBEDDINGS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts that says what the demo model says."""
    return write_demo_mixture(tmp_path_factory.mktemp("mixture") / "demo")


@pytest.fixture(scope="module")
def plain(more: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one engine of one rank says that plans when it has a result, and drafts nothing."""
    folder = tmp_path_factory.mktemp("plain")
    with running_stack(folder, kvstore="0", settings=("scheduler.run_ahead=0",), more=more) as stack:
        return asyncio.run(all_at_once(stack))


@pytest.fixture(scope="module")
def rounded(more: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What that engine says with weights of eight bits."""
    folder = tmp_path_factory.mktemp("rounded")
    with running_stack(folder, kvstore="0", settings=("scheduler.run_ahead=0",), more=[*more, INT8]) as stack:
        return asyncio.run(all_at_once(stack))


async def counted(stack: RunningStack, instance: str, counter: str) -> float:
    """The sum of a scheduler's counter over its labels."""
    port = (await stack.heard())[instance].metrics_port
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"baton_scheduler_{counter}"))


def connector(folder: Path) -> tuple[str, str]:
    """Blocks go by files in a folder of this test's."""
    return (
        "--kv-connector=shared-memory",
        f'--kv-connector-extra-config={{"directory": "{folder}/kv", "layerwise": true}}',
    )


INT8 = "--quantization=int8"
PROCESSES = "--logits-processors=begin_with"
TAKES_EMBEDDINGS = "--enable-prompt-embeds"
EXPERTS = "--enable-expert-parallel"
SHARED_ROWS = "--enable-sp"
SHARED_PROMPTS = "--prefill-context-parallel-size=2"
GROUP = "--data-parallel-size=2"
NGRAM = '--speculative={"method": "ngram", "num_speculative_tokens": 3}'


@pytest.mark.faults
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "tensor parallel",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "KV connector",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "quantization",
)
async def test_two_ranks_that_draft_in_small_steps_and_little_memory(
    rounded: Answers, more: tuple[str, ...], tmp_path: Path
) -> None:
    own = [*SMALL_STEPS, *LITTLE_MEMORY, NGRAM, INT8, *connector(tmp_path), "--block-size=32"]
    patient = ("scheduler.store_deadline=5",)  # on a busy machine a connector's answer may be late, and nothing loaded
    with running_stack(tmp_path, tp=2, settings=patient, more=[*own, *more]) as stack:
        async with asyncio.TaskGroup() as both:
            both.create_task(crowd(stack, 10))
            answers = both.create_task(all_at_once(stack))
        assert answers.result() == rounded
        assert await counted(stack, "engine-1", "preemptions_total") > 0
        assert await counted(stack, "engine-1", "accepted_draft_tokens_total") > 0
        assert await counted(stack, "engine-1", "kv_blocks_loaded_total") > 0


@pytest.mark.slow
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "pipeline parallel",
    "tensor parallel",
    "sequence parallel",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "KV connector",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "quantization",
    "expert parallel",
)
async def test_two_stages_of_two_ranks_with_whole_experts(
    rounded: Answers, more: tuple[str, ...], mixture: Path, tmp_path: Path
) -> None:
    own = [*SMALL_STEPS, NGRAM, *connector(tmp_path), *more, INT8, EXPERTS, SHARED_ROWS]
    with running_stack(tmp_path, model=mixture, tp=2, pp=2, more=own) as stack:
        assert await all_at_once(stack) == rounded


@pytest.mark.faults
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "prefill/decode",
    "tensor parallel",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "quantization",
    "expert parallel",
)
async def test_prompts_that_are_handed_over_and_a_decoding_engine_that_dies(
    rounded: Answers, more: tuple[str, ...], mixture: Path, tmp_path: Path
) -> None:
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")
    # 38 and 76 blocks, of which each of the crowd needs 19: one engine is short of them however the two share it.
    own = [*SMALL_STEPS, "--max-model-len=640", "--kv-memory=6MiB", NGRAM, "--tp-decode=2", "--block-size=32", *more]
    own += [INT8, EXPERTS]
    with running_stack(
        tmp_path, model=mixture, prefill=1, decode=1, kvstore="64MiB", settings=settings, more=own
    ) as stack:
        async with asyncio.TaskGroup() as both:
            async with listening(stack, requests_are_handed_to("decode-1")) as listener:
                answers = both.create_task(all_at_once(stack))
                await listener.moment()
            stack.kill("decode-1")
            both.create_task(crowd(stack, 10, 600))
        assert answers.result() == rounded
        assert sum([await counted(stack, engine, "preemptions_total") for engine in ("prefill-1", "decode-1")]) > 0
        assert await counted(stack, "prefill-1", "hand_overs_total") > 0


@pytest.mark.faults
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "tensor parallel",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "quantization",
    "expert parallel",
    "data parallel",
)
async def test_two_engines_that_share_experts_and_lose_a_rank(
    rounded: Answers, more: tuple[str, ...], mixture: Path, tmp_path: Path
) -> None:
    own = [*SMALL_STEPS, *LITTLE_MEMORY, NGRAM, *more, INT8, EXPERTS, GROUP]
    with running_stack(tmp_path, model=mixture, tp=2, more=own) as stack:
        before = stack.pid("engine-1-rank0")
        async with asyncio.TaskGroup() as both:
            async with listening(stack, tokens_are_drawn("engine-2")) as listener:
                answers = both.create_task(all_at_once(stack))
                await listener.moment()
            stack.kill("engine-2-rank1")
            both.create_task(crowd(stack, 20))
        assert answers.result() == rounded, "said by ranks that have all been replaced meanwhile"
        stack.replaced("engine-1-rank0", before)
        engines = ("engine-1", "engine-2")
        assert sum([await counted(stack, engine, "preemptions_total") for engine in engines]) > 0
        assert sum([await counted(stack, engine, "accepted_draft_tokens_total") for engine in engines]) > 0


class Federated(NamedTuple):
    """Two clusters: what comes to `home`, whose only engine is drained, is served by the other one."""

    home: RunningStack
    other: RunningStack


@contextlib.contextmanager
def federated(folder: Path, more: Sequence[str], own: Sequence[str] = (), **shape: Any) -> Iterator[Federated]:
    """`more`: options of both; `own` and `shape`: of the other cluster's stack."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    secret = {"BATON_FEDERATION_SECRET": "known to both clusters and to nobody else"}
    home = ["--cluster=home", f"--federation-address={addresses[0]}", *more]
    other = ["--cluster=other", f"--federation-address={addresses[1]}", f"--federate={addresses[0]}", *more]
    other += own
    with (
        running_stack(folder / "home", kvstore="0", more=home, environment=secret) as first,
        running_stack(folder / "other", more=other, environment=secret, **shape) as second,
    ):
        done = first.baton("drain", "engine-1", "--force")
        assert done.returncode == 0, done.stderr
        yield Federated(first, second)


@pytest.mark.slow
@pytest.mark.features(
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "prefill/decode",
    "tensor parallel",
    "sequence parallel",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "federation",
    "expert parallel",
)
def test_another_clusters_pools_and_a_decoding_engine_that_dies(
    plain: Answers, more: tuple[str, ...], mixture: Path, tmp_path: Path
) -> None:
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")
    own = [*SMALL_STEPS, "--max-model-len=640", "--kv-memory=4MiB", NGRAM, "--tp=2", EXPERTS, SHARED_ROWS]
    with federated(
        tmp_path, [*more, f"--model={mixture}"], prefill=1, decode=1, kvstore="64MiB", settings=settings, own=own
    ) as clusters:
        asyncio.run(answered_while_one_dies(clusters, plain, "decode-1"))


@pytest.mark.slow
@pytest.mark.features(
    "context parallel",
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "prefill/decode",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "federation",
    "quantization",
)
def test_another_clusters_ranks_that_share_prompts_and_one_that_dies(
    rounded: Answers, more: tuple[str, ...], tmp_path: Path
) -> None:
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")
    own = [*SMALL_STEPS, "--max-model-len=640", "--kv-memory=8MiB", NGRAM, INT8, SHARED_PROMPTS]
    with federated(tmp_path, more, prefill=1, decode=1, kvstore="64MiB", settings=settings, own=own) as clusters:
        asyncio.run(answered_while_one_dies(clusters, rounded, "prefill-1-rank1"))


async def answered_while_one_dies(clusters: Federated, plain: Answers, dies: str) -> None:
    home, other = clusters
    async with asyncio.TaskGroup() as both:
        async with listening(other, requests_are_handed_to("decode-1")) as listener:
            answers = both.create_task(all_at_once(home))
            await listener.moment()
        other.kill(dies)
        both.create_task(crowd(home, 10, 600))
    assert answers.result() == plain
    assert sum([await counted(other, engine, "preemptions_total") for engine in ("prefill-1", "decode-1")]) > 0
    assert await counted(other, "prefill-1", "hand_overs_total") > 0
    async with httpx2.AsyncClient() as http:
        page = (await http.get(f"{home.url}/metrics")).text
    forwarded = re.findall(r'(?m)^baton_gateway_forwarded_total\{[^}]*cluster="other"[^}]*\} (\S+)$', page)
    assert sum(map(float, forwarded)) > len(REQUESTS)


@pytest.mark.slow
@pytest.mark.features(
    "federation",
    "pipeline parallel",
    "KV connector",
    "prefix cache",
    "n > 1",
    "tool calls",
    "pooling",
    "LoRA",
    "logits processors",
    "prompt embeds",
    "quantization",
)
def test_another_clusters_stages_with_a_connector(rounded: Answers, more: tuple[str, ...], tmp_path: Path) -> None:
    with federated(tmp_path, more, pp=2, own=[*SMALL_STEPS, *connector(tmp_path), INT8]) as clusters:
        assert asyncio.run(all_at_once(clusters.home)) == rounded


@pytest.mark.slow
@pytest.mark.features("federation", "expert parallel", "data parallel", "n > 1", "tool calls", "LoRA", "pooling")
def test_another_clusters_engines_that_share_experts(
    plain: Answers, more: tuple[str, ...], mixture: Path, tmp_path: Path
) -> None:
    with federated(tmp_path, [*more, f"--model={mixture}"], own=[EXPERTS, GROUP]) as clusters:
        assert asyncio.run(all_at_once(clusters.home)) == plain
