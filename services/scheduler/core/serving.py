"""What an engine has while it has workers: one epoch's state, which the next epoch does not inherit."""

from __future__ import annotations

from services.scheduler.core.admission import Admission
from services.scheduler.core.answers import Answers
from services.scheduler.core.drafts import Drafts
from services.scheduler.core.events import WorkersReady
from services.scheduler.core.grammars import Grammars
from services.scheduler.core.hand_overs import HandOvers
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.kv_traffic import KvTraffic
from services.scheduler.core.limits import Limits
from services.scheduler.core.loads import Loads
from services.scheduler.core.pace import Pace
from services.scheduler.core.planner import Planner
from services.scheduler.core.requests import Requests
from services.scheduler.core.saves import Saves
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.stepping import Stepping
from services.scheduler.core.steps import Steps
from services.scheduler.core.store import Store
from services.scheduler.core.transfers import Transfers
from shared.ids import Incarnation


class Serving:
    """Owned by the engine, and made anew for each epoch."""

    def __init__(
        self, epoch: Incarnation, limits: Limits, workers: WorkersReady, store: Store, answers: Answers
    ) -> None:
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
        places = self.planner.places
        self.requests = Requests(answers, places, self.hand_overs)
        self.kv_traffic = KvTraffic(memory, self.transfers, self.loads, self.saves, self.hand_overs, places)
        self.steps = Steps(epoch, Pace())
        drafts = Drafts(places, self.speculation, store.tally)
        self.stepping = Stepping(
            self.limits,
            self.planner,
            self.steps,
            self.transfers,
            drafts,
            self.hand_overs,
            self.requests,
            answers,
            store.tally,
        )

    def close(self) -> None:
        """Gives the store back what is held there. Every sequence has ended."""
        self.loads.close()
        self.saves.close()

    @property
    def saving(self) -> bool:
        """Whether blocks are on their way to the store, or being copied."""
        return self.saves.busy or len(self.transfers) > 0
