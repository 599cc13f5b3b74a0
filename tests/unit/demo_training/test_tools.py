"""The demo model's conversations about tools: what is learnt is what the chat template writes."""

import json
from random import Random
from typing import Any

import jsonschema
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.demo_training.examples import Exchange
from tests.demo_training.mixture import SHARES, TUNING_SHARES
from tests.demo_training.packing import Encoder
from tests.demo_training.texts import conversation, tools
from tests.support.paths import DEMO_MODEL


def offered(exchange: Exchange) -> tuple[str, list[dict[str, Any]]]:
    """The system prompt's own text, and the tools in it."""
    assert exchange.system is not None
    before, found, listed = exchange.system.partition(tools.OFFER + "\n")
    assert found
    return before.strip(), [json.loads(line) for line in listed.split("\n")]


def call_in(answer: str) -> dict[str, Any] | None:
    """The call that an answer consists of."""
    start, end = tools.CALL.split("{}")
    if not answer.startswith(start):
        return None
    called: dict[str, Any] = json.loads(answer.removeprefix(start).removesuffix(end))
    return called


def as_messages(exchange: Exchange) -> list[dict[str, Any]]:
    """The whole conversation as a client of the API would hold it."""
    before, _ = offered(exchange)
    said: list[dict[str, Any]] = [{"role": "system", "content": before}] if before else []
    start, end = tools.RESPONSE.split("{}")
    for turn in exchange.turns:
        if turn.question.startswith(start):
            said.append({"role": "tool", "content": turn.question.removeprefix(start).removesuffix(end)})
        else:
            said.append({"role": "user", "content": turn.question})
        called = call_in(turn.answer)
        if called is None:
            said.append({"role": "assistant", "content": turn.answer})
        else:
            said.append(
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": called}]}
            )
    return said


def test_the_template_writes_what_was_learnt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    encoder = Encoder(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
    for seed in range(200):
        exchange = tools.draw(Random(seed))
        declared = [{"type": "function", "function": tool} for tool in offered(exchange)[1]]
        written = tokenizer.apply_chat_template(as_messages(exchange), tools=declared, tokenize=True, return_dict=False)
        assert written == encoder.document(exchange)[0], exchange


def test_a_call_fits_a_tool_that_is_offered() -> None:
    for seed in range(200):
        exchange = tools.draw(Random(seed))
        schemas = {tool["name"]: tool["parameters"] for tool in offered(exchange)[1]}
        for called in filter(None, (call_in(turn.answer) for turn in exchange.turns)):
            jsonschema.validate(called["arguments"], schemas[called["name"]])
            assert called["arguments"].keys() == schemas[called["name"]]["properties"].keys()


def test_what_a_call_says_stands_in_the_question() -> None:
    for seed in range(300):
        exchange = tools.draw(Random(seed))
        called = call_in(exchange.turns[0].answer)
        if called is not None:
            question = exchange.turns[0].question.lower()
            assert all(str(value).lower() in question for value in called["arguments"].values())


def test_some_conversations_need_no_tool_and_some_go_on_behind_a_result() -> None:
    drawn = [tools.draw(Random(seed)) for seed in range(300)]
    assert any(call_in(exchange.turns[-1].answer) is None and len(exchange.turns) == 1 for exchange in drawn)
    assert any(len(exchange.turns) == 2 for exchange in drawn)


def test_tuning_only_adds() -> None:
    assert TUNING_SHARES[: len(SHARES)] == SHARES
    assert {draw for draw, _ in TUNING_SHARES[len(SHARES) :]} == {conversation.bare_sum, tools.draw}


def test_a_bare_sum_is_asked_for_without_its_working() -> None:
    for seed in range(100):
        exchange = conversation.bare_sum(Random(seed))
        assert exchange.system in conversation.BRIEF
        assert exchange.turns[0].answer.isdigit()
