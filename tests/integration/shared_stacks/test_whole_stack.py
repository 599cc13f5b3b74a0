"""The whole stack as `make up` starts it, on the demo model, driven by the openai SDK and raw HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import ollama
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared import topics
from shared.ids import Attempt, GatewayId, ModelName, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import Deltas
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import TextPrompt, Tokenize
from tests.integration.shared_stacks.conftest import INFILL
from tests.support.cluster.bus_moments import user_bus
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, blocks_in_use, stream_chat
from tests.support.cluster.stack import RunningStack
from tests.support.paths import DEMO_MODEL

CONCURRENT, TOKENS = 64, 16


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


@pytest.fixture(scope="module")
def reference() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def answer(question: str, tokens: int) -> str:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


async def test_answers_are_those_of_transformers(stack: RunningStack, client: AsyncOpenAI, reference: Any) -> None:
    for question in QUESTIONS:
        answer = await client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=120
        )
        assert answer.choices[0].message.content == reference(question, 120)


async def test_the_demo_model_knows_the_capital_of_france(stack: RunningStack, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_concurrent_streams_equal_their_sequential_runs(stack: RunningStack, client: AsyncOpenAI) -> None:
    questions = [f"{QUESTIONS[i % len(QUESTIONS)]}{' Please.' * (i // len(QUESTIONS))}" for i in range(CONCURRENT)]
    alone = [await stream_chat(client, stack.model, q, max_tokens=TOKENS) for q in questions]
    async with asyncio.timeout(DEADLINE):
        together = await asyncio.gather(*(stream_chat(client, stack.model, q, max_tokens=TOKENS) for q in questions))
    assert [(s.text, s.finishes, s.completion_tokens) for s in together] == [
        (s.text, s.finishes, s.completion_tokens) for s in alone
    ]


async def test_a_seed_makes_sampling_repeatable(stack: RunningStack, client: AsyncOpenAI) -> None:
    async def draw(seed: int) -> list[str]:
        answer = await client.completions.create(
            model=stack.model, prompt="Once upon a time", max_tokens=24, temperature=1.0, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    first, again, other = await draw(7), await draw(7), await draw(8)
    assert first == again
    assert first != other
    assert len(set(first)) == 3


async def test_a_prompt_seen_before_is_not_computed_again(stack: RunningStack, client: AsyncOpenAI) -> None:
    prompt = "The capital of France is Paris. The capital of Italy is Rome. " * 4
    cached = []
    for _ in range(2):
        answer = await client.completions.create(
            model=stack.model, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "seen before"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert 0 < cached[1] <= answer.usage.prompt_tokens - 1
    assert cached[1] % 16 == 0


async def test_another_salt_shares_no_cache(stack: RunningStack, client: AsyncOpenAI) -> None:
    for salt in ("one", "two"):
        answer = await client.completions.create(
            model=stack.model, prompt="A salted prompt. " * 20, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_log_probabilities_are_log_softmax_of_the_model(stack: RunningStack, client: AsyncOpenAI) -> None:
    prompt = "The capital of France is"
    answer = await client.completions.create(
        model=stack.model, prompt=prompt, max_tokens=1, logprobs=5, temperature=1.3, top_p=0.5, seed=1
    )
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
    expected = logits.log_softmax(-1).topk(5)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs is not None
    top = answer.choices[0].logprobs.top_logprobs[0]
    got = sorted(top.values(), reverse=True)[:5]
    assert got == pytest.approx(expected.values.tolist(), abs=1e-3)


async def test_a_stop_string_ends_the_stream_and_is_not_sent(stack: RunningStack, client: AsyncOpenAI) -> None:
    whole = await stream_chat(client, stack.model, "Count from 3 to 12.", max_tokens=60)
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = await stream_chat(client, stack.model, "Count from 3 to 12.", max_tokens=60, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finishes == ["stop"]
    assert await blocks_in_use(stack) == 0


async def test_a_client_that_disconnects_frees_its_blocks(stack: RunningStack, client: AsyncOpenAI) -> None:
    assert await blocks_in_use(stack) == 0
    streams = [
        await client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": f"Tell me a story ({i})."}],
            stream=True,
            max_tokens=1900,
            extra_body={"ignore_eos": True},
        )
        for i in range(8)
    ]
    for stream in streams:
        await anext(aiter(stream))
    said = await stack.until_heard(lambda said: any(life.engine for life in said.values()))
    reports = [life.engine for life in said.values() if life.engine]
    assert sum(report.running + report.waiting for report in reports) > 0
    for stream in streams:
        await stream.close()
    assert await blocks_in_use(stack) == 0


async def test_a_gap_is_filled_behind_the_text_around_it(stack: RunningStack, client: AsyncOpenAI) -> None:
    """By OpenAI's and Ollama's clients; the first two prompts are one request's."""
    before, after = ["The fox", "The hare"], " slept."
    texts = [INFILL.format(prefix=text, suffix=after) for text in before]
    asked: Any = {"model": stack.state.model, "max_tokens": 8, "temperature": 0}
    plain = await client.completions.create(prompt=texts, **asked)
    filled = await client.completions.create(prompt=before, suffix=after, **asked)
    assert [each.text for each in filled.choices] == [each.text for each in plain.choices]
    assert filled.usage is not None
    assert plain.usage is not None
    assert filled.usage.prompt_tokens == plain.usage.prompt_tokens
    async with ollama.AsyncClient(host=stack.url) as other:
        options = {"num_predict": 8, "temperature": 0}
        answer = await other.generate(model=stack.state.model, prompt=before[0], suffix=after, options=options)
        assert answer.response == plain.choices[0].text
        with pytest.raises(ollama.ResponseError, match="raw: not allowed together with suffix"):
            await other.generate(model=stack.state.model, prompt="a", suffix="b", raw=True)


