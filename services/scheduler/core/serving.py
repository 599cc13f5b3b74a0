"""What an engine has while it has workers: one epoch's state, which the next epoch does not inherit."""

from __future__ import annotations

from services.scheduler.core.admission import Admission
from services.scheduler.core.drafts import Drafts
from services.scheduler.core.events import WorkersReady
from services.scheduler.core.grammars import Grammars
from services.scheduler.core.hand_overs import HandOvers
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.limits import Limits
from services.scheduler.core.loads import Loads
from services.scheduler.core.pace import Pace
from services.scheduler.core.planner import Planner
from services.scheduler.core.saves import Saves
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.steps import Steps
from services.scheduler.core.store import Store
from services.scheduler.core.transfers import Transfers
from shared.ids import Incarnation


class Serving:
    """Owned by the engine, and made anew for each epoch."""

    def __init__(self, epoch: Incarnation, limits: Limits, workers: WorkersReady, store: Store) -> None:
        self.workers = workers
        self.card = workers.card
        self.limits = limits.bounded(workers.max_running, workers.max_batch_tokens, workers.stages)
        self.admission = Admission(workers.card, workers.num_blocks, limits.policy)
        memory = KvMemory(workers.num_blocks, notes_fresh=store.node is not None)
        self.transfers = Transfers(memory.pool, workers.world_size)
        self.loads = Loads(self.limits, store, memory, self.transfers)
        self.saves = Saves(store, memory, self.transfers)
        self.hand_overs = HandOvers(self.saves)
        self.grammars = Grammars(limits.compile_timeout, store.tally)
        self.speculation = Speculation(workers.max_speculate, workers.max_jump_ahead, limits.speculation)
        self.planner = Planner(
            self.limits, memory, self.transfers, self.loads, self.saves, self.grammars, self.speculation, store.tally
        )
        self.drafts = Drafts(self.planner, self.speculation, store.tally)
        self.steps = Steps(epoch, Pace())

    def close(self) -> None:
        """Gives the store back what is held there. Every sequence has ended."""
        self.loads.close()
        self.saves.close()

    @property
    def saving(self) -> bool:
        """Whether blocks are on their way to the store, or being copied."""
        return self.saves.busy or len(self.transfers) > 0
