"""Which drains would stop the serving: of one instance, and of a whole pool."""

from __future__ import annotations

import msgspec
import pytest

from services.coordinator.core.drain_rules import drain_refusal
from shared.ids import ModelName
from shared.messages.lifecycle import Lifecycle, Phase, Role
from shared.registry import Registry
from tests.coordinator_world import engine, life


def of_role(role: Role, number: int, phase: Phase = "ready", model: str = "demo/model") -> Lifecycle:
    said = engine(f"{role}-{number}", phase, model=ModelName(model))
    assert said.engine is not None
    return msgspec.structs.replace(said, engine=msgspec.structs.replace(said.engine, role=role))


def refusal(leaving: list[Lifecycle], others: list[Lifecycle]) -> str | None:
    registry = Registry()
    for each in (*leaving, *others):
        registry.heard(each, 0.0)
    return drain_refusal(registry, leaving)


DECODE, DECODE_2, PREFILL, PREFILL_2, MIXED = (
    *(of_role("decode", 1), of_role("decode", 2), of_role("prefill", 1), of_role("prefill", 2), of_role("mixed", 1)),
)


@pytest.mark.parametrize(
    ("leaving", "others"),
    [
        ([DECODE], [DECODE_2]),
        ([DECODE, DECODE_2], [MIXED]),
        ([MIXED], [DECODE]),
        ([PREFILL, PREFILL_2], [DECODE]),
        ([PREFILL], []),
        ([of_role("decode", 1, "draining")], []),
    ],
)
def test_what_others_can_do_too_may_be_drained(leaving: list[Lifecycle], others: list[Lifecycle]) -> None:
    assert refusal(leaving, others) is None


@pytest.mark.parametrize(
    ("leaving", "others"),
    [
        ([DECODE], [PREFILL]),
        ([DECODE, DECODE_2], [PREFILL]),
        ([MIXED], [of_role("decode", 1, "draining")]),
        ([DECODE], [of_role("decode", 2, model="another")]),
        ([DECODE], []),
    ],
)
def test_the_last_that_decode_are_refused(leaving: list[Lifecycle], others: list[Lifecycle]) -> None:
    refused = refusal(leaving, others)
    assert refused is not None
    assert "last ready engine of model demo/model that decodes" in refused
    assert all(each.instance in refused for each in leaving)


def test_the_last_of_a_light_service_is_refused() -> None:
    gateway = life("gateway", "gateway-1")
    assert "last ready gateway" in str(refusal([gateway], [life("tokenizer", "tokenizer-1")]))
    assert refusal([gateway], [life("gateway", "gateway-2")]) is None