async def test_tokenize_and_detokenize_are_inverse(stack: RunningStack, http: httpx2.AsyncClient) -> None:
    text = "The capital of Norway is Oslo."
    tokens = (await http.post("/tokenize", json={"model": stack.model, "prompt": text})).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = (await http.post("/detokenize", json={"model": stack.model, "tokens": tokens["tokens"]})).json()
    assert back["prompt"] == text


async def test_token_prompts_equal_text_prompts(
    stack: RunningStack, client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    text = "The capital of France is"
    tokens = (await http.post("/tokenize", json={"model": stack.model, "prompt": text})).json()["tokens"]
    both = await client.completions.create(model=stack.model, prompt=[tokens, tokens], temperature=0)
    one = await client.completions.create(model=stack.model, prompt=text, temperature=0)
    assert {choice.text for choice in both.choices} == {one.choices[0].text}


async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(model=stack.model, messages=[{"role": "user", "content": "long " * 5000}])
    assert "2048" in error.value.message
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")
    for beams in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(
                model=stack.model, prompt="long " * 5000, extra_body={"use_beam_search": beams}
            )
        assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b"\xff\xfe"),
        ("/v1/chat/completions", b"null"),
        ("/v1/chat/completions", b'{"model": "baton-demo", "messages": []}'),
        ("/v1/chat/completions", b'{"model": "baton-demo", "messages": "hi"}'),
        ("/v1/chat/completions", b'{"model": "baton-demo", "messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "\\udfff"}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "temperature": NaN}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "temperature": 1e999}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "max_tokens": "ten"}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "max_tokens": 0}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": [1, 99999999]}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": [-1]}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": ""}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "logit_bias": {"99999999": 1}}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "a", "stop_token_ids": [99999999]}'),
        ("/v1/completions", b'{"model": "baton-demo", "prompt": "' + b"a b " * 400_000 + b'"}'),
        ("/v1/completions", b'{"model": "nobody", "prompt": "a"}'),
        ("/tokenize", b'{"model": "baton-demo", "messages": 1}'),
        ("/detokenize", b'{"model": "baton-demo", "tokens": [99999999]}'),
    ],
)
async def test_bad_input_is_the_clients_error(http: httpx2.AsyncClient, path: str, body: bytes) -> None:
    answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert set(error) >= {"message", "type", "param", "code"}


async def test_a_body_over_the_bus_limit_is_413(http: httpx2.AsyncClient, stack: RunningStack) -> None:
    body = {"model": stack.model, "prompt": "x" * (9 * 2**20)}
    answer = await http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 413


