"""What the gateway knows of the others: models, and whether the ring can serve."""

from __future__ import annotations

from msgspec.structs import replace

from services.gateway.core.cluster import MODEL_MEMORY_S, REQUIRED_SERVICES, ClusterView
from shared.ids import InstanceId, ModelName
from shared.messages.lifecycle import EngineReport, Lifecycle, ModelCard
from tests.unit.gateway.core.test_supervisor import life

CARD = ModelCard(name=ModelName("m"), max_model_len=8, vocab_size=9, eos_token_ids=(), dtype="float32", created=1)
REPORT = EngineReport(
    model=CARD, waiting=0, running=0, max_waiting=1, max_running=1, blocks_total=1, blocks_free=1, steps=0, tokens=0
)


def engine(instance: str = "engine-1") -> Lifecycle:
    return replace(life("scheduler", instance), engine=REPORT)


def test_the_ring_serves_when_one_of_each_service_is_ready() -> None:
    ring = ClusterView()
    assert ring.missing == REQUIRED_SERVICES
    for service in REQUIRED_SERVICES:
        assert service in ring.missing
        ring.record_lifecycle(life(service, f"{service}-1"), 0.0)
    assert ring.missing == ()
    ring.record_lifecycle(replace(life("scheduler", "scheduler-1"), phase="draining"), 0.1)
    assert ring.missing == ("scheduler",)
    ring.record_lifecycle(life("scheduler", "scheduler-2"), 0.2)
    assert ring.missing == ()


def test_whoever_is_silent_is_missing() -> None:
    ring = ClusterView()
    for service in REQUIRED_SERVICES:
        ring.record_lifecycle(life(service, f"{service}-1"), 0.0)
    ring.record_lifecycle(life("tokenizer", "tokenizer-1"), 1.5)
    assert {gone.last.service for gone in ring.expire(2.5)} == set(REQUIRED_SERVICES) - {"tokenizer"}
    assert ring.missing == ("coordinator", "scheduler", "detokenizer")


def test_a_model_outlives_its_engines_for_a_while() -> None:
    ring = ClusterView()
    ring.record_lifecycle(engine(), 0.0)
    ring.record_lifecycle(replace(engine(), phase="stopped"), 1.0)
    assert ring.models() == [CARD]
    assert ring.model(ModelName("m")) == CARD
    ring.record_lifecycle(replace(life("scheduler", InstanceId("engine-2")), engine=None), 2.0)
    ring.expire(1.0 + MODEL_MEMORY_S + 0.1)
    assert ring.models() == []
    assert ring.model(ModelName("m")) is None
