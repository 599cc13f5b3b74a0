"""What vLLM's own tests of its API check, with its clients' calls: completions, chats, log-probabilities, biases, echo,
token ids, stopping, tokenising. Texts and numbers are those of the demo model."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types import CompletionUsage
from transformers import AutoTokenizer

from tests.support.cluster.conversations import DEADLINE
from tests.support.cluster.stack import RunningStack
from tests.support.paths import DEMO_MODEL

MODEL = "baton-demo"
PROMPT = "Hello, my name is"
IDS = [5, 6, 7, 8, 9]
HELLO: Any = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
CONTEXT, VOCABULARY = 2048, 2048
SAYING = "Here is a common saying about apple. An apple a day, keeps"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
        },
    }
]
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


async def complete(client: AsyncOpenAI, prompt: Any = PROMPT, body: Any = None, **fields: Any) -> Any:
    given = {"max_tokens": 5, "temperature": 0.0, **fields}
    return await client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **given)


async def chat(client: AsyncOpenAI, messages: Any = HELLO, body: Any = None, **fields: Any) -> Any:
    given = {"max_completion_tokens": 5, "temperature": 0.0, **fields}
    return await client.chat.completions.create(model=MODEL, messages=messages, extra_body=body, **given)


async def chunks_of(answer: Any) -> list[Any]:
    return [chunk async for chunk in answer]


# The server.


async def test_what_the_tokenizers_files_say_is_what_vllm_shows(http: httpx2.AsyncClient, tokenizer: Any) -> None:
    """Which shows what `transformers` was made with; here is no key that it has not, and no path."""
    shown = (await http.get("/tokenizer_info")).json()
    assert shown["chat_template"] == tokenizer.chat_template
    theirs = {**tokenizer.init_kwargs, **{name: str(token) for name, token in tokenizer.special_tokens_map.items()}}
    same = [name for name in shown if name in theirs and name not in ("chat_template", "extra_special_tokens")]
    assert {name: shown[name] for name in same} == {name: theirs[name] for name in same}
    assert {"eos_token", "model_max_length"} <= set(same)
    assert isinstance(shown["tokenizer_class"], str)
    assert str(DEMO_MODEL) not in str(shown)
    assert (await http.get("/tokenizer_info", params={"model": MODEL})).json() == shown
    missing = await http.get("/tokenizer_info", params={"model": "none"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


# Completions.


async def test_tokens_of_several_steps_come_together_where_the_client_wants_that(client: AsyncOpenAI) -> None:
    fields = {"max_tokens": 48, "stream": True, "stream_options": USAGE}
    each = await chunks_of(await complete(client, body={"ignore_eos": True}, **fields))
    together = await chunks_of(await complete(client, body={"ignore_eos": True, "stream_interval": 16}, **fields))

    def text(chunks: list[Any]) -> str:
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    assert text(together) == text(each)
    assert together[-1].usage.completion_tokens == each[-1].usage.completion_tokens == 48
    assert 2 < len(together) < len(each)


async def test_a_single_completion(client: AsyncOpenAI, tokenizer: Any) -> None:
    answer = await complete(client)
    (choice,) = answer.choices
    assert answer.id
    assert len(choice.text) >= 5
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("length", None, None)
    prompt = len(tokenizer.encode(PROMPT))
    assert answer.usage.model_dump(include={"completion_tokens", "prompt_tokens", "total_tokens"}) == {
        "completion_tokens": 5,
        "prompt_tokens": prompt,
        "total_tokens": prompt + 5,
    }
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert (await complete(client, IDS)).choices[0].prompt_logprobs is None


async def test_an_output_limit_above_what_is_left_of_the_context_is_cut_to_it(client: AsyncOpenAI) -> None:
    answer = await complete(client, [5] * (CONTEXT - 8), {"ignore_eos": True}, max_tokens=CONTEXT)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (8, "length")
    with pytest.raises(BadRequestError, match="max_tokens"):
        await complete(client, [5], max_tokens=CONTEXT + 1)


@pytest.mark.parametrize(("side", "kept"), [("right", slice(4)), ("left", slice(-4, None))])
async def test_truncation_keeps_the_side_that_is_asked_for(client: AsyncOpenAI, side: str, kept: slice) -> None:
    prompt = list(range(3, 11))
    body = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    (choice,) = (await complete(client, prompt, body, max_tokens=1)).choices
    assert choice.prompt_token_ids == prompt[kept]


@pytest.mark.parametrize(("count", "shown"), [(0, {1}), (5, {5, 6})])
async def test_log_probabilities_of_completions(client: AsyncOpenAI, count: int, shown: set[int]) -> None:
    logprobs = (await complete(client, IDS, logprobs=count)).choices[0].logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset) > 0
    assert all(len(top) in shown for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_log_probabilities_are_refused(client: AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(BadRequestError):
        await complete(client, logprobs=21, stream=stream)
    with pytest.raises(BadRequestError):
        await chat(client, logprobs=True, top_logprobs=21, stream=stream)


@pytest.mark.parametrize("count", [-1, 0, 1, None])
async def test_log_probabilities_of_prompts(client: AsyncOpenAI, count: int | None) -> None:
    body = {} if count is None else {"prompt_logprobs": count}
    if count == -1:  # more than --max-logprobs
        for ask in (complete, chat):
            with pytest.raises(BadRequestError):
                await ask(client, body=body)
        return
    answer = await complete(client, ["A robot may not injure another robot", PROMPT], body)
    told = [choice.prompt_logprobs for choice in answer.choices]
    told.append((await chat(client, body=body)).prompt_logprobs)
    if count is None:
        assert told == [None, None, None]
    else:
        assert all(first is None and all(max(1, count) <= len(entry) for entry in rest) for first, *rest in told)


async def test_a_stream_ends_with_text_and_one_reason(client: AsyncOpenAI) -> None:
    whole = (await complete(client)).choices[0].text
    chunks = await chunks_of(await complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].choices[0].text
    whole = (await chat(client)).choices[0]
    first, *chunks = await chunks_of(await chat(client, stream=True))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.message.content
    assert all(chunk.choices[0].delta.content for chunk in chunks), "no delta is empty"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_differ_and_end_by_themselves(client: AsyncOpenAI, stream: bool) -> None:
    answer = await complete(client, n=3, max_tokens=50, temperature=1.0, seed=42, stream=stream)
    if stream:
        chunks = [choice for chunk in await chunks_of(answer) for choice in chunk.choices]
        texts = ["".join(choice.text for choice in chunks if choice.index == i) for i in range(3)]
        assert sum(choice.finish_reason is not None for choice in chunks) == 3
    else:
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    chats = await chat(client, n=2, temperature=0.8, seed=42, max_completion_tokens=10)
    assert [choice.index for choice in chats.choices] == [0, 1]
    assert all(choice.message.content for choice in chats.choices)


@pytest.mark.parametrize("ask", [complete, chat])
async def test_usage_in_streams(client: AsyncOpenAI, ask: Any) -> None:
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, {}):
        chunks = await chunks_of(await ask(client, stream=True, stream_options=options))
        assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = await chunks_of(await ask(client, stream=True, stream_options=USAGE))
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert last.usage.completion_tokens == 5
    continuous = USAGE | {"continuous_usage_stats": True}
    told = [chunk.usage for chunk in await chunks_of(await ask(client, stream=True, stream_options=continuous))]
    counts = [usage.completion_tokens for usage in told]
    assert all(usage.prompt_tokens > 0 for usage in told)
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told)
    assert counts[:-1] == sorted(set(counts)), "each chunk counts more than the one before"
    assert (counts[0], counts[-2:]) == (0 if ask is chat else 1, [5, 5])
    for options in ({"include_usage": None}, USAGE, {"continuous_usage_stats": True}):
        with pytest.raises(BadRequestError):
            await ask(client, stream=False, stream_options=options)


@pytest.mark.parametrize("prompts", [[PROMPT] * 2, [IDS] * 2])
async def test_several_prompts_at_once(client: AsyncOpenAI, prompts: Any) -> None:
    one, other = (await complete(client, prompts)).choices
    assert one.text == other.text
    beams = [choice.text for choice in (await complete(client, prompts, {"use_beam_search": True}, n=2)).choices]
    assert (beams[0], beams[1]) == (beams[2], beams[3])
    assert beams[0] != beams[1]
    texts = ["", ""]
    for chunk in await chunks_of(await complete(client, prompts, stream=True)):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [one.text] * 2


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("prompt", [PROMPT, IDS])
async def test_an_echo_with_log_probabilities(client: AsyncOpenAI, tokenizer: Any, prompt: Any, count: int) -> None:
    (choice,) = (await complete(client, prompt, echo=True, logprobs=count)).choices
    shown = choice.logprobs
    assert choice.text.startswith(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
    assert len(shown.text_offset) == len(shown.tokens) == len(shown.token_logprobs) > 5
    assert (shown.token_logprobs[0], shown.top_logprobs[0]) == (None, None)
    assert all(max(count, 1) <= len(top) <= count + 1 for top in shown.top_logprobs[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"json": {"properties": {"foo": "bar"}, "type": "object"}},
        {"regex": "[.*"},
        {"regex": {"1": "Python"}},
        {"grammar": "root ::= select_statementinvalidsyntax"},
    ],
)
async def test_grammars_that_cannot_be_followed_are_refused(client: AsyncOpenAI, wrong: Any) -> None:
    with pytest.raises(BadRequestError):
        await complete(client, body={"structured_outputs": wrong})


async def test_a_grammar_ends_before_min_tokens(client: AsyncOpenAI) -> None:
    (choice,) = (await complete(client, body={"structured_outputs": {"choice": ["yes"]}, "min_tokens": 5})).choices
    assert (choice.text, choice.finish_reason) == ("yes", "stop")


# Chats.


async def test_log_probabilities_of_chats(client: AsyncOpenAI) -> None:
    assert (await chat(client, logprobs=False)).choices[0].logprobs is None
    for count in (0, 5):
        shown = (await chat(client, logprobs=True, top_logprobs=count)).choices[0].logprobs
        assert [len(position.top_logprobs) for position in shown.content] == [count] * 5
    for count in (1, 2):
        answer = await chat(client, body={"prompt_logprobs": count})
        assert count <= len(answer.prompt_logprobs[3]) <= count + 1


async def test_a_chat_of_several_turns(client: AsyncOpenAI, tokenizer: Any) -> None:
    answer = await chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    prompt = len(tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True)["input_ids"])
    usage = CompletionUsage(completion_tokens=5, prompt_tokens=prompt, total_tokens=prompt + 5)
    assert usage == answer.usage.model_copy(update={"prompt_tokens_details": None})
    more = [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "in JSON"}]
    assert (await chat(client, [*HELLO, *more])).choices[0].message.content


async def test_fields_parts_and_roles_of_messages(client: AsyncOpenAI) -> None:
    text = "what is 1+1?"
    for role in ("user", "assistant"):
        plain = await chat(client, [{"role": role, "content": text}])
        parts = await chat(client, [{"role": role, "content": [{"type": "text", "text": text}]}])
        extra = await chat(client, [{"role": role, "content": text, "extra_field": "0"}])
        contents = {answer.choices[0].message.content for answer in (plain, parts, extra)}
        assert len(contents) == 1
    with pytest.raises(BadRequestError, match="The demo model knows the roles"):
        await chat(client, [{"role": "my-custom-role", "content": text}])


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
async def test_a_seed_has_64_bits(client: AsyncOpenAI, seed: int) -> None:
    with pytest.raises(BadRequestError, match="seed"):
        await chat(client, seed=seed)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 5, "temperature": 0.0}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "logprobs": 1}),
        ("/v1/embeddings", {"input": PROMPT, "encoding_format": "float"}),
    ],
)
async def test_invocations(http: httpx2.AsyncClient, path: str, body: Any) -> None:
    own, invoked = [(await http.post(where, json={"model": MODEL, **body})).json() for where in (path, "/invocations")]
    assert own.keys() == invoked.keys()
    assert (own.get("choices"), own.get("data")) == (invoked.get("choices"), invoked.get("data"))


@pytest.mark.parametrize("echo", [False, True])
async def test_an_echo_and_a_message_that_goes_on(client: AsyncOpenAI, echo: bool) -> None:
    messages = [{"role": "user", "content": "tell me a common saying"}, {"role": "assistant", "content": SAYING}]
    body = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    message = (await chat(client, messages, body)).choices[0].message
    assert message.role == "assistant"
    assert (SAYING in message.content) == echo
    assert len(message.content) > len(SAYING) * echo


async def test_answers_have_vllms_fields_whatever_was_asked_for(client: AsyncOpenAI) -> None:
    answer, completion = await chat(client), await complete(client)
    unused = {"service_tier": None, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    of_prompt = {"prompt_logprobs": None, "prompt_token_ids": None}
    assert unused.items() <= answer.model_dump().items()
    assert of_prompt.items() <= answer.model_dump().items()
    assert unused.items() <= completion.model_dump().items()
    assert of_prompt.items() <= completion.choices[0].model_dump().items()
    for choice in (answer.choices[0], completion.choices[0]):
        assert {"stop_reason": None, "token_ids": None, "routed_experts": None}.items() <= choice.model_dump().items()


async def test_chats_of_a_batch_are_answered_as_each_alone(client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    saying = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": SAYING}]
    conversations = [HELLO, [{"role": "user", "content": "Who are you?"}], saying]
    asked = {"temperature": 0.0, "max_completion_tokens": 5, "logprobs": True, "return_token_ids": True}
    body = {"model": MODEL, "messages": conversations, **asked}
    answer = (await http.post("/v1/chat/completions/batch", json=body)).json()
    alone = [await chat(client, each, {"return_token_ids": True}, logprobs=True) for each in conversations]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, one in zip(answer["choices"], alone, strict=True):
        assert choice["message"]["content"] == one.choices[0].message.content
        assert choice["token_ids"] == one.choices[0].token_ids
        assert choice["prompt_token_ids"] == one.prompt_token_ids
        named = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert named == [entry.token for entry in one.choices[0].logprobs.content]
    assert answer["usage"]["total_tokens"] == sum(one.usage.total_tokens for one in alone)
    go_on = {"echo": True, "continue_final_message": True, "structured_outputs": {"choice": [" on"]}}
    messages = [[*saying[:1], {"role": "assistant", "content": text}] for text in ("Come", "Go")]
    choices = (await http.post("/v1/chat/completions/batch", json={"messages": messages, **go_on})).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Come on", "Go on"]


# Biases, and log-probabilities of chosen tokens.


async def test_biases_are_those_of_tokens_that_there_are(client: AsyncOpenAI) -> None:
    assert (await chat(client, logit_bias={str(VOCABULARY - 1): 1.0})).choices[0].message.content is not None
    wrong: Any
    for wrong, said in (
        ({str(VOCABULARY + 1): 1.0}, [str(VOCABULARY + 1), str(VOCABULARY)]),
        ({"not_a_token_id": 50}, ["not_a_token_id"]),
        ({"1": "not_a_number"}, ["not_a_number"]),
        ({"bad1": 50.0, "bad2": 20.0}, ["bad1", "bad2"]),
    ):
        with pytest.raises(BadRequestError, match="logit_bias") as refused:
            await chat(client, logit_bias=wrong)
        assert [text for text in said if text not in str(refused.value)] == []


async def test_log_probabilities_of_named_tokens(client: AsyncOpenAI) -> None:
    wanted = [100, 1000, 1500]
    body = {"logprob_token_ids": wanted, "return_tokens_as_token_ids": True}
    answer = await chat(client, body=body, max_completion_tokens=1, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content[0].top_logprobs
    assert [entry.token for entry in entries] == [f"token_id:{token}" for token in wanted]
    assert all(-9999.0 <= entry.logprob <= 0.0 for entry in entries)
    completion = await complete(client, body=body, max_tokens=1, logprobs=3)
    (top,) = completion.choices[0].logprobs.top_logprobs
    assert {f"token_id:{token}" for token in wanted} <= top.keys()
    for refused in ({"logprobs": False}, {"logprobs": True, "extra_body": {"logprob_token_ids": []}}):
        with pytest.raises(BadRequestError, match="logprob_token_ids"):
            await client.chat.completions.create(model=MODEL, messages=HELLO, **({"extra_body": body} | refused))


# Token ids.


async def test_token_ids_are_those_of_the_text(client: AsyncOpenAI, tokenizer: Any) -> None:
    prompt = "Complete this sentence with emojis: I love coding 🚀"
    (choice,) = (await complete(client, prompt, {"return_token_ids": True}, max_tokens=10, logprobs=1)).choices
    assert choice.prompt_token_ids == tokenizer.encode(prompt)
    assert tokenizer.decode(choice.token_ids).startswith(choice.text)
    (without,) = (await complete(client, prompt, {"return_token_ids": False})).choices
    assert (without.token_ids, without.prompt_token_ids) == (None, None)


@pytest.mark.parametrize("ask", [complete, chat])
async def test_which_weights_tokens_came_from(client: AsyncOpenAI, ask: Any) -> None:
    """Once for each choice, with its end; and only for who asks."""
    spans = [{"version": "default", "start": 0, "end": 5}]
    body = {"return_weight_versions": True}
    answer = await ask(client, body=body, n=2)
    assert [choice.weight_versions for choice in answer.choices] == [spans, spans]
    choices = [chunk.choices[0] for chunk in await chunks_of(await ask(client, body=body, stream=True))]
    assert [choice.model_dump().get("weight_versions") for choice in choices] == [None] * (len(choices) - 1) + [spans]
    assert "weight_versions" not in (await ask(client)).choices[0].model_dump()
    with pytest.raises(BadRequestError, match="return_weight_versions: not allowed together with use_beam_search"):
        await ask(client, body={**body, "use_beam_search": True})


async def test_a_chat_of_token_ids_is_the_chat_that_they_came_from(
    client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    ids = (await http.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
    body = {"prompt_token_ids": ids, "return_token_ids": True}
    answer = await chat(client, [], body)
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].message.content == (await chat(client)).choices[0].message.content
    with pytest.raises(BadRequestError, match="not allowed together with add_generation_prompt"):
        await chat(client, [], {**body, "add_generation_prompt": True})


async def test_token_ids_of_a_chat_with_tools(client: AsyncOpenAI, tokenizer: Any) -> None:
    answer = await chat(client, body={"return_token_ids": True}, tools=TOOLS, tool_choice="auto", logprobs=True)
    assert "what is 1+1?" in tokenizer.decode(answer.prompt_token_ids)
    assert len(answer.choices[0].token_ids) == 5
    first, *chunks = await chunks_of(await chat(client, body={"return_token_ids": True}, stream=True))
    assert first.prompt_token_ids == (await chat(client, body={"return_token_ids": True})).prompt_token_ids
    assert first.model_dump()["prompt_text"] is None
    assert all("prompt_token_ids" not in chunk.model_dump() for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_those_of_the_log_probabilities(client: AsyncOpenAI, stream: bool) -> None:
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if not stream:
        (choice,) = (await complete(client, body={**body, "prompt_logprobs": 1}, echo=True, logprobs=1)).choices
        named = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
        assert named == choice.prompt_token_ids + choice.token_ids
        assert choice.prompt_logprobs is not None
        return
    chunks = [chunk.choices[0] for chunk in await chunks_of(await complete(client, body=body, logprobs=1, stream=True))]
    assert chunks[0].prompt_token_ids
    named = [int(token.removeprefix("token_id:")) for chunk in chunks for token in chunk.logprobs.tokens]
    assert named == [token for chunk in chunks for token in chunk.token_ids]


# Where an output ends.


async def test_stop_strings_and_tokens(client: AsyncOpenAI) -> None:
    body = {"return_token_ids": True}
    (whole,) = (await complete(client, body=body, max_tokens=20)).choices
    stop = whole.text[8:11]
    (cut,) = (await complete(client, max_tokens=20, stop=stop)).choices
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text.partition(stop)[0], "stop", stop)
    (kept,) = (await complete(client, body={"include_stop_str_in_output": True}, max_tokens=20, stop=[stop])).choices
    assert kept.text == cut.text + stop
    token = whole.token_ids[3]
    until = whole.token_ids.index(token) + 1
    (ended,) = (await complete(client, body={**body, "stop_token_ids": [token]}, max_tokens=20)).choices
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    assert ended.token_ids == whole.token_ids[:until]
    (longer,) = (
        await complete(client, body={**body, "stop_token_ids": [token], "min_tokens": until + 2}, max_tokens=20)
    ).choices
    assert len(longer.token_ids) >= until + 2
    with pytest.raises(BadRequestError, match="stop_token_ids"):
        await chat(client, body={"stop_token_ids": [VOCABULARY]})


async def test_special_tokens_and_words_of_outputs(client: AsyncOpenAI, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "Who are you?"}]
    ids = {"return_token_ids": True}
    (said,) = (await chat(client, question, ids, max_completion_tokens=200)).choices
    assert (said.finish_reason, said.token_ids[-1]) == ("stop", tokenizer.eos_token_id)
    (on,) = (await chat(client, question, {**ids, "ignore_eos": True}, max_completion_tokens=200)).choices
    assert (on.finish_reason, len(on.token_ids)) == ("length", 200)
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    (marked,) = (await chat(client, question, shown, max_completion_tokens=200)).choices
    assert marked.message.content == said.message.content + tokenizer.eos_token
    word = said.message.content.split()[1]
    (other,) = (await chat(client, question, {"bad_words": [word]}, max_completion_tokens=200)).choices
    assert f" {word} " not in other.message.content
    allowed = {"allowed_token_ids": [20, 21], **ids}
    assert set((await complete(client, body=allowed)).choices[0].token_ids) <= {20, 21}


REFUSED: list[tuple[str, Any, str]] = [
    *(("chat/completions", body, "body: expected `object`") for body in ("text", ["a"], 42)),
    ("chat/completions", {"messages": HELLO, "cache_salt": ""}, "cache_salt"),
    *(
        ("chat/completions", {"messages": HELLO, "thinking_token_budget": n}, "thinking_token_budget")
        for n in (-2, 0.6)
    ),
    ("chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": "bogus"}, "tool_choice"),
    ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_schema"}}, "json_schema"),
    ("chat/completions", {"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
    *(("completions", {"prompt": prompt}, "prompt") for prompt in ([], [-1], [[-1]], [999999], None, "")),
    ("completions", {"prompt": PROMPT, "logprobs": 1, "logprob_token_ids": 123}, "logprob_token_ids"),
    *(
        ("chat/completions/batch", {"messages": messages, **more}, words)
        for messages, more, words in (
            ([], {}, "messages: 0 conversations are not allowed"),
            (HELLO, {}, "messages[0]: "),
            ([HELLO, []], {}, "messages[1]: [] is not allowed"),
            ([HELLO, [{"role": "user"}]], {}, "messages[1][0].content: None is not allowed"),
            ([HELLO], {"n": 2}, "n: 2 is not allowed"),
            ([HELLO], {"stream": True}, "stream: "),
            ([HELLO], {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params: "),
        )
    ),
    ("responses", {"input": PROMPT, "background": True, "store": False}, "background"),
    ("responses", {"input": PROMPT, "seed": 2**63}, "seed"),
]
"""By the path behind /v1/."""


async def test_bodies_that_vllm_refuses_are_refused_by_name(http: httpx2.AsyncClient) -> None:
    for path, body, words in REFUSED:
        answer = await http.post(f"/v1/{path}", json=body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), (
            path,
            body,
            answer.text,
        )


async def test_a_choice_of_tools_that_is_null_is_none(client: AsyncOpenAI) -> None:
    grammar = {"structured_outputs": {"choice": ["Rome"]}, "tool_choice": None}
    assert (await chat(client, body=grammar)).choices[0].message.content == "Rome"
    given, null = [await chat(client, body=extra, tools=TOOLS) for extra in ({}, {"tool_choice": None})]
    assert given.choices[0].message == null.choices[0].message


async def test_places_of_tokens_are_the_same_in_a_stream_that_holds_text_back(client: AsyncOpenAI) -> None:
    asked: Any = {"logprobs": 0, "stop": ["\n\n", "never said"], "max_tokens": 12}
    whole = (await complete(client, **asked)).choices[0].logprobs.text_offset
    chunks = await chunks_of(await complete(client, **asked, stream=True))
    assert [place for chunk in chunks for place in chunk.choices[0].logprobs.text_offset] == whole


# What a request comes to.


async def test_a_request_is_rendered_as_it_would_be_generated(client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    sampling = {"temperature": 0.123, "top_p": 0.456, "frequency_penalty": 1.1, "max_tokens": 7}
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = {"model": MODEL, "messages": HELLO, **sampling, **stream}
    rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
    assert rendered["token_ids"] == (await chat(client, body={"return_token_ids": True})).prompt_token_ids
    assert sampling.items() <= rendered["sampling_params"].items()
    assert {"model": MODEL, **stream}.items() <= rendered.items()
    system, *turns = HELLO
    asked = {"model": MODEL, "max_tokens": 7, "system": system["content"], "messages": turns}
    assert (await http.post("/v1/messages/render", json=asked)).json()["token_ids"] == rendered["token_ids"]
    both = {"model": MODEL, "prompt": [PROMPT, "Goodbye world"]}
    listed = (await http.post("/v1/completions/render", json=both)).json()
    assert [each["token_ids"] for each in listed] == [
        (await complete(client, prompt, {"return_token_ids": True})).choices[0].prompt_token_ids
        for prompt in both["prompt"]
    ]
    assert all(each["request_id"].startswith("cmpl-") for each in listed)
    for path in ("chat/completions", "completions", "messages"):
        told: Any = {"prompt": "a"} if path == "completions" else {"messages": turns}
        unknown = await http.post(f"/v1/{path}/render", json={"model": "none", "max_tokens": 7, **told})
        assert (unknown.status_code, "error" in unknown.json()) == (404, True)


async def test_what_was_rendered_is_generated_as_the_request_would_be(
    client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    sampling: Any = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2}
    for extra in ({}, {"structured_outputs": {"regex": "[a-z]{3} [0-9]{3}"}}):
        whole = await complete(client, PROMPT, extra, **sampling)
        asked = {"model": MODEL, "prompt": PROMPT, **sampling, **extra}
        [rendered] = (await http.post("/v1/completions/render", json=asked)).json()
        answer = (await http.post("/inference/v1/generate", json={**rendered, "output_mode": "text"})).json()
        assert answer["request_id"] == f"generate-tokens-{rendered['request_id']}"
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole.choices[0].text, whole.choices[0].finish_reason)
        shown = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert shown == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-3)
    tokens = (await http.post("/inference/v1/generate", json=rendered)).json()["choices"][0]["token_ids"]
    assert tokens == choice["token_ids"]


async def test_scores_are_the_probabilities_of_the_next_token(client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    """Alone, of all tokens; softmax: among the labels."""
    body = {"model": MODEL, "query": IDS, "items": [[10, 11], [12]], "label_token_ids": [20, 21]}
    scored = (await http.post("/generative_scoring", json={**body, "apply_softmax": False})).json()
    among = (await http.post("/generative_scoring", json=body)).json()
    for item, alone, share in zip(([10, 11], [12]), scored["data"], among["data"], strict=True):
        asked: Any = {"logprob_token_ids": [20, 21], "return_tokens_as_token_ids": True}
        answer = await complete(client, [*IDS, *item], asked, max_tokens=1, logprobs=0)
        top = answer.choices[0].logprobs.top_logprobs[0]
        first, other = (math.exp(top[f"token_id:{label}"]) for label in (20, 21))
        assert alone["score"] == pytest.approx(first, rel=1e-3)
        assert share["score"] == pytest.approx(first / (first + other), rel=1e-3)
    assert scored["usage"]["prompt_tokens"] == 2 * len(IDS) + 3


# The server.


def sample(page: str, name: str) -> float:
    """Of all engines and gateways; 0 where there is none yet."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name}{{"))


