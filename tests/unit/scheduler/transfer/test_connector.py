"""What the engine asks of a KV connector, and whose the blocks are meanwhile, event by event."""

from __future__ import annotations

import pytest

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    ConnectorKeeps,
    ConnectorLookUp,
    ConnectorMatched,
    ConnectorReport,
    ConnectorRequestFinished,
    Event,
    Output,
    SendPlan,
    TimePassed,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import ConnectorUse, EngineLimits, EngineRole
from services.scheduler.core.transfer.connector import LOAD_TIMEOUT, OVERLAP_PAUSE
from shared.blocks import hash_chain
from shared.ids import EngineId, Incarnation, NodeId
from shared.messages.kvstore import LeaseOwner
from shared.messages.scheduler import Cancel, TransferProgress
from shared.messages.worker import ConnectorPlan, StepPlan
from shared.packing import pack, unpack
from tests.support.engines.checking_worker import HonestWorker, card, generate, right_output

PROMPT = [5 + i % 17 for i in range(37)]
HASHES = hash_chain(pack(PROMPT), None, 16)
BLOCKS = 32


class Engine:
    def __init__(self, use: ConnectorUse, ranks: int = 1, *, layerwise: bool = False) -> None:
        limits = EngineLimits(run_ahead=0, plan_late=False)
        self.core = EngineCore(EngineId("e"), Incarnation(1), limits, EngineRole(connector=use))
        self.worker = HonestWorker(BLOCKS, ranks=ranks)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.send(WorkersReady(card(256), BLOCKS, world_size=ranks, layerwise_loads=layerwise))

    def send(self, event: Event, seconds: float = 0.001) -> list[Output]:
        self.now += seconds
        outputs = self.core.handle(event, self.now)
        check(self.core)
        self.plans += [output.plan for output in outputs if isinstance(output, SendPlan)]
        return outputs

    def step(self) -> list[Output]:
        return self.send(self.worker.step(self.plans.pop(0)))

    def finish(self) -> list[Output]:
        """Computes until nothing is planned."""
        outputs: list[Output] = []
        while self.plans:
            outputs += self.step()
        return outputs

    def report(self, *early: int, done: int = 0, failed: tuple[int, ...] = (), rank: int = 0) -> list[Output]:
        return self.send(TransferProgress(rank=rank, epoch=Incarnation(1), done=done, failed=failed, early=early))

    @property
    def free(self) -> int:
        report = self.core.report()
        assert report is not None
        return report.blocks_free

    @property
    def phases(self) -> list[str]:
        return [sequence.phase for sequence in self.core.requests.values()]

    def planned(self) -> ConnectorPlan:
        (plan,) = [plan.connector for plan in self.plans if plan.connector is not None]
        return plan


def only(outputs: list[Output], kind: type) -> list[Output]:
    return [output for output in outputs if isinstance(output, kind)]


CONSUMER = ConnectorUse(loads=True, saves=False)
PRODUCER = ConnectorUse(loads=False, saves=True)


def looked_up(engine: Engine, name: str = "r") -> ConnectorLookUp:
    (asked,) = only(engine.send(generate(name, PROMPT, max_tokens=2, ignore_eos=True)), ConnectorLookUp)
    assert isinstance(asked, ConnectorLookUp)
    return asked


def test_a_request_is_looked_up_when_it_arrives_and_nobody_waits_with_it() -> None:
    engine = Engine(CONSUMER)
    asked = looked_up(engine)
    assert (asked.request, unpack(asked.tokens), asked.num_computed_tokens) == ("r-1", PROMPT, 0)
    assert asked.hashes == b"".join(HASHES)
    assert engine.phases == ["seeking"]
    engine.send(ConnectorMatched(asked.lease, 0))
    assert engine.phases == ["decoding"]
    assert engine.plans[0].connector is None


def test_what_is_matched_is_loaded_in_whole_blocks_and_no_more_than_there_are() -> None:
    engine = Engine(CONSUMER)
    engine.send(ConnectorMatched(looked_up(engine).lease, 10**6))
    (load,) = engine.planned().loads
    assert (load.run.request, load.run.first, load.run.hashes) == ("r-1", 0, b"".join(HASHES))
    assert engine.phases == ["loading"]
    engine.step()
    outputs = engine.report(done=1)
    assert only(outputs, ConnectorReport) == [ConnectorReport("r-1", "received")]
    assert engine.plans[0].new[0].computed == 32
    assert engine.core.counters.blocks_loaded == 2


