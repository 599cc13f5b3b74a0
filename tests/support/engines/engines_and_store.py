"""Engines' cores that share one KV store, without a bus: every message lies in a queue until a test lets it arrive.

It follows each stream as a detokenizer does, so a token from the wrong engine or at the wrong place is found out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    Event,
    ForwardControl,
    HandOverRefused,
    Output,
    RankProgress,
    ReleaseLease,
    SendHandOver,
    SendPlan,
    SendPrefetch,
    SendStoreRequest,
    SendToGateway,
    SendTokens,
    StoreReady,
    StoreReplied,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits, EngineRole
from shared.ids import Attempt, EngineId, Incarnation, InstanceId, NodeId, RequestId
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import PromptKept, RequestFailed, RequestPlaced, RequestRejected
from shared.messages.kvstore import KvStoreReply, KvStoreRequest, LeaseOwner
from shared.messages.lifecycle import EngineReport
from shared.messages.scheduler import GenerateRequest
from shared.messages.worker import StepPlan
from tests.support.engines.checking_store import LAYOUT, HonestStore
from tests.support.engines.checking_worker import HonestWorker, card

NODE = NodeId("node-1")
Key = tuple[RequestId, Attempt]


@dataclass
class Asked:
    """A question that the store has dealt with; the scheduler has not heard of it yet."""

    request: KvStoreRequest
    answer: KvStoreReply | None


@dataclass
class Stream:
    """What a detokenizer knows of an attempt."""

    engine: EngineId
    prompt_length: int
    start: int
    cached_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    abandoned: bool = False


class Side:
    """One engine, its worker, and what lies between them."""

    def __init__(self, name: str, engines: EnginesAndStore, limits: EngineLimits, blocks: int, ranks: int) -> None:
        self.id = EngineId(name)
        self.engines = engines
        self.blocks, self.ranks = blocks, ranks
        owner = LeaseOwner(InstanceId(name), Incarnation(1))
        self.engine = EngineCore(self.id, Incarnation(1), limits, EngineRole("mixed", NODE, owner))
        self.plans: deque[StepPlan] = deque()
        self.asked: deque[Asked] = deque()
        self.sent_plans: list[StepPlan] = []
        self.outputs: list[Output] = []
        self.new_workers()

    def new_workers(self) -> None:
        self.plans.clear()
        engines = self.engines
        self.worker = HonestWorker(
            self.blocks,
            engines.store,
            self.ranks,
            engines.accepts,
            engines.groups,
            engines.checkpoints,
            engines.records,
        )
        ready = WorkersReady(
            card(256),
            self.blocks,
            world_size=self.ranks,
            layout=LAYOUT,
            max_speculate=engines.drafts,
            kv_groups=engines.groups,
            state_checkpoints=engines.checkpoints,
            state_records=engines.records,
        )
        self.send(ready)

    def send(self, event: Event) -> list[Output]:
        self.engines.now += 0.001
        outputs = self.engine.handle(event, self.engines.now)
        check(self.engine)
        self.outputs += outputs
        for output in outputs:
            self.engines.hear(self, output)
        return outputs

    # ---- what may happen next; False where there is nothing of the kind

    def step(self) -> bool:
        if not self.plans:
            return False
        self.send(self.worker.step(self.plans.popleft()))
        return True

    def copy(self, rank: int = 0, *, fails: bool = False) -> bool:
        report = self.worker.copy(rank, fails=fails)
        if report is not None:
            self.send(report)
        return report is not None

    def answer(self, index: int = 0, *, lost: bool = False) -> bool:
        if not self.asked:
            return False
        asked = self.asked[index]
        del self.asked[index]
        self.send(StoreReplied(asked.request, None if lost else asked.answer))
        return True

    def report_progress(self) -> None:
        """As lifecycles do: it makes good what was lost of the ranks' reports."""
        for rank in range(self.ranks):
            report = self.worker.report(rank)
            if report is not None:
                self.engines.now += 1.0
                self.send(RankProgress(rank, report.epoch, 10**9, 0, report))

    @property
    def report(self) -> EngineReport:
        report = self.engine.report()
        assert report is not None
        return report

    @property
    def free(self) -> int:
        return self.report.blocks_free

    @property
    def phases(self) -> list[str]:
        return [sequence.phase for sequence in self.engine.requests.values()]


