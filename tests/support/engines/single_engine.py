"""One scheduler's core with a worker that checks its plans, without a bus."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    Output,
    SendPlan,
    SendToGateway,
    SendTokens,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation
from shared.messages.detokenizer import AbandonStream, NewTokens
from shared.messages.gateway import RequestFailed, RequestRejected
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import (
    GATEWAY,
    HonestWorker,
    card,
)

PROMPT = list(range(4, 24))
EPOCH = Incarnation(100)


class Ring:
    """An engine, an honest worker, and what both have said."""

    def __init__(
        self,
        limits: EngineLimits | None = None,
        num_blocks: int = 32,
        max_model_len: int = 256,
        *,
        state_checkpoints: int | None = None,
        images: int | None = None,
    ) -> None:
        """`images`: elements of the rows that stand for these."""
        self.engine = EngineCore(EngineId("e"), EPOCH, limits or EngineLimits())
        self.worker = HonestWorker(num_blocks, checkpoints=state_checkpoints)
        self.plans: list[StepPlan] = []
        self.entries: list[NewTokens] = []
        self.now = 0.0
        self.context = min(max_model_len, num_blocks * 16)
        self.send(
            WorkersReady(replace(card(max_model_len), images=images), num_blocks, state_checkpoints=state_checkpoints)
        )

    def send(self, event: object) -> list[Output]:
        outputs = self.engine.handle(event, self.now)  # type: ignore[arg-type]
        check(self.engine)
        for output in outputs:
            if isinstance(output, SendPlan):
                self.plans.append(output.plan)
            elif isinstance(output, SendTokens):
                self.entries += output.batch.entries
        return outputs

    def step(self) -> list[Output]:
        return self.send(self.worker.step(self.plans.pop(0)))

    def finish(self) -> None:
        while self.plans:
            self.step()

    def output_of(self, request: str) -> list[int]:
        return [token for entry in self.entries if entry.request == request for token in entry.tokens]

    @property
    def free(self) -> int:
        report = self.engine.report()
        assert report is not None
        return report.blocks_free


def started(limits: EngineLimits) -> EngineCore:
    """An engine whose workers hold three sequences, in 64 blocks, and 40 tokens a step."""
    engine = EngineCore(EngineId("e"), Incarnation(1), limits)
    engine.handle(WorkersReady(card(), 64, max_running=3, max_batch_tokens=40), 0.0)
    return engine


def plans(outputs: list[Output]) -> list[StepPlan]:
    return [o.plan for o in outputs if isinstance(o, SendPlan)]


def told(outputs: list[Output]) -> list[RequestRejected | RequestFailed]:
    assert all(o.gateway == GATEWAY for o in outputs if isinstance(o, SendToGateway))
    return [o.message for o in outputs if isinstance(o, SendToGateway)]


def abandoned(outputs: list[Output]) -> list[AbandonStream]:
    return [a for o in outputs if isinstance(o, SendTokens) for a in o.batch.abandoned]
