"""What the gateway knows of the others: models, and whether new requests for them can be served."""

from __future__ import annotations

from msgspec.structs import replace

from services.gateway.core.cluster import MODEL_MEMORY_S, REQUIRED_SERVICES, ClusterView, ModelUnavailable
from shared.ids import InstanceId, LoraId, ModelName
from shared.messages.dialects import Dialect
from shared.messages.lifecycle import DetokenizerReport, EngineReport, Lifecycle, Phase, SleepReport, TokenizerReport
from shared.messages.model_card import LoraCard, ModelCard
from tests.unit.gateway.core.test_supervisor import life

CARD = ModelCard(name=ModelName("m"), max_model_len=8, vocab_size=9, eos_token_ids=(), dtype="float32", created=1)
REPORT = EngineReport(
    model=CARD, waiting=0, running=0, max_waiting=1, max_running=1, blocks_total=1, blocks_free=1, steps=0, tokens=0
)


def engine(instance: str = "engine-1") -> Lifecycle:
    return replace(life("scheduler", instance), engine=REPORT)


def whole(cluster: ClusterView, now: float, *absent: str) -> None:
    for service in REQUIRED_SERVICES:
        if service not in absent:
            cluster.record_lifecycle(engine() if service == "scheduler" else life(service, f"{service}-1"), now)


def reason(cluster: ClusterView, now: float, model: ModelName | None = None) -> str | None:
    absence = cluster.absence(model, now)
    return absence and absence.reason


def test_requests_are_refused_until_one_of_each_service_is_ready() -> None:
    cluster = ClusterView(wait_s=2.0)
    assert reason(cluster, 0.0) == "no tokenizer and no coordinator and no scheduler and no detokenizer is ready"
    whole(cluster, 0.0, "coordinator")
    assert reason(cluster, 0.0) == reason(cluster, 0.0, CARD.name) == "no coordinator is ready"
    whole(cluster, 0.0)
    assert reason(cluster, 0.0) is reason(cluster, 0.0, CARD.name) is None
    assert reason(cluster, 0.0, ModelName("other")) == "no scheduler is ready"


def test_requests_wait_for_a_drained_engine_and_are_then_refused() -> None:
    cluster = ClusterView(wait_s=2.0)
    whole(cluster, 0.0)
    cluster.record_lifecycle(replace(engine(), phase="draining"), 0.1)
    whole(cluster, 1.9, "scheduler")
    cluster.record_lifecycle(replace(engine(), phase="draining"), 1.9)
    assert cluster.absence(CARD.name, 2.1) is None
    assert (
        cluster.absence(CARD.name, 2.2) == cluster.absence(None, 2.2) == ModelUnavailable("no scheduler is ready", 0.1)
    )
    cluster.record_lifecycle(replace(engine("engine-2"), phase="starting"), 2.3)
    assert reason(cluster, 2.3) == "no scheduler is ready"
    cluster.record_lifecycle(engine("engine-2"), 2.4)
    assert reason(cluster, 2.4) is None


def test_requests_for_one_model_do_not_wait_for_engines_of_another() -> None:
    cluster = ClusterView(wait_s=0.0)
    whole(cluster, 0.0)
    other = replace(CARD, name=ModelName("other"))
    cluster.record_lifecycle(replace(engine("engine-2"), engine=replace(REPORT, model=other)), 0.0)
    cluster.record_lifecycle(replace(engine(), phase="draining"), 0.1)
    assert reason(cluster, 0.2, CARD.name) == "no scheduler is ready"
    assert reason(cluster, 0.2, other.name) is reason(cluster, 0.2) is None


