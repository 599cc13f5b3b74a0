"""Every decoder of a bus message, fed with spoilt messages: it decodes or says Undecodable, and nothing else."""

from __future__ import annotations

import inspect
import random
from typing import Any, get_args

import pytest

from shared import topics
from shared.bus.codec import Undecodable, decode, encode
from tests.contracts.test_golden_messages import MESSAGES
from tests.fuzz.mutations import mutated

SHARE = 20_000
FULL = 1_000_000


def topic_types() -> list[Any]:
    """What is decoded on every subject."""
    makers: list[Any] = [make for _, make in inspect.getmembers(topics, callable) if "Topic[" in str(annotation(make))]
    return [make(*["x"] * len(inspect.signature(make).parameters)).type for make in makers]


def annotation(make: Any) -> Any:
    return getattr(make, "__annotations__", {}).get("return", "")


def decoders() -> list[tuple[Any, bytes]]:
    """A decoder's type and a valid message for it: each message alone, and in every union that it belongs to."""
    types = [*topic_types(), *(type(message) for message in MESSAGES)]
    return [
        (type_, encode(message))
        for type_ in dict.fromkeys(types)
        for message in MESSAGES
        if type(message) is type_ or type(message) in get_args(type_)
    ]


def feed(number: int, seed: int) -> tuple[int, int]:
    """Decodes so many spoilt messages. Returns how many were refused, and how many not."""
    rng = random.Random(seed)
    pairs = decoders()
    refused = taken = 0
    for i in range(number):
        type_, payload = pairs[i % len(pairs)]
        try:
            message = decode(mutated(payload, rng), type_)
        except Undecodable:
            refused += 1
        else:
            encode(message)  # what was decoded can be sent on and journalled
            taken += 1
    return refused, taken


def test_spoilt_messages_are_decoded_or_refused_by_name() -> None:
    refused, taken = feed(SHARE, seed=1)
    assert refused > taken > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_spoilt_messages_are_decoded_or_refused_by_name() -> None:
    refused, taken = feed(FULL, seed=2)
    print(f"{refused + taken} spoilt messages: {refused} refused, {taken} decoded")
    assert refused + taken == FULL
