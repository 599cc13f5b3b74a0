"""Whatever a client sends, the answer is a success or a 4xx that names the field; never a 5xx, never silence."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.memory_bus import MemoryBus
from tests.support.gateway.fake_services import MODEL, FakeRing
from tests.support.gateway.gateway_server import gateway_stack

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
FIELDS = [
    "model",
    "messages",
    "prompt",
    "tokens",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "add_special_tokens",
    "priority",
    "cache_salt",
    "user",
    "response_format",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "functions",
    "modalities",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "return_token_strs",
    "unheard_of",
]

numbers = st.one_of(
    st.integers(-3, 40), st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 1e308])
)
texts = st.one_of(st.text(max_size=8), st.sampled_from(["", "\ud800", "a\udfff", "auto", "none", "user", "text", "\0"]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
parts = st.fixed_dictionaries({"type": st.one_of(st.just("text"), texts)}, optional={"text": texts})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.just("user"), scalars)},
        optional={"content": st.one_of(texts, st.lists(parts, max_size=2), scalars), "name": scalars},
    ),
    max_size=3,
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=4),
    st.lists(st.lists(st.integers(-1, 3000), max_size=3), max_size=3),
    st.dictionaries(st.one_of(st.integers(-1, 3000).map(str), texts), scalars, max_size=3),
    messages,
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2)),
)
fields = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)


@pytest.fixture(scope="module")
def gateway() -> Iterator[httpx2.Client]:
    """A gateway on a loop of its own, so that plain, shrinking tests can call it."""
    ready, done = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        bus = MemoryBus()
        async with gateway_stack(bus, ring=FakeRing(bus, longest=20)) as stack:
            address.append(stack.url)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.02)
        await bus.close()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(60)
    with httpx2.Client(base_url=address[0], timeout=60, verify=False) as client:
        yield client
    done.set()
    thread.join(60)


def check(response: httpx2.Response) -> None:
    """A success, or a 4xx in OpenAI's shape; 400 names the field."""
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert isinstance(error["message"], str)
        assert response.status_code != 400 or isinstance(error["param"], str), error


@settings(max_examples=500, deadline=None)
@given(path=st.sampled_from(sorted(VALID)), changes=fields)
def test_any_value_of_any_field_is_served_or_refused(
    gateway: httpx2.Client, path: str, changes: dict[str, Any]
) -> None:
    body = json.dumps(VALID[path] | changes)  # NaN, Infinity and lone surrogates included, as clients manage to send
    check(gateway.post(path, content=body.encode()))


@settings(max_examples=200, deadline=None)
@given(path=st.sampled_from(sorted(VALID)), body=st.binary(max_size=60), cut=st.integers(0, 60))
def test_what_is_no_json_is_refused(gateway: httpx2.Client, path: str, body: bytes, cut: int) -> None:
    valid = json.dumps(VALID[path]).encode()
    for content in (body, valid[:cut], valid[:cut] + body + valid[cut:]):
        check(gateway.post(path, content=content))


@settings(max_examples=50, deadline=None)
@given(
    path=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    method=st.sampled_from(["GET", "PUT", "POST"]),
)
def test_any_path_is_answered(gateway: httpx2.Client, path: str, method: str) -> None:
    for character in "?#%":
        path = path.replace(character, "_")
    check(gateway.request(method, "/x" + path))


def test_huge_and_deep_bodies_are_refused(gateway: httpx2.Client) -> None:
    for body in (b"[" * 1_000_000, b'{"x":' * 50_000 + b"1" + b"}" * 50_000, b"x" * (17 * 2**20)):
        response = gateway.post("/v1/chat/completions", content=body)
        assert response.status_code in (400, 413)
