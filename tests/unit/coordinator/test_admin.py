"""What operators see of engines and KV stores: role, node, how full a store is and how often it had what was asked."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.coordinator.admin import Admin, drain_refusal
from shared.bus.memory_bus import MemoryBus
from shared.ids import ModelName
from shared.messages.lifecycle import Lifecycle, Phase, Role
from shared.registry import Registry
from tests.support.engines.coordinator_events import detokenizer, engine, life, store


async def listed(*lives: Lifecycle) -> dict[str, Any]:
    registry = Registry()
    for each in lives:
        registry.record_lifecycle(each, 0.0)
    admin = Admin(MemoryBus(), registry, scale_timeout=1.0)
    return {each["instance"]: each for each in json.loads(await admin.list(b""))["instances"]}


async def test_an_engine_shows_its_role_and_node() -> None:
    seen = await listed(engine("a", role="prefill", node="n1"), engine("b"), detokenizer())
    assert {name: (each["role"], each["node"]) for name, each in seen.items()} == {
        "a": ("prefill", "n1"),
        "b": ("mixed", None),
        "detokenizer-1": (None, None),
    }


async def test_a_store_shows_how_full_it_is_and_how_often_it_had_what_was_asked_for() -> None:
    seen = (await listed(store("n1", committed=25)))["kvstore-n1"]
    assert seen["node"] == "n1"
    assert seen["store"]["slots"] == 100
    assert seen["store"]["occupancy"] == 0.25
    assert seen["store"]["hit_rate"] == 0.75
    assert (await listed(engine("a")))["a"]["store"] is None


# Which drains would stop the serving: of one instance, and of a whole pool.


def of_role(role: Role, number: int, phase: Phase = "ready", model: str = "demo/model") -> Lifecycle:
    said = engine(f"{role}-{number}", phase, model=ModelName(model))
    assert said.engine is not None
    return msgspec.structs.replace(said, engine=msgspec.structs.replace(said.engine, role=role))


def refusal(leaving: list[Lifecycle], others: list[Lifecycle]) -> str | None:
    registry = Registry()
    for each in (*leaving, *others):
        registry.record_lifecycle(each, 0.0)
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
    kind = "engine of model demo/model that decodes"
    assert (f"is the last ready {kind};" if len(leaving) == 1 else f"no {kind} would be ready without ") in refused
    assert all(each.instance in refused for each in leaving)


def test_the_last_of_a_light_service_is_refused() -> None:
    gateway = life("gateway", "gateway-1")
    assert "last ready gateway" in str(refusal([gateway], [life("tokenizer", "tokenizer-1")]))
    assert refusal([gateway], [life("gateway", "gateway-2")]) is None
