"""What no process could use is refused where it is decoded, as an undecodable message."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from shared.bus.codec import Undecodable, decode, encode
from shared.ids import EngineId, InstanceId, RequestId
from shared.messages.coordinator import PlacementMade
from shared.messages.detokenizer import NewTokens, TokenBatch
from shared.messages.generation import SamplingOptions
from shared.messages.kv_events import KvDumpRequest
from tests.contracts.test_golden_messages import MESSAGES

SAMPLING = SamplingOptions(seed=1)


def golden(type_: type) -> Any:
    return next(message for message in MESSAGES if type(message) is type_)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "*", ">", "a\n", "é", "x" * 65])
def test_a_name_that_is_no_part_of_a_subject_is_refused(name: str) -> None:
    for message in (KvDumpRequest(InstanceId(name)), replace(golden(TokenBatch), engine=EngineId(name))):
        with pytest.raises(Undecodable):
            decode(encode(message), type(message))


def test_names_of_instances_are_taken() -> None:
    message = KvDumpRequest(InstanceId("Engine_1-rank0" + "x" * 50))
    assert decode(encode(message), KvDumpRequest) == message


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"logit_bias": ((-1, 0.0),)},
        {"bad_words": ((2**32,),)},
        {"logprobs": 2**40},
        {"prompt_logprobs": -1},
        {"thinking_budget": -1},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Undecodable):
        decode(encode(replace(SAMPLING, **change)), SamplingOptions)


@pytest.mark.parametrize(
    "message",
    [
        replace(golden(TokenBatch), number=-1),
        replace(golden(TokenBatch), entries=(NewTokens(RequestId("r"), 1, -1, (1,)),)),  # type: ignore[arg-type]
        replace(golden(TokenBatch), entries=(NewTokens(RequestId("r"), 1, 0, (-1,)),)),  # type: ignore[arg-type]
        replace(golden(TokenBatch), epoch=2**63),
        replace(golden(PlacementMade), blocks=-5),
    ],
    ids=str,
)
def test_negative_and_huge_numbers_are_refused(message: Any) -> None:
    with pytest.raises(Undecodable):
        decode(encode(message), type(message))
