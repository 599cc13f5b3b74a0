"""Frames made from byte templates are the JSON that the API defines, whatever the text holds."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.chat import AssistantMessage
from services.gateway.api.encoding import lazy_json
from services.gateway.api.encoding.lazy_json import JsonSlices, LazyEncoder, packed_slices
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import ResponseOptions, StreamOptions
from services.gateway.api.logprobs import MIN_LOGPROB, chat_logprobs, completion_logprobs
from services.gateway.api.response import ChoiceState, ResponseHeader, response_body, usage
from services.gateway.http.streaming import SseFrames, StreamWriter, error_frame
from services.gateway.metrics import Histogram
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from services.gateway.tokenizer_client import UNPACKED_BYTES, unpack_in_turns
from shared.ids import Attempt, RequestId
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs
from shared.packing import TOKEN_BYTES, pack

CHAT = ResponseHeader("chat", "chatcmpl-1", 17, 'a "model"/é')
COMPLETION = ResponseHeader("completion", "cmpl-1", 17, "demo")
PLAIN, USAGE, CONTINUOUS = StreamOptions(False, False), StreamOptions(True, False), StreamOptions(True, True)
POSITION = PositionLogprobs(
    LogprobText("a", b"\xc3", -0.5, 1), (LogprobText("a", b"\xc3", -0.5, 1), LogprobText("b", b"b", float("-inf"), 2))
)


def parsed(frame: bytes) -> Any:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2, "an event is one line"
    return json.loads(frame[6:])


async def body_of(
    header: ResponseHeader, choices: list[ChoiceState], options: ResponseOptions, started_at: float = 0.0
) -> Any:
    return json.loads(await LazyEncoder().encode(response_body(header, choices, options, started_at)))


HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": 'a "model"/é'}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    choice = ChoiceState(0, 0)
    assert parsed(SseFrames(CHAT, PLAIN, 1).text(choice, text)) == HEAD | {
        "system_fingerprint": "baton-2",
        "choices": [
            {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "token_ids": None}
        ],
    }
    assert parsed(SseFrames(COMPLETION, PLAIN, 1).text(choice, text))["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        | {"token_ids": None, "prompt_token_ids": None}
    ]


def test_the_last_delta_says_why_it_ended() -> None:
    choice = ChoiceState(1, 0, finish="stop", stop_reason="END")
    [last] = parsed(SseFrames(CHAT, PLAIN, 2).text(choice, "x"))["choices"]
    assert last == {
        "index": 1,
        "delta": {"content": "x"},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "END",
        "token_ids": None,
    }


def test_the_role_comes_first_in_chats_only() -> None:
    chunk = parsed(SseFrames(CHAT, PLAIN, 1).role(ChoiceState(0, 0)))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["prompt_token_ids"] is None
    asked = ResponseOptions(prompt_text=True, role="critic")
    chunk = parsed(SseFrames(CHAT, PLAIN, 1, asked).role(ChoiceState(0, 0, prompt_text="<s>hi")))
    assert (chunk["choices"][0]["delta"]["role"], chunk["prompt_text"]) == ("critic", "<s>hi")
    assert SseFrames(COMPLETION, PLAIN, 1).role(ChoiceState(0, 0)) == b""


async def written(header: ResponseHeader, choice: ChoiceState, texts: list[str]) -> list[Any]:
    """The one choice of each event of a stream whose tokens make these texts."""
    client = Mock(unread=Mock(return_value=0))
    writer = StreamWriter(
        SseFrames(header, PLAIN, 1), client, include_usage=False, keep_alive=60, unread_limit=2**20, now=0.0
    )
    writer.start()
    for position, text in enumerate(texts):
        assert writer.write(choice, Delta(RequestId("r"), Attempt(1), position, (7,), text), 0.0)
    data = b"".join(call.args[0] for call in client.write_chunk.mock_calls)
    return [parsed(event + b"\n\n")["choices"][0] for event in data.split(b"\n\n")[:-1]]


async def test_a_token_that_makes_no_text_yet_has_an_event() -> None:
    """Clients measure the time to the first token, and between tokens, by events."""
    texts = ["", "", "é", "", "a"]
    assert [each["text"] for each in await written(COMPLETION, ChoiceState(0, 0), texts)] == texts
    role, *rest = await written(CHAT, ChoiceState(0, 0), texts)
    assert role["delta"]["role"] == "assistant"
    assert [each["delta"] for each in rest] == [{"content": text} for text in texts]


async def test_of_a_parsed_chat_the_role_says_that_the_first_token_is_there() -> None:
    choice = ChoiceState(0, 0, message=AssistantMessage(ParserOptions(OutputDialect("hermes"))))
    [role] = await written(CHAT, choice, ["", "<tool", "_"])
    assert role["delta"] == {"role": "assistant", "content": ""}
    [only] = await written(CHAT, choice, ["", "of"])
    assert only["delta"] == {"content": "<tool_of"}


@pytest.mark.parametrize("heading", [CHAT, COMPLETION])
def test_usage_is_null_until_the_end_unless_it_is_wanted_continuously(heading: ResponseHeader) -> None:
    choice = ChoiceState(0, 0, tokens=3, prompt_tokens=4, cached_tokens=1)
    assert "usage" not in parsed(SseFrames(heading, PLAIN, 1).text(choice, "x"))
    assert parsed(SseFrames(heading, USAGE, 1).text(choice, "x"))["usage"] is None
    assert parsed(SseFrames(heading, CONTINUOUS, 1).text(choice, "x"))["usage"]["completion_tokens"] == 3
    if role := SseFrames(heading, CONTINUOUS, 1).role(choice):
        begun = parsed(role)["usage"]
        assert (begun["prompt_tokens"], begun["completion_tokens"], begun["total_tokens"]) == (4, 0, 4)
    last = parsed(SseFrames(heading, USAGE, 1).usage([choice]))
    assert last["choices"] == []
    assert last["usage"] == usage([choice])
    assert last["usage"]["total_tokens"] == 7


def test_log_probabilities_are_sent_once() -> None:
    choice = ChoiceState(0, 0, logprobs=[POSITION])
    frames = SseFrames(CHAT, PLAIN, 1)
    assert parsed(frames.text(choice, "x"))["choices"][0]["logprobs"] == chat_logprobs([POSITION])
    assert parsed(frames.text(choice, "y"))["choices"][0]["logprobs"] is None


def test_chats_show_bytes_and_completions_offsets() -> None:
    [entry] = chat_logprobs([POSITION])["content"]
    assert (entry["token"], entry["bytes"]) == ("a", [0xC3])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, MIN_LOGPROB]
    columns, offset = completion_logprobs([POSITION, POSITION], 10)
    shown = columns.body()
    assert (shown["text_offset"], offset) == ([10, 11], 12)
    assert shown["top_logprobs"][0] == {"a": -0.5, "b": MIN_LOGPROB}


def test_an_error_inside_a_stream_has_the_errors_body() -> None:
    error = parsed(error_frame(RequestError(503, "gone")))["error"]
    assert error == {"message": "gone", "type": "service_unavailable", "param": None, "code": None}


def test_a_prompt_of_several_choices_counts_once() -> None:
    choices = [ChoiceState(i, i // 2, tokens=2, prompt_tokens=5 + i // 2, cached_tokens=1) for i in range(4)]
    assert usage(choices) == {
        "prompt_tokens": 11,
        "completion_tokens": 8,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_as_cached_counts_what_no_choice_of_a_prompt_computed() -> None:
    """The first computes the prompt, the others find there what it left."""
    choices = [ChoiceState(i, 0, prompt_tokens=40, cached_tokens=cached) for i, cached in enumerate((32, 16, 32))]
    assert usage(choices)["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_whole_bodies_join_the_pieces_behind_the_echo() -> None:
    choice = ChoiceState(0, 0, echo="P:", texts=["a", "b"], finish="length", logprobs=[POSITION])
    [shown] = (await body_of(COMPLETION, [choice], ResponseOptions(logprobs=True)))["choices"]
    assert (shown["text"], shown["finish_reason"], shown["stop_reason"]) == ("P:ab", "length", None)
    assert shown["logprobs"]["text_offset"] == [2]
    [shown] = (await body_of(CHAT, [choice], ResponseOptions()))["choices"]
    assert shown["message"]["content"] == "P:ab"


async def test_others_have_their_turn_while_a_large_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has all log-probabilities of all its choices, in their order."""
    monkeypatch.setattr(lazy_json, "TURN_SECONDS", 0.0)
    positions = [
        PositionLogprobs(LogprobText(f"t{i}", b"t", -i, i), (LogprobText(f"t{i}", b"t", -i, i),)) for i in range(8)
    ]
    choices = [
        ChoiceState(i, 0, texts=["a"], finish="length", logprobs=positions[i:], prompt_logprobs=positions)
        for i in range(3)
    ]
    turns, options = 0, ResponseOptions(logprobs=True, prompt_logprobs=1)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    chat, completion = [await body_of(header, choices, options) for header in (CHAT, COMPLETION)]
    assert turns > 2 * sum(len(choice.logprobs) for choice in choices)
    for number, (of_chat, of_completion) in enumerate(zip(chat["choices"], completion["choices"], strict=True)):
        assert of_chat["logprobs"] == chat_logprobs(positions[number:])
        assert of_completion["logprobs"] == completion_logprobs(positions[number:], 0)[0].body()
        assert of_completion["prompt_logprobs"] == chat["prompt_logprobs"]
    scored = [{str(i): {"logprob": -i, "rank": None, "decoded_token": f"t{i}"}} for i in range(8)]
    assert chat["prompt_logprobs"] == [None, *scored]
    long: dict[str, Any] = {
        "ids": list(range(2 * lazy_json.SLICE + 1)),
        "texts": ("é",) * lazy_json.SLICE * 2,
        "none": [],
        "one": [1],
    }
    assert json.loads(await LazyEncoder().encode(long)) == long | {"texts": list(long["texts"])}
    before, sliced = turns, {"ids": packed_slices(pack(long["ids"])), "texts": JsonSlices([b'["a","b"]', b'["c"]'])}
    assert json.loads(await LazyEncoder().encode(sliced)) == {"ids": long["ids"], "texts": ["a", "b", "c"]}
    assert turns >= before + 5, "one for each slice"
    assert await LazyEncoder().encode({"ids": packed_slices(b""), "texts": JsonSlices(())}) == b'{"ids":[],"texts":[]}'
    before, ids = turns, list(range(3 * UNPACKED_BYTES // TOKEN_BYTES + 1))
    assert await unpack_in_turns(pack(ids)) == ids
    assert turns >= before + 3
    other.cancel()


async def test_every_field_of_vllms_answers_is_there_and_null_where_it_says_nothing() -> None:
    choice = ChoiceState(0, 0, texts=["a"], tokens=1, finish="stop")
    head = {"created": 17, "system_fingerprint": "baton-2", "usage": usage([choice])}
    unused = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
    end = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    end |= dict.fromkeys(("token_ids", "routed_experts"))
    silent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    assert await body_of(CHAT, [choice], ResponseOptions()) == head | unused | {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": 'a "model"/é',
        "choices": [end | {"message": silent | {"role": "assistant", "content": "a"}}],
        **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text")),
    }
    assert await body_of(COMPLETION, [choice], ResponseOptions()) == head | unused | {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "demo",
        "choices": [end | {"text": "a"} | dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))],
    }


