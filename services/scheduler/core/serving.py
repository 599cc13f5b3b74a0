"""What an engine has while it has workers: one epoch's state, which the next epoch does not inherit."""

from __future__ import annotations

from services.scheduler.core.admission import Admission
from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import Limits
from services.scheduler.core.pace import Pace
from services.scheduler.core.planner import Planner
from services.scheduler.core.steps import Steps
from services.scheduler.core.streams import Streams
from shared.ids import EngineId, Incarnation


class Serving:
    """Owned by the engine, and made anew for each epoch."""

    def __init__(self, engine: EngineId, epoch: Incarnation, limits: Limits, workers: WorkersReady) -> None:
        self.workers = workers
        self.card = workers.card
        self.limits = limits.bounded(workers.max_running, workers.max_batch_tokens)
        self.admission = Admission(workers.card, workers.num_blocks, limits.policy)
        self.planner = Planner(self.limits, workers.num_blocks)
        self.steps = Steps(epoch, Pace())
        self.streams = Streams(engine, epoch)
