"""What a load generator reads from a stream of events, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.client.stream import FrameScanner, StreamError, StreamSummary

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(content: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def read(*events: Any, usage: bool = True) -> StreamSummary:
    """One event each second, from second 1; those of a list come together."""
    scanner = FrameScanner()
    last = [*events, *([USAGE] if usage else []), b"[DONE]"]
    for second, value in enumerate(last, 1):
        together = value if isinstance(value, list) else [value]
        data = b"".join(e if isinstance(e, bytes) and e.startswith(b":") else event(e) for e in together)
        scanner.feed(data, float(second))
    return scanner.finish()


def test_each_frame_with_text_is_a_token() -> None:
    stream = read(text("a"), text("b"), text("c", "length"))
    assert stream == StreamSummary([1.0, 2.0, 3.0], 7, 5, "length")


def test_a_chats_role_beside_the_first_text_and_the_end_are_no_tokens() -> None:
    first = [delta(role="assistant", content=""), delta(content="a")]
    assert read(first, delta(content="b"), delta("stop")) == StreamSummary([1.0, 2.0], 7, 5, "stop")


def test_a_role_without_text_says_when_the_first_token_came() -> None:
    """As of a model that reasons or calls: what its tokens say is not decided yet."""
    stream = read(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"))
    assert stream.token_times == [1.0, 2.0, 3.0]
    called = read(delta(role="assistant", content=""), delta("tool_calls", tool_calls=[]))
    assert called.token_times == [1.0, 2.0], "nothing was text, and it lasted until its end"


def test_a_first_frame_with_role_and_text_is_a_token() -> None:
    assert read(delta(role="assistant", content="a"), delta("stop")).token_times == [1.0]


def test_an_incomplete_character_counts_as_a_token() -> None:
    assert read(text("a"), text(""), text("é"), text("", "stop")).token_times == [1.0, 2.0, 3.0]


def test_a_reasoning_model_streams_tokens_before_its_content() -> None:
    assert read(delta(role="assistant"), delta(reasoning_content="hm"), delta("stop")).token_times == [1.0, 2.0]


def test_an_answer_whose_tokens_give_no_text_comes_with_its_end() -> None:
    assert read(text("", "stop")) == StreamSummary([1.0], 7, 5, "stop")
    assert read([delta(role="assistant", content=""), delta("stop")]).token_times == [1.0]
    assert read().token_times == [], "nothing was answered"


def test_comments_that_keep_a_connection_alive_are_nothing() -> None:
    assert read(b": ping\n\n", text("a"), b": ping\n\n", text("b", "stop")).token_times == [2.0, 4.0]


def test_without_usage_frames_are_counted() -> None:
    assert read(text("a"), text("b", "length"), usage=False) == StreamSummary([1.0, 2.0], None, 2, "length")


def test_usage_may_tell_what_was_cached() -> None:
    assert read(text("a")).cached_tokens is None
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read(text("a"), {"choices": [], "usage": usage}, usage=False).cached_tokens == 4
    usage |= {"prompt_tokens_details": None}
    assert read(text("a"), {"choices": [], "usage": usage}, usage=False).cached_tokens is None


def test_an_answer_is_kept_only_for_whoever_asks() -> None:
    said = [f"{i} said, " for i in range(20)]
    for keep in (True, False):
        scanner = FrameScanner(keep)
        events = [delta(role="assistant", content=""), *(delta(content=word) for word in said), delta("stop"), USAGE]
        for value in (*events, b"[DONE]"):
            scanner.feed(event(value), 1.0)
        assert scanner.finish().text == ("".join(said) if keep else "")


def test_reasoning_is_no_part_of_an_answer() -> None:
    scanner = FrameScanner(keep_text=True)
    for value in (delta(reasoning_content="hm"), delta(content="yes"), delta("stop"), b"[DONE]"):
        scanner.feed(event(value), 1.0)
    assert scanner.finish().text == "yes"


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 9))
def test_a_stream_may_be_cut_anywhere(cuts: list[int], count: int) -> None:
    whole = b"".join(event(text(f"word data: {i} \n\n")) for i in range(count)) + event(USAGE) + event(b"[DONE]")
    scanner, at = FrameScanner(), 0
    for second, cut in enumerate(cuts):
        scanner.feed(whole[at : at + cut], float(second))
        at += cut
    scanner.feed(whole[at:], 99.0)
    stream = scanner.finish()
    assert len(stream.token_times) == count
    assert stream.token_times == sorted(stream.token_times)
    assert stream.prompt_tokens == 7


def test_a_stream_that_breaks_off_is_an_error() -> None:
    scanner = FrameScanner()
    scanner.feed(event(text("a")), 1.0)
    with pytest.raises(StreamError, match="broke off"):
        scanner.finish()
    with pytest.raises(StreamError, match="broke off"):
        FrameScanner().finish()


def test_an_error_in_a_stream_is_an_error() -> None:
    with pytest.raises(StreamError, match="out of luck"):
        read(text("a"), {"error": {"message": "out of luck"}}, usage=False)


@pytest.mark.parametrize("garbage", [b"nonsense", b"[1]", b"{", b"\xff"])
def test_garbage_in_a_stream_is_an_error(garbage: bytes) -> None:
    with pytest.raises(StreamError, match="JSON"):
        read(text("a"), garbage)


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    scanner = FrameScanner()
    scanner.feed(b"data: " + b"x" * 1_000_000, 1.0)
    with pytest.raises(StreamError, match="more than"):
        scanner.feed(b"x" * 100_000, 1.0)
