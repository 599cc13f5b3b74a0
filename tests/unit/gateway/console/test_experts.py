"""The console's picture of a mixture's experts is put together from what the first rank of each stage tells."""

from __future__ import annotations

from services.gateway.console.document import experts_of
from shared.ids import EngineId, Incarnation, InstanceId
from shared.messages.lifecycle import ExpertReport, LayerExpertLoad, Lifecycle, WorkerReport
from tests.support.engines.coordinator_events import engine


def rank(number: int, experts: ExpertReport | None) -> Lifecycle:
    served = engine("e").engine
    assert served is not None
    report = WorkerReport(
        engine=EngineId("e"),
        rank=number,
        world_size=4,
        model=served.model,
        num_blocks=1,
        device="cpu",
        stages=2,
        experts=experts,
    )
    return Lifecycle(
        service="worker",
        instance=InstanceId(f"e-rank{number}"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=0.0,
        worker=report,
    )


def test_layers_of_all_stages_are_shown_together() -> None:
    first = rank(0, ExpertReport((LayerExpertLoad(1, (120, 80)),), 3, 10))
    second = rank(2, ExpertReport((LayerExpertLoad(4, (100, 100)),), 2, 5))
    shown = experts_of([first, rank(1, None), second, None])
    assert shown == {"layers": {"1": (120, 80), "4": (100, 100)}, "rearrangements": 3, "moved": 15}


def test_experts_that_stay_and_models_without_any() -> None:
    shown = experts_of([rank(0, ExpertReport((LayerExpertLoad(1, (120, 80)),)))])
    assert shown is not None
    assert shown["rearrangements"] is None
    assert experts_of([rank(0, None)]) is None
