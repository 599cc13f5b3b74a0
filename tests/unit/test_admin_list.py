"""What operators see of engines and KV stores: role, node, how full a store is and how often it had what was asked."""

from __future__ import annotations

import json
from typing import Any

from services.coordinator.admin import Admin
from shared.bus.memory_bus import MemoryBus
from shared.messages.lifecycle import Lifecycle
from shared.registry import Registry
from tests.coordinator_world import detokenizer, engine, store


async def listed(*lives: Lifecycle) -> dict[str, Any]:
    registry = Registry()
    for life in lives:
        registry.heard(life, 0.0)
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