class EnginesAndStore:
    """Owns the store, the engines, the words for the gateway, and what is on its way between engines."""

    def __init__(
        self,
        *names: str,
        limits: EngineLimits | None = None,
        blocks: int = 32,
        ranks: int = 1,
        slots: int = 64,
        lease_seconds: float = 10.0,
        drafts: int = 0,
        accepts: Callable[[int], int] | None = None,
        groups: tuple[KvCacheGroup, ...] = (),
        checkpoints: int | None = None,
        records: StateRecords | None = None,
    ) -> None:
        """`drafts`: at most so many for a sequence and step; `accepts` and what is behind it: see `HonestWorker`."""
        self.drafts, self.accepts, self.groups = drafts, accepts, groups
        self.checkpoints, self.records = checkpoints, records
        self.now = 0.0
        self.turns = 0
        self.store = HonestStore(slots, lease_seconds)
        self.streams: dict[Key, Stream] = {}
        self.told: list[RequestPlaced | RequestRejected | RequestFailed | PromptKept] = []
        self.passed: deque[Callable[[], None]] = deque()
        """Messages from engine to engine, in order."""
        self.strays: defaultdict[Key, int] = defaultdict(int)
        """Tokens for attempts that the detokenizer does not know (any more)."""
        self.numbers: dict[tuple[EngineId, int], int] = {}
        self.sides: dict[EngineId, Side] = {}
        for name in names:
            side = Side(name, self, limits or EngineLimits(run_ahead=1, plan_late=False), blocks, ranks)
            self.sides[side.id] = side
            side.send(StoreReady(self.store.incarnation))
        self.settle()

    def __getitem__(self, name: str) -> Side:
        return self.sides[EngineId(name)]

    # ---- time goes on

    def settle(self, most: int = 10_000) -> None:
        """Everything happens that can, in turns."""
        for _ in range(most):
            if not self.turn():
                return
        raise AssertionError("it never comes to rest")

    def until(self, condition: Callable[[], object], most: int = 1000) -> None:
        """Turns, until `condition` holds."""
        for _ in range(most):
            if condition():
                return
            self.turn()
        raise AssertionError("it never came to that")

    def turn(self) -> bool:
        """One thing of each kind; what one engine says to another in it arrives in the next turn. One rank copies, so
        that a step lies between the first and the last that do."""
        happened = bool(self.passed)
        self.turns += 1
        if self.passed:
            self.passed.popleft()()
        for side in self.sides.values():
            happened |= side.step()
            happened |= any(side.copy((self.turns + i) % side.ranks) for i in range(side.ranks))
            happened |= side.answer()
        return happened

    # ---- what the engines say

    def hear(self, side: Side, output: Output) -> None:
        match output:
            case SendPlan(plan):
                side.plans.append(plan)
                side.sent_plans.append(plan)
            case SendStoreRequest(question):
                side.asked.append(Asked(question, self.store.answer(question)))
            case ReleaseLease(release):
                self.store.release(release)
            case SendTokens(_, batch):
                self._take_batch(batch)
            case SendToGateway(_, message):
                self.told.append(message)
            case SendHandOver(engine, generate):
                self.passed.append(lambda: self._pass_on(side, engine, generate))
            case SendPrefetch():
                pass  # both engines are of one node: nothing to copy
            case ForwardControl(engine, message):
                self.passed.append(lambda: (self.sides[engine].send(message), None)[1])
            case _:
                raise AssertionError(output)

    def _pass_on(self, side: Side, engine: EngineId, generate: GenerateRequest) -> None:
        if engine in self.sides:
            self.sides[engine].send(generate)
        else:
            side.send(HandOverRefused(generate, engine))

    def _take_batch(self, batch: TokenBatch) -> None:
        numbered = batch.engine, batch.epoch
        assert batch.number == self.numbers.get(numbered, 0)
        self.numbers[numbered] = batch.number + 1
        for opened in batch.opened:
            assert (opened.request, opened.attempt) not in self.streams, "a stream is opened once"
            self.streams[opened.request, opened.attempt] = Stream(
                batch.engine, opened.prompt_tokens, opened.resumed, opened.cached_tokens
            )
        for entry in batch.entries:
            stream = self.streams.get((entry.request, entry.attempt))
            if stream is None or stream.abandoned:
                self.strays[entry.request, entry.attempt] += 1
                continue
            assert stream.engine == batch.engine, "tokens from an engine that does not have the stream"
            assert stream.finish is None, "tokens after the end"
            assert entry.position == stream.start + len(stream.tokens), "tokens at the wrong place"
            stream.tokens += entry.tokens
            stream.finish = entry.finish
        for moved in batch.moved:
            stream = self.streams[moved.request, moved.attempt]
            assert stream.engine == batch.engine
            stream.engine = moved.engine
        for abandoned in batch.abandoned:
            known = self.streams.get((abandoned.request, abandoned.attempt))
            if known is not None:
                known.abandoned = True

    def stream(self, request: str, attempt: int = 1) -> Stream:
        return self.streams[RequestId(request), Attempt(attempt)]

    # ---- what must be at rest

    def check_nothing_is_held(self) -> None:
        for side in self.sides.values():
            assert side.engine.idle, f"{side.id} is not done"
            assert side.free == side.report.blocks_total, f"{side.id} holds blocks"
            assert not side.engine.store.held, f"{side.id} holds leases"
        assert not self.store.pinned, "blocks are pinned for nobody"
        assert not self.store.reserved, "slots are reserved for nobody"
