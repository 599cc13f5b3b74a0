"""Who is alive, from lifecycle messages and their absence."""

from __future__ import annotations

from msgspec.structs import replace

from shared.bus.codec import decode, encode
from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase, Service
from shared.registry import InstanceGone, Registry


def life(instance: str, phase: Phase = "ready", incarnation: int = 1, service: Service = "scheduler") -> Lifecycle:
    return Lifecycle(
        service=service,
        instance=InstanceId(instance),
        incarnation=Incarnation(incarnation),
        phase=phase,
        pid=1,
        host="h",
        started=0.0,
    )


def test_an_instance_is_known_until_it_is_silent() -> None:
    registry = Registry(silence=2.0)
    registry.record_lifecycle(life("a"), 0.0)
    registry.record_lifecycle(life("b"), 1.5)
    assert registry.expire(2.0) == []
    assert registry.expire(2.5) == [InstanceGone(life("a"), "silent for 2 s")]
    assert [m.instance for m in registry.all("scheduler")] == ["b"]


def test_a_stop_or_a_failure_is_noticed_at_once() -> None:
    registry = Registry()
    registry.record_lifecycle(life("a"), 0.0)
    assert registry.record_lifecycle(life("a", "failed"), 0.1) == InstanceGone(life("a"), "failed")
    assert registry.record_lifecycle(life("a", "failed"), 0.2) is None
    registry.record_lifecycle(life("b"), 0.3)
    left = replace(life("b"), load=3)
    assert registry.record_lifecycle(replace(left, phase="stopped"), 0.4) == InstanceGone(left, "stopped")
    assert list(registry.all()) == []


def test_late_news_of_a_former_life_is_ignored() -> None:
    registry = Registry()
    registry.record_lifecycle(life("a", incarnation=2), 0.0)
    assert registry.record_lifecycle(life("a", "failed", incarnation=1), 0.1) is None
    assert registry.get("scheduler", InstanceId("a")) == life("a", incarnation=2)


def test_a_restart_under_the_same_name_ends_the_former_life() -> None:
    registry = Registry()
    registry.record_lifecycle(life("a"), 0.0)
    assert registry.record_lifecycle(life("a", "starting", incarnation=2), 0.1) == InstanceGone(life("a"), "restarted")


def test_instances_are_found_by_service_and_phase() -> None:
    registry = Registry()
    for message in (life("a"), life("b", "draining"), life("c", service="gateway")):
        registry.record_lifecycle(message, 0.0)
    assert [m.instance for m in registry.all("scheduler", "ready")] == ["a"]
    assert [m.instance for m in registry.all(phase="ready")] == ["a", "c"]


def test_who_promises_to_speak_seldom_may_be_silent_for_longer() -> None:
    registry = Registry()
    registry.record_lifecycle(replace(life("a"), keep_alive=1.0), 0.0)
    slow = replace(life("b"), keep_alive=5.0)
    registry.record_lifecycle(slow, 0.0)
    assert [gone.last.instance for gone in registry.expire(2.1)] == ["a"]
    assert registry.expire(10.0) == []
    assert registry.expire(10.1) == [InstanceGone(slow, "silent for 10 s")]


def test_a_release_that_promises_nothing_is_waited_for_as_before() -> None:
    without = encode(life("a"))
    assert without[:3] == b"\xdc\x00\x17", "an array of 23"
    before = b"\xdc\x00\x12" + without[3:-13]
    registry = Registry()
    registry.record_lifecycle(decode(before, Lifecycle), 0.0)
    assert registry.expire(2.0) == []
    assert [gone.reason for gone in registry.expire(2.1)] == ["silent for 2 s"]