def test_only_when_every_rank_has_reported_a_load_is_it_used_in_whatever_order_they_do() -> None:
    engine = Engine(CONSUMER, ranks=2)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        (asked,) = only(engine.send(generate(name, prompt, max_tokens=1)), ConnectorLookUp)
        assert isinstance(asked, ConnectorLookUp)
        engine.send(ConnectorMatched(asked.lease, 32))
        engine.step()
    engine.report(1, rank=0)
    assert engine.phases == ["loading", "loading"]
    engine.report(1, rank=1)
    assert engine.phases == ["loading", "decoding"], "the second load is over before the first"
    engine.report(rank=0, done=2)
    engine.report(rank=1, done=2)
    assert "loading" not in engine.phases
    assert not engine.core.epoch_state or not engine.core.epoch_state.transfers.copies.in_flight


def test_a_load_that_fails_is_computed() -> None:
    engine = Engine(CONSUMER)
    engine.send(ConnectorMatched(looked_up(engine).lease, 32))
    engine.step()
    assert only(engine.report(done=1, failed=(0,)), ConnectorReport) == [ConnectorReport("r-1", "failed")]
    assert engine.plans[0].new[0].computed == 0
    assert engine.core.counters.loads_failed == 1


def test_a_load_that_never_ends_is_computed_into_other_blocks_and_nothing_more_is_asked() -> None:
    engine = Engine(CONSUMER)
    engine.send(ConnectorMatched(looked_up(engine).lease, 32))
    engine.step()
    engine.send(TimePassed(), LOAD_TIMEOUT + 1)
    new = engine.plans[0].new[0]
    assert (engine.phases, new.computed) == (["decoding"], 0)
    engine.finish()
    assert engine.free == BLOCKS - 2, "a rank may still write to the load's blocks"
    assert not only(engine.send(generate("next", PROMPT[::-1], max_tokens=1)), ConnectorLookUp)
    engine.finish()
    engine.report(done=1)
    assert engine.free == BLOCKS
    assert only(engine.send(generate("last", [3, *PROMPT], max_tokens=1)), ConnectorLookUp)


def test_what_a_plan_fills_is_named_in_that_plan_and_kept_until_it_is_saved() -> None:
    engine = Engine(PRODUCER)
    assert not only(engine.send(generate("r", PROMPT, max_tokens=2, ignore_eos=True)), ConnectorLookUp)
    planned = engine.planned()
    (run,) = planned.saves
    assert (run.request, run.first, run.hashes, len(unpack(run.blocks))) == ("r-1", 0, b"".join(HASHES), 2)
    assert engine.plans[0].work[0].count == 37, "the blocks are computed by this very plan"
    engine.finish()
    assert engine.free == BLOCKS - 2
    engine.report(done=1)
    assert engine.free == BLOCKS
    assert engine.core.counters.blocks_saved == 2
    engine.send(generate("same", PROMPT, max_tokens=1))
    assert all(plan.connector is None for plan in engine.plans), "a block that is cached is not saved again"


def test_blocks_of_an_ended_request_are_kept_until_the_connector_has_sent_them() -> None:
    engine = Engine(ConnectorUse(loads=False, saves=True, keeps=True))
    engine.send(generate("r", PROMPT, max_tokens=1))
    (finished,) = only(engine.finish(), ConnectorRequestFinished)
    assert isinstance(finished, ConnectorRequestFinished)
    assert (finished.request, len(finished.blocks)) == ("r-1", 3)
    engine.report(done=1)
    assert engine.free == BLOCKS - 3
    engine.send(ConnectorKeeps(finished.lease, True))
    (send,) = engine.planned().sends
    engine.finish()
    assert engine.free == BLOCKS - 3
    assert only(engine.report(done=send.number + 1), ConnectorReport) == [ConnectorReport("r-1", "sent")]
    assert engine.free == BLOCKS


def test_blocks_that_the_connector_does_not_keep_are_free_at_once() -> None:
    engine = Engine(ConnectorUse(loads=False, saves=True, keeps=True))
    engine.send(generate("r", PROMPT, max_tokens=1))
    (finished,) = only(engine.finish(), ConnectorRequestFinished)
    assert isinstance(finished, ConnectorRequestFinished)
    engine.report(done=1)
    engine.send(ConnectorKeeps(finished.lease, False))
    assert engine.free == BLOCKS


def test_a_connector_that_never_finishes_holds_a_quarter_of_memory_at_most() -> None:
    engine = Engine(PRODUCER)
    for number in range(8):
        engine.send(generate(f"r{number}", [number] * 37, max_tokens=1))
        engine.finish()
    assert engine.free >= BLOCKS * 3 // 4
    assert engine.core.counters.blocks_unsaved > 0


def test_a_connector_beside_a_store_or_a_role_that_hands_over_is_refused() -> None:
    owner = LeaseOwner("e", Incarnation(1))
    with pytest.raises(ValueError, match="takes the place of the KV store"):
        EngineRole("mixed", NodeId("n"), owner, CONSUMER)
    with pytest.raises(ValueError, match="hand nothing over"):
        EngineRole("prefill", connector=CONSUMER)


LONG = [5 + i % 13 for i in range(90)]
"""Of which the connector has two blocks."""


