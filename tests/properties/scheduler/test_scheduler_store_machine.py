"""The core beside a KV store whose answers come late, never or in any order, and which evicts, restarts and vanishes.

Everything that `test_scheduler_machine` demands holds, with two ranks that copy when they like and sometimes fail. At
the end nothing is pinned or reserved in the store, whatever happened on the way, and no block is held for a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    Event,
    Output,
    RankProgress,
    ReleaseLease,
    SendStoreRequest,
    StoreGone,
    StoreReady,
    StoreReplied,
    WorkersReady,
)
from services.scheduler.core.limits import EngineLimits, EngineRole, QueuePolicy
from shared.ids import EngineId, Incarnation, InstanceId, LeaseId, NodeId
from shared.kv_groups import KvCacheGroup
from shared.messages.kvstore import KvStoreReply, KvStoreRequest, LeaseOwner
from shared.messages.scheduler import ResumeGeneration
from tests.properties.scheduler.test_scheduler_machine import (
    GROUPS,
    OPENINGS,
    SELDOM,
    STATES,
    EngineMachine,
    KeptStates,
)
from tests.support.engines.checking_store import LAYOUT, HonestStore
from tests.support.engines.checking_worker import HonestWorker, card, generate

RANKS = 2
OWNER = LeaseOwner(InstanceId("e"), Incarnation(77))
LEASE_SECONDS = 40.0
"""Of the machine's clock, on which each event takes one."""


@dataclass
class Asked:
    """A question that the store has answered, or will never see; the scheduler has not heard yet."""

    request: KvStoreRequest
    answer: KvStoreReply | None