async def test_what_a_gateway_gives_up_without_knowing_its_engine_ends_there(stack: RunningStack) -> None:
    """A gateway that never reads its `RequestPlaced`, as if all of them were lost."""
    gateway, request, attempt = GatewayId("gateway-forgetful"), RequestId("given-up"), Attempt(1)
    received: list[Any] = []

    async def note(message: Any) -> None:
        received.append(message)

    async with user_bus(stack, "gateway") as bus:
        await bus.subscribe(topics.gateway_inbox(gateway), note)
        tokenize = Tokenize(
            request=request,
            attempt=attempt,
            gateway=gateway,
            model=ModelName(stack.model),
            prompt=TextPrompt("The capital of"),
            sampling=SamplingOptions(seed=7),
            stopping=StopConditions(max_tokens=1900, ignore_eos=True),
        )
        await bus.publish(topics.tokenize(ModelName(stack.model)), tokenize)
        async with asyncio.timeout(DEADLINE):
            while not any(isinstance(message, Deltas) and message.deltas for message in received):
                await asyncio.sleep(0.01)
        await bus.publish(topics.withdrawals(), Withdraw(request, attempt))
        await stack.until_heard(lambda said: said["engine-1"].engine is not None and not said["engine-1"].load)
    deltas = [delta for message in received if isinstance(message, Deltas) for delta in message.deltas]
    assert deltas
    assert all(delta.finish is None for delta in deltas), "it ran to its end"


async def test_garbage_on_every_subject_harms_nobody(stack: RunningStack, client: AsyncOpenAI) -> None:
    import nats

    before = {m.instance: m.pid for m in stack.state.members}
    for user in ("gateway", "tokenizer", "coordinator", "scheduler", "worker", "detokenizer"):
        name, password = stack.user_credentials(user)
        connection = await nats.connect(list(stack.state.nats_url), user=name, password=password, allow_reconnect=False)
        stack.own_connections.add(connection.client_id)
        for subject in SUBJECTS:
            for garbage in (b"", b"\xc1\xff", b"\x91\xa1x", b"[]", b"\x80", bytes(range(256))):
                await connection.publish(f"baton.{subject}", garbage)
        await connection.flush()
        await connection.close()
    answer = await stream_chat(client, stack.model, "What is the capital of France?")
    assert "Paris" in answer.text
    assert {m.instance: m.pid for m in stack.state.members} == before


SUBJECTS = (
    "tokenize.baton-demo",
    "tokenizer.baton-demo.ask",
    "route",
    "withdraw",
    "engine.engine-1.requests",
    "engine.engine-1.steps",
    "engine.engine-1.results",
    "engine.engine-1.control",
    "engine.engine-1.probe",
    "detokenizer.detokenizer-1.tokens",
    "gateway.gateway-1.deltas",
    "gateway.gateway-2.deltas",
    "lifecycle.scheduler.engine-1",
    "lifecycle.gateway.gateway-1",
    "instance.engine-1.control",
    "instance.gateway-1.control",
    "supervisor.scale",
    "admin.list",
    "admin.drain",
    "admin.scale",
)


async def test_metrics_and_logs_tell_of_a_request(stack: RunningStack, http: httpx2.AsyncClient) -> None:
    body = {"model": stack.model, "prompt": "The capital of", "max_tokens": 4}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "traced-1"})
    assert answer.headers["x-request-id"] == "traced-1"
    metrics = (await http.get("/metrics")).text
    for wanted in ("time_to_first_token", "inter_token", "requests_total", "generation_tokens"):
        assert wanted in metrics
    logs = stack.baton("logs", "--request", "traced-1", "--json")
    services = {json.loads(line)["service"] for line in logs.stdout.splitlines()}
    assert services >= {"gateway", "tokenizer", "coordinator", "scheduler", "detokenizer"}, logs.stdout


async def test_every_service_answers_prometheus(stack: RunningStack) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        for life in (await stack.until_heard(lambda said: True)).values():
            if life.service == "supervisor":
                continue
            assert life.metrics_port, life
            text = (await http.get(f"http://127.0.0.1:{life.metrics_port}/metrics")).text
            assert "baton_messages_handled_total" in text
            if life.service == "scheduler":
                labels = f'engine="{life.instance}",model_name="{stack.model}"'
                for name in ("num_requests_running", "kv_cache_usage_perc", "request_queue_time_seconds_count"):
                    assert f"vllm:{name}{{{labels}}}" in text
            assert 0 < float(text.split("\nbaton_heartbeat_age_seconds ")[1].split()[0]) < 60
