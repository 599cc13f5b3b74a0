"""The whole core under random arrivals, cancels, losses and memory pressure, with a worker that would notice.

After every event the invariants hold; every request ends in exactly one final word, or was called off; every token
is the one that computing the request alone would have given; and at the end every block is free again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    DetokenizerGone,
    Event,
    Output,
    SendPlan,
    SendToGateway,
    SendTokens,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, InstanceId, RequestId
from shared.kv_groups import KvCacheGroup, StateRecords, longest_sequence
from shared.messages.detokenizer import TokenBatch
from shared.messages.generation import Grammar
from shared.messages.kv_events import ResetPrefixCache
from shared.messages.scheduler import (
    Cancel,
    GenerateRequest,
    PauseGeneration,
    PauseMode,
    PauseState,
    ResumeGeneration,
    StepFinished,
    StepMissed,
    StopMatched,
    TokenBatchLost,
)
from shared.messages.worker import StepPlan
from shared.packing import unpack
from tests.support.engines.checking_worker import HonestWorker, card, generate, right_output

DETOKENIZERS = [DetokenizerId("d1"), DetokenizerId("d2")]
SELDOM = st.integers(0, 9).map(lambda n: n == 7)
"""Disasters that end every request come rarely, or there would never be pressure on memory."""

OPENINGS = [[], [5] * 16, list(range(4, 20)), [*range(4, 20), *[6] * 16]]
"""Beginnings that prompts share, so that prefix hits are common."""

FULL = KvCacheGroup(layers=2)
GROUPS = [
    (),
    (),
    (FULL, KvCacheGroup(layers=2, window=20)),
    (KvCacheGroup(layers=2, window=17),),
    (FULL, *[KvCacheGroup(layers=2, window=5)] * 2, KvCacheGroup(layers=1, window=33)),
    (KvCacheGroup(layers=2, window=1), KvCacheGroup(layers=2, window=16)),
]


class KeptStates(NamedTuple):
    """Of models with states: places for checkpoints, and how a store keeps one."""

    checkpoints: int
    records: StateRecords


STATES = [None, KeptStates(2, StateRecords(pages=2)), KeptStates(5, StateRecords(pages=1, alone=True))]


@dataclass
class Sent:
    """What was asked and what came of it."""

    generate: GenerateRequest
    output: list[int] = field(default_factory=list)
    finish: str | None = None
    refused: int = 0
    opened: int = 0
    called_off: bool = False

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refused > 0 or self.called_off


GOOD = [Grammar("regex", "[ab]+"), Grammar("json", "{}", after="</think>")]
BAD = Grammar("grammar", "root ::= ")


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(3, 12),
        budget=st.integers(6, 60),
        running=st.integers(1, 6),
        run_ahead=st.integers(0, 2),
        policy=st.sampled_from(["fcfs", "priority"]),
        drafts=st.sampled_from([0, 0, 1, 3, 6]),
        speculation=st.sampled_from(["dynamic", "fixed"]),
        stages=st.sampled_from([1, 1, 2, 3]),
        groups=st.sampled_from(GROUPS),
        checkpoints=st.sampled_from([None, None, 1, 3]),
        luck=st.randoms(use_true_random=False),
    )
    def start(
        self,
        blocks: int,
        budget: int,
        running: int,
        run_ahead: int,
        policy: str,
        drafts: int,
        speculation: str,
        stages: int,
        groups: tuple[KvCacheGroup, ...],
        checkpoints: int | None,
        luck: Random,
    ) -> None:
        if checkpoints is not None:  # models with states take no drafts, and have one table
            drafts, groups = 0, ()
        limits = EngineLimits(
            max_batch_tokens=budget,
            max_running=running,
            max_waiting=8,
            run_ahead=run_ahead,
            policy=policy,  # type: ignore[arg-type]
            speculation=speculation,  # type: ignore[arg-type]
        )
        self.drafts, self.stages, self.luck = drafts, stages, luck
        self.begin(blocks, EngineCore(EngineId("e"), Incarnation(1), limits), groups, checkpoints)

    def begin(
        self,
        blocks: int,
        engine: EngineCore,
        groups: tuple[KvCacheGroup, ...] = (),
        checkpoints: int | None = None,
    ) -> None:
        self.groups, self.checkpoints = groups, checkpoints
        self.blocks = 1 + blocks * len(groups) if groups else blocks
        room = longest_sequence(groups, self.blocks, 16, engine.limits.max_batch_tokens) if groups else blocks * 16
        self.context = min(90, room)
        self.engine = engine
        self.sent: dict[tuple[RequestId, Attempt], Sent] = {}
        self.newest: dict[RequestId, Sent] = {}
        self.numbers: dict[tuple[int, DetokenizerId], int] = {}
        self.late: list[StepFinished] = []
        self.plans: list[StepPlan] = []
        self.tick = 0.0
        self.workers_come()

    @property
    def accepts(self) -> Callable[[int], int] | None:
        """How many of so many drafts are right; None where none are made."""
        return (lambda most: self.luck.randint(0, most)) if self.drafts else None

    # ---- what happens to the engine

    def tell(self, event: Event) -> None:
        self.tick += 1
        outputs = self.engine.handle(event, self.tick)
        check(self.engine)
        for output in outputs:
            self.hear(output)
        if self.engine.isolated is not None and not self.plans and self.engine.paused != "all":
            self.tell(TimePassed())  # the trial was announced, and begins

    @rule(
        opening=st.sampled_from(OPENINGS),
        tail=st.lists(st.integers(4, 9), max_size=20),
        max_tokens=st.none() | st.none() | st.integers(0, 60),
        min_tokens=st.integers(0, 40),
        ignore_eos=st.sampled_from([True, True, False]),
        stop=st.sampled_from([(), (), (7,), (8, 9, 10)]),
        priority=st.integers(0, 2),
        detokenizer=st.sampled_from(DETOKENIZERS),
        salt=st.sampled_from([None, None, None, "s"]),
        cached=st.sampled_from([True, True, True, False]),
        grammar=st.sampled_from([None, None, None, *GOOD, BAD]),
        suspect_until=st.sampled_from([None, None, 1, 6, 30]),
    )
    def a_request_comes(
        self,
        opening: list[int],
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop: tuple[int, ...],
        priority: int,
        detokenizer: DetokenizerId,
        salt: str | None,
        cached: bool,
        grammar: Grammar | None,
        suspect_until: int | None,
    ) -> None:
        request = generate(
            f"r{len(self.newest)}",
            opening + tail,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            priority=priority,
            detokenizer=detokenizer,
            arrival=self.tick,
            cache_salt=salt,
            prefix_caching=cached,
            grammar=grammar,
            suspect_until=suspect_until,
        )
        self.post(request)

    def post(self, request: GenerateRequest) -> None:
        generation = request.generation
        before = self.newest.get(generation.request)
        if before is not None:
            before.called_off = True
        sent = Sent(request)
        self.sent[generation.request, generation.attempt] = self.newest[generation.request] = sent
        self.tell(request)

    @precondition(lambda self: self.newest)
    @rule(data=st.data(), kept=st.integers(0, 40))
    def a_newer_attempt_comes(self, data: st.DataObject, kept: int) -> None:
        """The gateway resumes with what the client has, whether or not it heard how the last attempt ended."""
        before = data.draw(st.sampled_from(list(self.newest.values())))
        old, stopping = before.generate.generation, before.generate.generation.stopping
        if before.finish is not None:
            return
        output = [*_resumed(before.generate), *before.output[:kept]]
        self.post(
            generate(
                old.request,
                _prompt(before.generate),
                attempt=old.attempt + 1,
                resume=tuple(output),
                max_tokens=stopping.max_tokens,
                min_tokens=stopping.min_tokens,
                ignore_eos=stopping.ignore_eos,
                stop_token_ids=stopping.stop_token_ids,
                priority=old.priority,
                arrival=old.arrival,
                cache_salt=old.cache_salt,
                prefix_caching=old.prefix_caching,
                grammar=old.grammar,
                detokenizer=data.draw(st.sampled_from(DETOKENIZERS)),
                suspect_until=old.suspect_until,
            )
        )

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_old_request_comes_again(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.sampled_from(list(self.sent.values()))).generate)

    @precondition(lambda self: self.plans)
    @rule(times=st.integers(1, 20))
    def steps_finish(self, times: int) -> None:
        for _ in range(times):
            if self.plans:
                self.tell(self.worker.step(self.plans.pop(0)))

    @precondition(lambda self: self.worker.compiling)
    @rule()
    def a_grammar_is_compiled(self) -> None:
        self.compile()

    def compile(self) -> None:
        self.tell(self.worker.compile("an empty rule" if self.worker.compiling[0] == BAD else None))

    @precondition(lambda self: not self.plans)
    @rule()
    def time_passes(self) -> None:
        """Enough of it for a grammar that was asked for long ago to be given up."""
        self.tick += 10
        self.tell(TimePassed())

    @precondition(lambda self: self.newest)
    @rule(data=st.data(), message=st.sampled_from([Cancel, StopMatched]))
    def a_request_is_called_off(self, data: st.DataObject, message: type[Cancel] | type[StopMatched]) -> None:
        sent = data.draw(st.sampled_from(list(self.newest.values())))
        sent.called_off = True
        self.tell(message(sent.generate.generation.request, sent.generate.generation.attempt))

    @rule(
        seldom=SELDOM, message=st.sampled_from([TokenBatchLost, DetokenizerGone]), which=st.sampled_from(DETOKENIZERS)
    )
    def a_detokenizer_is_lost(
        self, seldom: bool, message: type[TokenBatchLost] | type[DetokenizerGone], which: DetokenizerId
    ) -> None:
        if seldom:
            self.tell(message(which))

    @precondition(lambda self: self.plans)
    @rule(seldom=SELDOM, at=st.integers(0, 4))
    def a_plan_is_lost(self, seldom: bool, at: int) -> None:
        if not seldom:
            return
        at %= len(self.plans)
        missed = self.plans[at]
        del self.plans[at:]  # the worker drops those behind it
        self.tell(StepMissed(worker=InstanceId("w"), epoch=missed.epoch, expected=missed.step))

    @precondition(lambda self: len(self.plans) > 1)
    @rule(seldom=SELDOM)
    def a_result_is_lost(self, seldom: bool) -> None:
        if not seldom:
            return
        self.late.append(self.worker.step(self.plans.pop(0)))
        result = self.worker.step(self.plans.pop(0))
        self.plans.clear()
        self.tell(result)

    @rule(seldom=SELDOM)
    def the_prefix_cache_is_reset(self, seldom: bool) -> None:
        if seldom:
            self.tell(ResetPrefixCache())

    @rule(seldom=SELDOM, mode=st.sampled_from(["new", "all"]))
    def it_is_paused(self, seldom: bool, mode: PauseMode) -> None:
        if seldom:
            self.tell(PauseGeneration(mode))

    @precondition(lambda self: self.engine.paused)
    @rule()
    def it_rests(self) -> None:
        """What is planned ends, and where nothing new begins, what runs does, but for what a store is awaited for."""
        while self.plans:
            self.tell(self.worker.step(self.plans.pop(0)))
        state = self.engine.epoch_state
        loading = state is not None and self.engine.paused == "new" and bool(state.queues.loading)
        assert loading or self.engine.pause_state() == PauseState(self.engine.paused, 0)

    @precondition(lambda self: self.engine.paused)
    @rule()
    def it_goes_on(self) -> None:
        self.tell(ResumeGeneration())

    @precondition(lambda self: self.late)
    @rule()
    def a_result_comes_late(self) -> None:
        self.tell(self.late.pop())

    @rule(seldom=SELDOM)
    def workers_die(self, seldom: bool) -> None:
        if not seldom:
            return
        self.plans.clear()
        self.tell(WorkersLost("killed"))

    @precondition(lambda self: self.engine.epoch_state is None)
    @rule()
    def workers_come(self) -> None:
        self.worker = HonestWorker(self.blocks, accepts=self.accepts, groups=self.groups, checkpoints=self.checkpoints)
        ready = WorkersReady(
            *(card(90), self.blocks),
            max_speculate=self.drafts,
            stages=self.stages,
            kv_groups=self.groups,
            state_checkpoints=self.checkpoints,
        )
        self.tell(ready)

    # ---- what the engine says

    def hear(self, output: Output) -> None:
        match output:
            case SendPlan(plan):
                self.plans.append(plan)
                self.check_isolation(plan)
            case SendToGateway(_, message):
                sent = self.sent[message.request, message.attempt]
                assert not sent.over, "a second final word"
                sent.refused += 1
            case SendTokens(detokenizer, batch):
                self.hear_batch(detokenizer, batch)
            case _:
                raise AssertionError(output)

    def check_isolation(self, plan: StepPlan) -> None:
        """A suspect shares no step, and none that is in flight beside its own."""
        assert self.engine.epoch_state is not None
        sequences = self.engine.epoch_state.queues.by_id
        if any(sequences[work.sequence].suspected for work in plan.work if work.sequence in sequences):
            assert len({work.sequence for each in self.plans for work in each.work}) == 1

    def hear_batch(self, detokenizer: DetokenizerId, batch: TokenBatch) -> None:
        expected = self.numbers.get((batch.epoch, detokenizer), 0)
        assert batch.number == expected
        self.numbers[batch.epoch, detokenizer] = expected + 1
        for opened in batch.opened:
            sent = self.sent[opened.request, opened.attempt]
            sent.opened += 1
            assert sent.opened == 1
            assert opened.resumed == len(_resumed(sent.generate))
        for entry in batch.entries:
            sent = self.sent[entry.request, entry.attempt]
            assert sent.opened, "tokens before the stream was opened"
            assert not sent.over, "tokens after the end"
            assert sent.generate.detokenizer == detokenizer
            assert entry.position == len(_resumed(sent.generate)) + len(sent.output)
            sent.output += entry.tokens
            sent.finish = entry.finish
            self.compare(sent)

    def compare(self, sent: Sent) -> None:
        right, finish = right_output(sent.generate, self.context)
        output = [*_resumed(sent.generate), *sent.output]
        if sent.finish is None:
            assert output == right[: len(output)]
        else:
            assert (output, sent.finish) == (right, finish)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tell(ResumeGeneration())
        while self.plans or self.worker.compiling:
            if self.plans:
                self.tell(self.worker.step(self.plans.pop(0)))
            else:
                self.compile()
        assert not self.engine.requests
        assert all(sent.over for sent in self.sent.values()), "a request was left without a final word"
        if self.engine.epoch_state is not None:
            memory = self.engine.epoch_state.memory
            pool = memory.pool
            assert pool.free == pool.total - len(memory.blocks_in_use([])), "but for the null block, and pages"


def _prompt(request: GenerateRequest) -> list[int]:
    return unpack(request.generation.tokens)[: request.generation.prompt_length]


def _resumed(request: GenerateRequest) -> list[int]:
    return unpack(request.generation.tokens)[request.generation.prompt_length :]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