async def test_metrics_are_one_choices_times() -> None:
    choice = ChoiceState(0, 0, tokens=5, queued=0.125, first_token_at=10.25, last_token_at=12.25, finish="stop")
    options = ResponseOptions(metrics=True)
    wanted = {
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 125.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 5 / 2.25,
        "speculative_decoding": None,
    }
    assert (await body_of(CHAT, [choice], options, 10.0))["metrics"] == wanted
    assert parsed(SseFrames(COMPLETION, USAGE, 1, options).usage([choice], 10.0))["metrics"] == wanted
    assert (await body_of(CHAT, [choice, choice], options, 10.0))["metrics"] is None
    assert (await body_of(CHAT, [ChoiceState(0, 0)], options, 10.0))["metrics"] == dict.fromkeys(wanted)


async def test_a_client_may_call_its_request_what_it_likes() -> None:
    header = CHAT._replace(shown_id="chatcmpl-mine")
    assert (await body_of(header, [ChoiceState(0, 0)], ResponseOptions()))["id"] == "chatcmpl-mine"


def test_a_histogram_counts_into_the_first_bucket_that_holds_the_value() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        histogram.observe(seconds)
    assert histogram.buckets() == ([("0.1", 2.0, None), ("1.0", 3.0, None), ("+Inf", 4.0, None)], pytest.approx(2.65))