class StoreMachine(EngineMachine):
    @initialize(
        blocks=st.integers(4, 14),
        budget=st.integers(6, 60),
        running=st.integers(1, 6),
        run_ahead=st.integers(0, 2),
        policy=st.sampled_from(["fcfs", "priority"]),
        slots=st.integers(2, 24),
        drafts=st.sampled_from([0, 0, 2, 5]),
        groups=st.sampled_from(GROUPS),
        states=st.sampled_from(STATES),
        luck=st.randoms(use_true_random=False),
    )
    def start(
        self,
        blocks: int,
        budget: int,
        running: int,
        run_ahead: int,
        policy: QueuePolicy,
        slots: int,
        drafts: int,
        groups: tuple[KvCacheGroup, ...],
        states: KeptStates | None,
        luck: Random,
    ) -> None:
        """With `states` in place of groups and drafts."""
        if states is not None:
            groups, drafts, slots = (), 0, slots * 3
        self.records = None if states is None else states.records
        limits = EngineLimits(
            max_batch_tokens=budget,
            max_running=running,
            max_waiting=8,
            run_ahead=run_ahead,
            policy=policy,
            step_timeout=1e9,
            speculation="fixed",
        )
        self.drafts, self.luck = drafts, luck
        self.store = HonestStore(slots * max(1, len(groups)), LEASE_SECONDS)
        self.asked: list[Asked] = []
        self.left: set[LeaseId] = set()
        """Leases under which something was being copied when an epoch ended: left to run out."""
        role = EngineRole("mixed", NodeId("n"), OWNER)
        checkpoints = None if states is None else states.checkpoints
        self.begin(blocks, EngineCore(EngineId("e"), Incarnation(1), limits, role), groups, checkpoints)
        self.tell(StoreReady(self.store.incarnation))
        self.answer_all()

    def workers_come(self) -> None:
        self.worker = HonestWorker(
            *(self.blocks, self.store, RANKS, self.accepts, self.groups, self.checkpoints, self.records)
        )
        ready = WorkersReady(
            card(90),
            self.blocks,
            world_size=RANKS,
            layout=LAYOUT,
            max_speculate=self.drafts,
            kv_groups=self.groups,
            state_checkpoints=self.checkpoints,
            state_records=self.records,
        )
        self.tell(ready)

    def hear(self, output: Output) -> None:
        match output:
            case SendStoreRequest(question):
                self.asked.append(Asked(question, self.store.answer(question)))
            case ReleaseLease(release):
                self.store.release(release)
            case _:
                super().hear(output)

    def tell(self, event: Event) -> None:
        serving = self.engine.epoch_state
        copying = serving.transfers.saves.leases if serving is not None and serving.transfers.saves.copying else set()
        super().tell(event)
        if self.engine.epoch_state is not serving:
            self.left |= copying

    @rule(
        openings=st.lists(st.sampled_from(OPENINGS[2:]), min_size=1, max_size=4),
        tail=st.integers(1, 20),
        max_tokens=st.integers(1, 30),
    )
    def several_come(self, openings: list[list[int]], tail: int, max_tokens: int) -> None:
        """With beginnings that are likely to be in the store."""
        for opening in openings:
            prompt = opening + [7] * tail
            name = f"r{len(self.newest)}"
            self.post(generate(name, prompt, max_tokens=max_tokens, ignore_eos=True, arrival=self.tick))

    # ---- the store's answers

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), fate=st.sampled_from(["answered", "answered", "answered", "answered", "late"]))
    def an_answer_comes(self, data: st.DataObject, fate: str) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        self.tell(StoreReplied(asked.request, None if fate == "late" else asked.answer))

    @precondition(lambda self: self.asked)
    @rule()
    def answer_all(self) -> None:
        while self.asked:
            asked = self.asked.pop(0)
            self.tell(StoreReplied(asked.request, asked.answer))

    # ---- the ranks

    @precondition(lambda self: self.worker.copies)
    @rule(
        rank=st.integers(0, RANKS - 1),
        times=st.integers(1, 4),
        fails=SELDOM,
        heard=st.sampled_from([True, True, False]),
    )
    def a_rank_copies(self, rank: int, times: int, fails: bool, heard: bool) -> None:
        """A report that is lost is made good by the next one, or by what the lifecycle says."""
        for _ in range(times):
            report = self.worker.copy(rank, fails=fails)
            if report is not None and heard:
                self.tell(report)

    @precondition(lambda self: self.engine.epoch_state is not None)
    @rule(rank=st.integers(0, RANKS - 1))
    def a_rank_reports(self, rank: int) -> None:
        """It has received every plan, of a new epoch, too, of which it has computed none yet: else it would be sent
        them again."""
        report = self.worker.report(rank)
        if report is not None:
            self.tick -= 1  # reports that come often are not compared with each other
            epoch = self.plans[-1].epoch if self.plans else report.epoch
            self.tell(RankProgress(rank, epoch, 10**9, 0, report))

    def copy_all(self) -> None:
        while self.worker.copies:
            for rank in range(RANKS):
                report = self.worker.copy(rank)
                if report is not None:
                    self.tell(report)

    @rule(times=st.integers(1, 12))
    def time_goes_on(self, times: int) -> None:
        """Most of the time all is well: a step, one rank's copy, an answer, again and again."""
        for turn in range(times):
            if self.plans:
                self.tell(self.worker.step(self.plans.pop(0)))
            report = self.worker.copy(turn % RANKS)
            if report is not None:
                self.tell(report)
            if self.asked:
                asked = self.asked.pop(0)
                self.tell(StoreReplied(asked.request, asked.answer))

    @precondition(lambda self: self.store.committed > 1)
    @rule()
    def workers_are_exchanged(self) -> None:
        """The new ones know nothing; the store does."""
        self.plans.clear()
        self.workers_come()

    # ---- what happens to the store

    @rule(slot=st.integers(0, 71))
    def a_block_is_evicted(self, slot: int) -> None:
        if slot < len(self.store.slots):
            self.store.evict(slot)

    @rule(seldom=SELDOM)
    def leases_run_out(self, seldom: bool) -> None:
        if seldom:
            self.tick += LEASE_SECONDS
            self.store.expire()

    @rule(seldom=SELDOM, other_file=st.booleans(), heard=st.booleans())
    def the_store_restarts(self, seldom: bool, other_file: bool, heard: bool) -> None:
        if seldom:
            self.store.restart(other_file=other_file)
            if heard:
                self.tell(StoreGone())
            self.tell(StoreReady(self.store.incarnation))

    @rule(seldom=SELDOM)
    def the_store_refuses(self, seldom: bool) -> None:
        if seldom:
            self.store.serves = not self.store.serves
            self.store.expire()

    # ---- the end

    def finish(self) -> None:
        """Copying goes on beside the steps: blocks that are being saved are nobody's, and who needs them computes in
        vain until it has ended."""
        while self.plans or self.asked or self.worker.copies or self.worker.compiling:
            if self.worker.compiling:
                self.compile()
            if self.plans:
                self.tell(self.worker.step(self.plans.pop(0)))
            self.copy_all()
            self.answer_all()
            for rank in range(RANKS):
                self.a_rank_reports(rank)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tell(ResumeGeneration())
        self.finish()
        assert self.engine.idle, "something is in hand for ever"
        super().teardown()
        held = {lease for _, lease in (*self.store.pinned, *self.store.reserved)}
        assert held <= self.left, "a lease was left behind"
        assert not self.engine.store.held


TestEngineWithAStore = StoreMachine.TestCase
TestEngineWithAStore.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
