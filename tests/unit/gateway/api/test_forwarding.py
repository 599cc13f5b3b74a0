"""What of a request goes to the overflow provider, what keeps it here, and what is read of the answer."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.forwarding import (
    ForwardedRequest,
    ForwardedStream,
    ProviderUsage,
    read_forwarded,
    usage_of_body,
)
from services.gateway.core.overflow import ModelNames, NotForwardable

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é\u2028"}], "temperature": 0.25}
SAME = ModelNames.parse([])


def forwarded(kind: Any, dialect: Any = "openai", names: ModelNames = SAME, **fields: Any) -> ForwardedRequest:
    return read_forwarded(json.dumps(fields).encode(), kind, dialect, names, ["m"])


def sent(request: ForwardedRequest) -> Any:
    return json.loads(request.body)


def test_openais_fields_go_as_they_came_and_ignored_ones_stay() -> None:
    request = forwarded("chat", **CHAT, tools=[{"type": "function"}], store=False, metadata={}, top_k=None, n=2)
    assert sent(request) == {**CHAT, "tools": [{"type": "function"}], "n": 2}
    assert (request.path, request.model, request.provider_model) == ("/chat/completions", "m", "m")
    assert not request.stream
    completion = forwarded("completion", model="m", prompt=["a", "b"], max_tokens=5, echo=True)
    assert sent(completion) == {"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "echo": True}
    assert completion.path == "/completions"


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("chat", {**CHAT, "store": True}, "store"),
        ("chat", {**CHAT, "top_k": 5}, "top_k"),
        ("chat", {**CHAT, "guided_regex": "a+"}, "guided_regex"),
        ("chat", {**CHAT, "logit_bias": {"5": 1}}, "logit_bias"),
        ("chat", {**CHAT, "response_format": {"type": "structural_tag"}}, "response_format.type"),
        ("chat", {**CHAT, "stream": True, "stream_options": {"resumable": True}}, "stream_options.resumable"),
        ("chat", {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.cont"),
        ("chat", {**CHAT, "priority": 3}, "priority"),
        ("chat", {**CHAT, "model": 5}, "model"),
        ("completion", {"model": "m", "prompt": [1, 2]}, "prompt"),
        ("completion", {"model": "m", "prompt": [[1], [2]]}, "prompt"),
        ("completion", {"model": "m", "prompt": "x" * 2**21}, "body"),
    ],
)
def test_what_the_provider_would_do_otherwise_stays_here(kind: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(NotForwardable, match=f"^{field}"):
        forwarded(kind, **fields)


def test_a_server_of_the_same_model_gets_what_it_understands() -> None:
    fields = {"model": "m", "prompt": [1, 2], "top_k": 5, "logit_bias": {"5": 1.0}}
    assert sent(forwarded("completion", "vllm", **fields)) == fields
    with pytest.raises(NotForwardable, match=r"^enable_prefix_caching"):
        forwarded("completion", "vllm", **fields, enable_prefix_caching=False)
    assert (
        sent(forwarded("completion", "baton", **fields, enable_prefix_caching=False))["enable_prefix_caching"] is False
    )
    stream = {**CHAT, "stream": True, "stream_options": {"resumable": True}}
    with pytest.raises(NotForwardable, match="resumable"):
        forwarded("chat", "baton", **stream)


def test_models_have_the_providers_names() -> None:
    names = ModelNames.parse(["m=big/M", "n=N"])
    assert sent(forwarded("chat", names=names, **CHAT))["model"] == "big/M"
    unnamed = {name: value for name, value in CHAT.items() if name != "model"}
    assert sent(forwarded("chat", names=names, **unnamed))["model"] == "big/M", "it is the only one that is served"
    with pytest.raises(NotForwardable, match=r"^model"):
        forwarded("chat", names=names, **{**CHAT, "model": "q"})
    assert ModelNames.parse(["m=M", "all"]).at_provider("q") == "all"
    assert ModelNames.parse(["all"]).at_provider(None) == "all"
    with pytest.raises(NotForwardable):
        SAME.at_provider(None)
    for wrong in (["a", "b"], ["=a"], ["a="], ["a=b", "a=c"], [""]):
        with pytest.raises(ValueError, match="NAME=NAME_THERE"):
            ModelNames.parse(wrong)


def test_an_alias_is_the_providers_name_of_its_model() -> None:
    body, names = json.dumps({**CHAT, "model": "small"}).encode(), ModelNames.parse(["m=big/M"])
    request = read_forwarded(body, "chat", "openai", names, ["m"], {"small": "m"}.__getitem__)
    assert (request.model, request.provider_model, sent(request)["model"]) == ("small", "big/M", "big/M")


def test_the_usage_of_a_stream_is_always_asked_for_and_shown_to_who_wants_it() -> None:
    plain = forwarded("chat", **CHAT, stream=True, stream_options={"resumable": False})
    assert (sent(plain)["stream_options"], plain.stream, plain.shows_usage) == ({"include_usage": True}, True, False)
    asked = forwarded("chat", **CHAT, stream=True, stream_options={"include_usage": True})
    assert asked.shows_usage


def test_what_a_request_may_come_to_counts_for_its_key() -> None:
    assert forwarded("completion", model="m", prompt="x" * 4000, max_tokens=50, n=3).expected_tokens in range(
        1150, 1190
    )


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_body_is_an_error_of_another_kind(body: bytes) -> None:
    for kind in ("chat", "completion"):
        with contextlib.suppress(NotForwardable):
            read_forwarded(body, kind, "openai", SAME, [])


EVENTS = (
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}],"usage":null}\r\n\r\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n',
    b"data: [DONE]\n\n",
)


@given(st.lists(st.integers(1, 300), max_size=20), st.booleans())
def test_a_stream_passes_unchanged_however_it_is_cut(cuts: list[int], shows_usage: bool) -> None:
    stream, whole = ForwardedStream(shows_usage=shows_usage), b"".join(EVENTS) + b"data: cut"
    passed = b""
    for size in cuts:
        part, whole = whole[:size], whole[size:]
        passed += stream.feed(part)
    passed += stream.feed(whole) + stream.rest()
    kept = [event for event in EVENTS if shows_usage or b'"choices":[]' not in event]
    assert passed == b"".join(kept) + b"data: cut"
    assert stream.usage == ProviderUsage(3, 2)
    assert stream.usage.total == 5


def test_a_stream_begins_with_data_and_not_with_an_error() -> None:
    stream = ForwardedStream(shows_usage=True)
    stream.feed(EVENTS[0])
    assert not stream.begun
    stream.feed(b'data: {"error":{"message":"no"}}\n\n')
    assert (stream.begun, stream.failed) == (True, True)
    other = ForwardedStream(shows_usage=True)
    other.feed(EVENTS[1])
    assert (other.begun, other.failed) == (True, False)


def test_a_body_without_usage_costs_nothing() -> None:
    assert usage_of_body(b'{"usage":{"prompt_tokens":1,"completion_tokens":4}}').total == 5
    for body in (b"", b"[]", b'{"usage":null}', b'{"usage":{"prompt_tokens":-4}}'):
        assert usage_of_body(body).total == 0