def matched(engine: Engine, name: str, prompt: list[int], tokens: int = 32, *, awaited: bool = False) -> StepPlan:
    """A request comes and something of it is matched; the plan that loads it, computed by nobody."""
    (asked,) = only(engine.send(generate(name, prompt, max_tokens=2, ignore_eos=True)), ConnectorLookUp)
    assert isinstance(asked, ConnectorLookUp)
    engine.send(ConnectorMatched(asked.lease, tokens, awaited))
    (plan,) = engine.plans
    assert plan.connector is not None
    for load in plan.connector.loads:
        engine.worker.load(unpack(load.run.blocks), load.run.first, prompt)
    return plan


def measured(load_seconds: float = 1e-6, *, layerwise: bool = True) -> Engine:
    engine = Engine(ConnectorUse(), layerwise=layerwise)
    assert engine.core.epoch_state is not None
    engine.core.epoch_state.transfers.costs.record_load(1, load_seconds, engine.now)
    return engine


def test_a_plan_computes_behind_what_it_loads_and_draws_only_when_that_is_there() -> None:
    engine = measured()
    plan = matched(engine, "r", LONG)
    assert plan.connector is not None
    assert [load.overlapped for load in plan.connector.loads] == [True]
    (work,), (new,) = plan.work, plan.new
    assert (new.computed, work.count, work.sample) == (32, 57, False), "all but the last token"
    engine.step()
    assert not engine.plans
    assert engine.phases == ["loading"]
    assert len(engine.core.epoch_state.memory.index.block_of) == 0  # type: ignore[union-attr]
    outputs = engine.report(done=1)
    assert only(outputs, ConnectorReport) == [ConnectorReport("r-1", "received")]
    (plan,) = engine.plans
    assert (plan.new, [(w.count, w.sample) for w in plan.work]) == ((), [(1, True)])
    (saves,) = engine.planned().saves
    assert (saves.first, len(unpack(saves.blocks))) == (2, 3), "those that were computed behind the load"
    engine.finish()
    assert engine.core.counters.cached_tokens == 32
    assert not engine.core.requests


@pytest.mark.parametrize("hangs", [False, True])
def test_what_was_computed_behind_a_load_that_fails_or_hangs_is_computed_again(hangs: bool) -> None:
    engine = measured()
    matched(engine, "r", LONG)
    engine.step()
    if hangs:
        engine.send(TimePassed(), LOAD_TIMEOUT + 1)
    else:
        engine.report(done=1, failed=(0,))
    (plan,) = engine.plans
    assert (len(plan.released), plan.new[0].computed) == (1, 0)
    assert (plan.work[0].count, plan.work[0].sample) == (90, True)
    engine.finish()
    assert not engine.core.requests
    engine.report(done=2)
    assert engine.free == BLOCKS
    assert engine.core.counters.cached_tokens == 0
    plan = matched(engine, "next", LONG[::-1])
    assert not plan.work, "for a while nothing is computed behind loads"
    engine.step()
    engine.report(done=3)
    engine.finish()
    engine.report(done=4)
    engine.now += OVERLAP_PAUSE
    assert matched(engine, "last", [2, *LONG]).work


def test_a_request_that_ends_beside_its_load_leaves_its_blocks_to_the_load() -> None:
    engine = measured()
    request = generate("r", LONG)
    matched(engine, "r", LONG)
    engine.step()
    engine.send(Cancel(request.generation.request, request.generation.attempt))
    engine.finish()
    assert engine.free == BLOCKS - 2
    engine.report(done=1)
    assert engine.free == BLOCKS
    assert len(engine.core.epoch_state.memory.index.block_of) == 2, "only what was loaded"  # type: ignore[union-attr]


def test_others_share_what_was_loaded_and_computed_behind_it() -> None:
    engine = measured()
    matched(engine, "r", LONG)
    engine.step()
    engine.report(done=1)
    engine.finish()
    same = generate("same", LONG, max_tokens=2, ignore_eos=True)
    engine.send(same)
    assert engine.plans[0].new[0].computed == 80
    engine.finish()
    assert right_output(same, 256)[1] == "length"


@pytest.mark.parametrize("why", ["slow", "unmeasured", "awaited", "model-wise", "short"])
def test_nothing_is_computed_behind_a_load_that_would_hold_up_the_step(why: str) -> None:
    if why == "unmeasured":
        engine = Engine(ConnectorUse(), layerwise=True)
    else:
        engine = measured(1.0 if why == "slow" else 1e-6, layerwise=why != "model-wise")
    if why == "slow":
        assert engine.core.epoch_state is not None
        engine.core.epoch_state.transfers.costs.record_step(256, 1.0)
        engine.now += 60.0  # a load that was slow long ago keeps none from being tried
    plan = matched(engine, "r", LONG[:45] if why == "short" else LONG, awaited=why == "awaited")
    assert not plan.work
