"""Two engines that hand requests to each other over one store, with drafts and without, under cancels, losses,
evictions and lost answers.

Every stream is the one that a single engine would have given, whoever drew its tokens; every request ends in one final
word or was called off; and at the end nothing is held anywhere.
"""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.core.events import StoreGone, StoreReady
from services.scheduler.core.limits import EngineLimits
from shared.ids import Attempt, EngineId, LeaseId, RequestId
from shared.kv_groups import KvCacheGroup, longest_sequence
from shared.messages.gateway import RequestFailed, RequestRejected
from shared.messages.kvstore import LeaseOwner
from shared.messages.scheduler import Cancel, GenerateRequest, StopMatched
from tests.properties.scheduler.test_scheduler_machine import GROUPS, OPENINGS, SELDOM, STATES, KeptStates
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.engines_and_store import EnginesAndStore, Side

NAMES = st.sampled_from(["p", "d"])
RANKS = 2


class HandOverMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(5, 14),
        budget=st.integers(6, 60),
        running=st.integers(1, 6),
        run_ahead=st.integers(0, 2),
        slots=st.integers(2, 24),
        drafts=st.sampled_from([0, 2, 5]),
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
        slots: int,
        drafts: int,
        groups: tuple[KvCacheGroup, ...],
        states: KeptStates | None,
        luck: Random,
    ) -> None:
        """With `states` in place of groups and drafts."""
        if states is not None:
            groups, drafts, slots = (), 0, slots * 3
        limits = EngineLimits(
            max_batch_tokens=budget,
            max_running=running,
            max_waiting=8,
            run_ahead=run_ahead,
            plan_late=False,
            step_timeout=1e9,
            speculation="fixed",
        )
        tables = max(1, len(groups))
        blocks = blocks * tables + bool(groups)
        self.engines = EnginesAndStore(
            "p",
            "d",
            limits=limits,
            blocks=blocks,
            ranks=RANKS,
            slots=slots * tables,
            drafts=drafts,
            groups=groups,
            accepts=lambda drafted: luck.randint(0, drafted),
            checkpoints=None if states is None else states.checkpoints,
            records=None if states is None else states.records,
        )
        self.context = longest_sequence(groups, blocks, 16, budget) if groups else blocks * 16
        self.asked: dict[tuple[RequestId, Attempt], GenerateRequest] = {}
        self.called_off: set[tuple[RequestId, Attempt]] = set()
        self.left: set[tuple[LeaseOwner, LeaseId]] = set()

    @rule(
        name=NAMES,
        other=st.booleans(),
        opening=st.sampled_from(OPENINGS),
        tail=st.lists(st.integers(4, 9), min_size=1, max_size=20),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.sampled_from([True, True, False]),
    )
    def a_request_comes(
        self, name: str, other: bool, opening: list[int], tail: list[int], max_tokens: int, ignore_eos: bool
    ) -> None:
        request = generate(
            f"r{len(self.asked)}",
            opening + tail,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            decode_on=EngineId("d" if name == "p" else "p") if other else None,
            arrival=float(len(self.asked)),
        )
        self.asked[request.generation.request, Attempt(1)] = request
        self.engines[name].send(request)

    @rule(name=NAMES, times=st.integers(1, 8))
    def steps_finish(self, name: str, times: int) -> None:
        for _ in range(times):
            self.engines[name].step()

    @rule(name=NAMES, rank=st.integers(0, RANKS - 1), times=st.integers(1, 4), fails=SELDOM)
    def a_rank_copies(self, name: str, rank: int, times: int, fails: bool) -> None:
        for _ in range(times):
            self.engines[name].copy(rank, fails=fails)

    @rule(data=st.data(), name=NAMES, lost=SELDOM)
    def the_store_answers(self, data: st.DataObject, name: str, lost: bool) -> None:
        side = self.engines[name]
        if side.asked:
            side.answer(data.draw(st.integers(0, len(side.asked) - 1)), lost=lost)

    @precondition(lambda self: self.engines.passed)
    @rule()
    def what_was_passed_on_arrives(self) -> None:
        self.engines.passed.popleft()()

    @rule(times=st.integers(1, 6))
    def time_goes_on(self, times: int) -> None:
        for _ in range(times):
            self.engines.turn()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), name=NAMES, message=st.sampled_from([Cancel, StopMatched]))
    def a_request_is_called_off(
        self, data: st.DataObject, name: str, message: type[Cancel] | type[StopMatched]
    ) -> None:
        """Where the gateway believes it to be: where it came, or where it went by the last word."""
        request, attempt = data.draw(st.sampled_from(list(self.asked)))
        for each in self._where(request, name):
            each.send(message(request, attempt))
            self.called_off.add((request, attempt))

    def _where(self, request: RequestId, name: str) -> list[Side]:
        stream = self.engines.streams.get((request, Attempt(1)))
        holders = [side for side in self.engines.sides.values() if request in side.engine.requests]
        return holders or ([self.engines.sides[stream.engine]] if stream is not None else [])

    @rule(slot=st.integers(0, 71))
    def a_block_is_evicted(self, slot: int) -> None:
        if slot < len(self.engines.store.slots):
            self.engines.store.evict(slot)

    @rule(seldom=SELDOM, other_file=st.booleans(), heard=st.booleans())
    def the_store_restarts(self, seldom: bool, other_file: bool, heard: bool) -> None:
        if not seldom:
            return
        store = self.engines.store
        store.restart(other_file=other_file)
        for side in self.engines.sides.values():
            if heard:
                side.send(StoreGone())
            side.send(StoreReady(store.incarnation))

    @rule(seldom=SELDOM, name=NAMES)
    def workers_die(self, seldom: bool, name: str) -> None:
        if not seldom:
            return
        side = self.engines[name]
        serving = side.engine.epoch_state
        if serving is not None and serving.transfers.saves.copying:  # left to run out: a rank may be writing there
            self.left |= set(self.engines.store.reserved)
        side.new_workers()

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        engines = self.engines
        engines.settle()
        for left in self.left & set(engines.store.reserved):
            del engines.store.reserved[left]
        engines.check_nothing_is_held()
        refused = [word for word in engines.told if isinstance(word, RequestFailed | RequestRejected)]
        for key, request in self.asked.items():
            finals = sum((word.request, word.attempt) == key for word in refused)
            stream = engines.streams.get(key)
            right, finish = right_output(request, min(256, self.context))
            if stream is not None:
                assert stream.tokens == right[: len(stream.tokens)]
                assert stream.finish in (None, finish)
                finals += stream.finish is not None
                assert (stream.finish is None) or stream.tokens == right
            assert finals <= 1, "a second final word"
            assert finals == 1 or key in self.called_off, "a request was left without a final word"
        assert not engines.strays


TestHandOver = HandOverMachine.TestCase
TestHandOver.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
