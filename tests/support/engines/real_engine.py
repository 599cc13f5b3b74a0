"""A scheduler's core, its one real rank, and a real KV store in this process."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvstore.node.node_store import NodeStore
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    Event,
    Output,
    ReleaseLease,
    SendHandOver,
    SendPlan,
    SendStoreRequest,
    SendTokens,
    StoreReady,
    StoreReplied,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits, EngineRole
from services.worker.backend import run_step
from services.worker.kv.copy_thread import TransferLedger, around
from services.worker.kv.transfers import Transfers
from shared.ids import EngineId, Incarnation, InstanceId
from shared.messages.kvstore import Attach, Commit, Find, FindAny, KvStoreReply, KvStoreRequest, LeaseOwner, Reserve
from shared.messages.scheduler import GenerateRequest, StepFinished
from shared.messages.worker import StepPlan, Transfer
from shared.packing import unpack
from tests.support.engines.checking_worker import TIMING, generate
from tests.support.kv.arenas import NODE
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 24
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4)


class RealEngine:
    """A core, its one rank, and the store, whose replies come with the next turn."""

    def __init__(
        self, name: str, model: TinyModel | ImageModel, store: NodeStore, folder: Path, **settings: Any
    ) -> None:
        """`settings`: of the backend."""
        self.store = store
        settings = {"kv_memory_bytes": 2 << 20, "max_num_seqs": 4, "max_batch_tokens": 40, "ops": "native"} | settings
        self.backend = tiny_backend(model.path, dtype="float32", **settings)
        self.transfers, self.ledger = Transfers(self.backend.kv, folder), TransferLedger(0)
        self.turns: deque[Event | StepPlan | Transfer] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.computed = self.loaded = self.saved = 0
        self.handed: list[GenerateRequest] = []
        owner = LeaseOwner(InstanceId(name), Incarnation(1))
        self.core = EngineCore(EngineId(name), Incarnation(1), LIMITS, EngineRole("mixed", NODE, owner))
        self.now = 0.0
        self.send(
            WorkersReady(
                self.backend.card,
                self.backend.num_blocks,
                max_running=4,
                max_batch_tokens=40,
                layout=self.backend.kv.layout,
                kv_groups=self.backend.kv_groups,
                state_checkpoints=self.backend.state_checkpoints,
                state_records=self.backend.state_records,
            )
        )
        self.send(StoreReady(Incarnation(1)))
        self.run()

    def send(self, event: Event) -> None:
        self.now += 0.1
        for output in self.core.handle(event, self.now):
            self._hear(output)
        check(self.core)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.turns:
            match self.turns.popleft():
                case StepPlan() as plan:
                    self._step(plan)
                case Transfer() as copy:
                    self._copy(copy)
                case event:
                    self.send(event)

    def _step(self, plan: StepPlan) -> None:
        if plan.step == 0:
            self.backend.reset()
        self.ledger.record(plan)
        before, behind = around(plan.transfers)
        for each in before:
            self._copy(each)
        output = run_step(self.backend, plan)
        self.turns.extend(behind)
        self.computed += sum(work.count for work in plan.work)
        self.send(StepFinished(epoch=plan.epoch, step=plan.step, sampled=output.sampled, timing=TIMING))

    def _copy(self, asked: Transfer) -> None:
        assert self.transfers.run(asked, lambda: False) == "done"
        count = len(unpack(asked.blocks))
        self.loaded += count * (asked.kind == "load")
        self.saved += count * (asked.kind == "save")
        state = self.core.epoch_state
        assert state is not None
        report = self.ledger.finish(state.steps.epoch, asked.number, failed=False)
        assert report is not None
        self.turns.append(report)

    def _hear(self, output: Output) -> None:
        match output:
            case SendPlan(plan):
                self.turns.append(plan)
            case SendStoreRequest(request):
                self.turns.append(StoreReplied(request, self._reply(request)))
            case ReleaseLease(release):
                self.store.release(release)
            case SendTokens(_, batch):
                for entry in batch.entries:
                    self.tokens.setdefault(entry.request, []).extend(entry.tokens)
            case SendHandOver(_, request):
                self.handed.append(request)

    def _reply(self, request: KvStoreRequest) -> KvStoreReply:
        match request:
            case Attach():
                return self.store.attach(request)
            case Find():
                return self.store.find(request)
            case FindAny():
                return self.store.find_any(request)
            case Reserve():
                return self.store.reserve(request)
            case Commit():
                return self.store.commit(request)


def right(model: TinyModel, tokens: list[int], said: list[int]) -> list[int]:
    """What the library would say after the prompt and each beginning of what was said: in one pass, it is quick."""
    chosen: list[int] = model.logits(tokens + said[:-1])[len(tokens) - 1 :].argmax(-1).tolist()
    return chosen


def asked(name: str, tokens: list[int], **more: Any) -> GenerateRequest:
    request = generate(name, tokens, max_tokens=OUTPUT, ignore_eos=True, **more)
    return replace(request, generation=replace(request.generation, sampling=GREEDY))


def assert_handed_over(
    prefill: RealEngine, decode: RealEngine, model: TinyModel, prompts: dict[str, list[int]]
) -> None:
    """Every one of `prompts` is handed over, and both engines together say what `transformers` says."""
    for name, tokens in prompts.items():
        prefill.send(asked(name, tokens, decode_on=EngineId("decode")))
    prefill.run()
    assert [request.generation.request for request in prefill.handed] == list(prompts)
    for request in prefill.handed:
        decode.send(request)
    decode.run()
    for name, tokens in prompts.items():
        said = prefill.tokens[name] + decode.tokens[name]
        assert len(said) == OUTPUT
        assert said == right(model, tokens, said)
