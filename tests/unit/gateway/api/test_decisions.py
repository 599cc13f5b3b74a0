"""Bodies of `/v1/decisions` that are refused, by the field at fault; and what an answer is made of."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.decisions.answer import decisions_answer
from services.gateway.api.decisions.questions import Level, Predicate, ScoreQuestion
from services.gateway.api.decisions.request import read_decisions
from services.gateway.api.errors import RequestError
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.gateway import LogprobText, PositionLogprobs
from tests.unit.gateway.api.test_every_field import CARD, LIMITS

ASKED: dict[str, Any] = {"type": "predicate", "instructions": "Is it?"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def question(**fields: Any) -> dict[str, Any]:
    return {"questions": [{"instructions": "Which?", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"questions": []}, "questions", "1 to"),
        ({"questions": [ASKED] * 129}, "questions", "129"),
        (question(type="essay"), "questions[0].type", "essay"),
        (question(type=[]), "questions[0].type", "[] is not allowed; 'predicate'"),
        (question(type="predicate", choices=[]), "questions[0].choices", "not known"),
        (question(type="choice", choices=[{"value": "a"}]), "questions[0].choices", "2 to 26"),
        (question(type="choice", choices=[{"value": str(i)} for i in range(27)]), "questions[0].choices", "27"),
        (question(type="choice", choices=[{"value": "a"}] * 2), "questions[0].choices[1].value", "once"),
        (question(type="score", levels=[{"label": "a"}] * 11), "questions[0].levels", "2 to 10"),
        (question(type="score", levels=[{"label": 1}] * 2), "questions[0].levels[0].label", "1"),
        ({"questions": [{**ASKED, "instructions": [IMAGE]}]}, "questions[0].instructions[0].type", "image"),
        ({"questions": [{**ASKED, "instructions": [{"type": "x"}]}]}, "questions[0].instructions[0]", "input_text"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one"),
        ({"input": [{"role": "judge", "content": "a"}]}, "input[0].role", "judge"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]}, "input[0].content[0].data", ""),
        ({"input": "a" * 200_000, "questions": [ASKED] * 100}, "questions", "whole input"),
        ({"stream": True}, "stream", "not known"),
        ({"model": "none"}, "model", "none"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    body = {"input": "It rains.", "questions": [ASKED], **fields}
    with pytest.raises(RequestError) as refused:
        read_decisions(msgspec.json.encode(body), [CARD], LIMITS)
    assert refused.value.param == param, refused.value.message
    assert says in refused.value.message


def test_images_are_refused() -> None:
    sees = replace(CARD, images=16)
    body = {"input": [{"role": "user", "content": [IMAGE]}], "questions": [ASKED]}
    with pytest.raises(RequestError, match="an image in a decision is not supported"):
        read_decisions(msgspec.json.encode(body), [sees], LIMITS)


def test_a_letter_is_as_likely_as_its_tokens_together() -> None:
    """Where a tokenizer has a token for a letter alone and one for it behind a space."""
    told = {3: 0.1, 4: 0.2, 5: 0.3, 6: 0.05}
    found = [LogprobText("", b"", math.log(share), token) for token, share in told.items()]
    choice = ChoiceState(0, 0, logprobs=[PositionLogprobs(found[0], tuple(found[1:]))])
    header = ResponseHeader("decision", "id", 0, "demo")
    body = decisions_answer(header, [choice], (Predicate(instructions="Is it?"),), ((3, 4), (5,)))
    assert body["answers"][0]["probability"] == pytest.approx(0.3 / 0.6)
    three = ScoreQuestion(instructions="How?", levels=[Level("a"), Level("b"), Level("c")])
    [answer] = decisions_answer(header, [choice], (three,), ((3, 4), (5,), (6,)))["answers"]
    assert answer["score"] == pytest.approx((0.3 + 2 * 0.05) / 0.65)
    assert answer["confidence"] == pytest.approx(0.3)