async def test_what_requests_waited_for_is_at_the_port_of_the_api(
    client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    times = [f"vllm:request_{stage}_time_seconds" for stage in ("queue", "prefill", "decode", "inference")]
    counts = [f"{name}_count" for name in (*times, "vllm:request_params_n", "vllm:iteration_tokens_total")]
    before = (await http.get("/metrics")).text
    for _ in range(3):
        await complete(client, max_tokens=6, body={"ignore_eos": True})
    page = before
    async with asyncio.timeout(DEADLINE):  # engines report about once a second
        while min(sample(page, name) - sample(before, name) for name in counts) < 3:
            await asyncio.sleep(0.1)
            page = (await http.get("/metrics")).text
    grown = {name: sample(page, f"{name}_sum") - sample(before, f"{name}_sum") for name in times}
    queue, prefill, decode, inference = grown.values()
    assert min(prefill, decode) > 0
    assert queue >= 0
    assert inference >= decode  # the first page may be older than the last step of a request before these
    tokens = "vllm:request_max_num_generation_tokens_sum"
    assert sample(page, tokens) - sample(before, tokens) >= 18
    assert "vllm:num_preemptions_total{" in page


async def test_the_load_is_the_number_of_open_answers(client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    async def load() -> int:
        return int((await http.get("/load")).json()["server_load"])

    async def loaded(count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while await load() != count:
                await asyncio.sleep(0.05)

    await loaded(0)
    stream = await complete(client, max_tokens=1900, body={"ignore_eos": True}, stream=True)
    await anext(stream)
    assert await load() == 1
    await stream.close()
    await loaded(0)


async def test_tokens_of_a_response_are_counted_beforehand(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="Hello.", temperature=0, max_output_tokens=5)
    asked: Any = {"input": "And?", "instructions": "Be kind.", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(model=MODEL, **asked)
    answer = await client.responses.create(model=MODEL, **asked, max_output_tokens=5)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(BadRequestError, match="temperature: this field is not known"):
        await client.responses.input_tokens.count(model=MODEL, input="Hello.", extra_body={"temperature": 0})


# Tokenising.


async def test_tokenizing_texts(http: httpx2.AsyncClient, tokenizer: Any) -> None:
    text = "vllm1 This is a test prompt."
    for special in (False, True):
        answer = (await http.post("/tokenize", json={"prompt": text, "add_special_tokens": special})).json()
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert (await http.post("/detokenize", json={"model": MODEL, "tokens": ids})).json() == {"prompt": text}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("end", ["", "add_generation_prompt", "continue_final_message"])
async def test_tokenizing_chats(http: httpx2.AsyncClient, tokenizer: Any, tools: Any, special: bool, end: str) -> None:
    chat = [{"role": "user", "content": "Can I ask a question? vllm1"}]
    if end == "continue_final_message":
        chat.append({"role": "assistant", "content": "Sure,"})
    ends = {name: name == end for name in ("add_generation_prompt", "continue_final_message")}
    prompt = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **ends)
    body = {"messages": chat, "tools": tools, "add_special_tokens": special, **ends}
    answer = (await http.post("/tokenize", json=body)).json()
    assert answer["tokens"] == tokenizer.encode(prompt, add_special_tokens=special)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