def test_a_model_needs_a_tokenizer_and_a_detokenizer_of_its_own() -> None:
    cluster, other = ClusterView(), ModelName("other")
    cluster.record_lifecycle(life("coordinator", "coordinator-1"), 0.0)
    for name in (CARD.name, other):
        report = replace(REPORT, model=replace(CARD, name=name))
        cluster.record_lifecycle(replace(engine(f"{name}-engine-1"), engine=report), 0.0)
        tokenizer = replace(life("tokenizer", f"{name}-t"), tokenizer=TokenizerReport(model=name, dialect=Dialect()))
        cluster.record_lifecycle(tokenizer, 0.0)
    detokenizer = replace(life("detokenizer", "m-d"), detokenizer=DetokenizerReport(model=CARD.name))
    cluster.record_lifecycle(detokenizer, 0.0)
    assert reason(cluster, 0.0, CARD.name) is reason(cluster, 0.0) is None
    assert reason(cluster, 0.0, other) == "no detokenizer is ready"
    assert set(cluster.rooms()) == {CARD.name}
    cluster.record_lifecycle(replace(detokenizer, phase="draining"), 0.1)
    cluster.record_lifecycle(life("detokenizer", "of-an-older-release"), 0.1)
    assert reason(cluster, 0.2, CARD.name) is reason(cluster, 0.2, other) is None


def test_what_is_silent_was_there_until_its_next_heartbeat_was_due() -> None:
    cluster = ClusterView(wait_s=2.0)
    whole(cluster, 0.0)
    whole(cluster, 1.5, "scheduler")
    assert [gone.last.service for gone in cluster.expire(2.5)] == ["scheduler"]
    assert cluster.absence(CARD.name, 2.5) is None
    assert cluster.absence(CARD.name, 2.6) == ModelUnavailable("no scheduler is ready", 0.5)


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


def test_the_model_of_an_engine_that_sleeps_stays_known() -> None:
    cluster = ClusterView(wait_s=2.0)
    whole(cluster, 0.0)
    asleep = replace(life("scheduler", "engine-1"), phase="starting", sleep=SleepReport(1, CARD))
    for now in (1.0, MODEL_MEMORY_S - 1.0):
        whole(cluster, now, "scheduler")
        cluster.record_lifecycle(asleep, now)
    cluster.expire(MODEL_MEMORY_S + 10.0)
    assert cluster.models() == [CARD]
    expected = "no scheduler is ready; engines are asleep, until POST /wake_up"
    whole(cluster, MODEL_MEMORY_S, "scheduler")
    cluster.record_lifecycle(asleep, MODEL_MEMORY_S)
    assert reason(cluster, MODEL_MEMORY_S, CARD.name) == reason(cluster, MODEL_MEMORY_S) == expected
    whole(cluster, MODEL_MEMORY_S + 1.0)
    assert reason(cluster, MODEL_MEMORY_S + 1.0) is None


def test_a_gateway_that_comes_later_knows_the_model_of_an_engine_that_sleeps() -> None:
    cluster = ClusterView()
    cluster.record_lifecycle(replace(life("scheduler", "engine-1"), phase="starting", sleep=SleepReport(2, CARD)), 0.0)
    assert cluster.models() == [CARD]


def test_a_model_has_the_adapters_of_all_its_engines() -> None:
    one, two = (LoraCard(name=ModelName(name), id=LoraId(name.encode() * 8), rank=8) for name in ("l1", "l2"))
    cluster = ClusterView()

    def report(instance: str, *loras: LoraCard, phase: Phase = "ready") -> None:
        life = engine(instance)
        card = replace(CARD, loras=loras)
        cluster.record_lifecycle(replace(life, phase=phase, engine=replace(REPORT, model=card)), 0.0)

    def known() -> tuple[LoraCard, ...]:
        (card,) = cluster.models()
        return card.loras

    report("engine-1", two, one)
    assert known() == (two, one)
    report("engine-2", one)
    report("engine-1", two, one)
    assert known() == (one, two)
    assert [len(each.model.loras) for each in cluster.ready_engines()] == [2, 1]
    report("engine-1", two, one, phase="stopped")
    report("engine-2", one)
    assert known() == (one,)
    cluster.record_lifecycle(replace(engine("engine-2"), engine=None), 0.0)
    assert known() == (one,), "requests wait for the last engine of a model"
    report("engine-3", two)
    assert known() == (two,)
