"""Requests with an adapter go to engines that serve it, of these to one that has it in a slot, unless that has more to
do than loading takes."""

from __future__ import annotations

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import NotifyGateway
from services.coordinator.core.coordinator import Coordinator
from shared.ids import InstanceId, LoraId
from shared.messages.gateway import RequestQueued, RequestRejected
from tests.support.engines.coordinator_events import at, detokenizer, engine, route, summary

ONE, OTHER = LoraId(b"1" * 16), LoraId(b"2" * 16)


def placed(core: Coordinator, name: str, lora: LoraId | None) -> str:
    ((_, _, where),) = summary(core.route(route(name, lora=lora), at(1)))
    return where


def fleet(*lives: object) -> Coordinator:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    core.lifecycle(detokenizer(), at(0))
    for life in lives:
        core.lifecycle(life, at(0))  # type: ignore[arg-type]
    return core


def test_only_engines_that_serve_the_adapter_get_its_requests() -> None:
    core = fleet(engine("e1", blocks_used=0), engine("e2", running=3, loras=[ONE, OTHER]))
    assert placed(core, "a", ONE) == "e2"
    assert placed(core, "b", None) == "e1"


def test_a_request_for_an_adapter_that_no_engine_serves_is_refused_unless_none_is_ready() -> None:
    core = fleet(engine("e1", loras=[OTHER]))
    (refused,) = core.route(route("a", lora=ONE), at(1))
    assert isinstance(refused, NotifyGateway)
    assert isinstance(refused.message, RequestRejected)
    assert (refused.message.field, refused.message.message) == ("model", "model: the adapter has been unloaded")
    (waits,) = fleet().route(route("b", lora=ONE), at(1))
    assert isinstance(waits, NotifyGateway)
    assert isinstance(waits.message, RequestQueued)


def test_an_engine_with_the_adapter_in_a_slot_is_preferred_to_one_with_little_less_to_do() -> None:
    core = fleet(
        *(engine(f"e{number}", blocks_used=10, loras=[ONE, OTHER]) for number in (1, 2)),
        engine("e3", blocks_used=14, loras=[ONE, OTHER], loaded=(OTHER,)),
    )
    assert placed(core, "a", OTHER) == "e3"
    core = fleet(
        engine("e1", blocks_used=10, loras=[ONE, OTHER]),
        engine("e3", blocks_used=60, loras=[ONE, OTHER], loaded=(OTHER,)),
    )
    assert placed(core, "a", OTHER) == "e1"
