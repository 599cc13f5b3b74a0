"""Requests in, tokens out: the scheduler's and the worker's shells over a bus, with a simulated device."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.scheduler.core.limits import EngineLimits
from services.worker.actor import RankOutOfSync
from services.worker.backend import Backend, run_step
from services.worker.sim.backend import SimBackend, SimStep
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, DetokenizerId, Incarnation, InstanceId, RequestId, new_incarnation
from shared.messages.gateway import RequestFailed
from shared.messages.generation import SamplingOptions
from shared.messages.lifecycle import Drain, EngineHealth, Lifecycle, WorkerReport
from shared.messages.scheduler import (
    Cancel,
    OutlierReport,
    Probe,
    ProbeReply,
    StepFinished,
    StepMissed,
    StopMatched,
    TokenBatchLost,
)
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from shared.protocol import PROTOCOL
from tests.support.cluster.stall_proof_clock import StallProofClock
from tests.support.engines.checking_worker import DETOKENIZER, generate
from tests.support.engines.engine_on_a_bus import ENGINE, EngineOnABus, engine_on_a_bus, make_model, sim_backend
from tests.support.settled import settled

PROMPT = list(range(2, 22))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


async def test_requests_go_in_and_every_token_comes_out_in_order(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        names = [f"r{i}" for i in range(20)]
        for i, name in enumerate(names):
            await engine.generate(generate(name, PROMPT[: i + 1], max_tokens=30))
        await engine.finished(*names)
        outputs = [engine.notes.output_of(name) for name in names]
        assert all(output == outputs[0] for output in outputs), "equal seeds say the same"
        assert len(outputs[0]) == 30
        for name in names:
            positions = [e.position for e in engine.notes.entries if e.request == name]
            assert positions == list(range(30))
        assert engine.notes.numbers == list(range(len(engine.notes.numbers)))
        assert engine.notes.final == []
        assert len(set(engine.free_blocks)) == 1


async def test_the_engine_is_ready_only_when_every_rank_is(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model, kv_memory_bytes=2**20), rank=0, world_size=2)
        await engine.until(
            lambda: (
                engine.notes.lives.get(f"{ENGINE}-rank0") is not None
                and engine.notes.lives[f"{ENGINE}-rank0"].phase == "ready"
            ),
            "rank 0 is ready",
        )
        await settled()
        assert engine.scheduler.target_phase() == "starting"
        engine.add_worker(lambda: sim_backend(model, kv_memory_bytes=2**19), rank=1, world_size=2)
        await engine.ready()
        assert engine.free_blocks == (128, 128), "the least that any rank has"
        await engine.generate(generate("a", PROMPT, max_tokens=5))
        await engine.finished("a")
        assert len(engine.notes.output_of("a")) == 5, "one rank speaks for both"


async def test_before_its_workers_are_there_an_engine_fails_requests_at_once(memory_bus: MemoryBus) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        await engine.until(lambda: ENGINE in engine.notes.lives, "the scheduler is there")
        await engine.generate(generate("a", PROMPT))
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        assert [f.request for f in engine.notes.final] == ["a"]


async def test_a_resumed_attempt_says_what_the_first_would_have_said(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=20))
        await engine.finished("a")
        whole = engine.notes.output_of("a")
        await engine.generate(generate("b", PROMPT, attempt=2, resume=tuple(whole[:7]), max_tokens=20))
        await engine.finished("b", attempt=2)
        assert engine.notes.output_of("b", attempt=2) == whole[7:]
        assert [o.resumed for o in engine.notes.opened] == [0, 7]


async def test_a_killed_worker_fails_its_requests_and_its_successor_serves_them(
    memory_bus: MemoryBus, model: Path
) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        worker = engine.add_worker(lambda: sim_backend(model, step_seconds=0.005))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=400))
        await engine.until(lambda: bool(engine.notes.entries), "the first token")
        await engine.kill(worker)
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        assert engine.scheduler.target_phase() == "starting"
        engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        before = engine.notes.output_of("a")
        await engine.generate(generate("a", PROMPT, attempt=2, resume=tuple(before), max_tokens=400))
        await engine.finished("a", attempt=2)
        assert len(before) + len(engine.notes.output_of("a", attempt=2)) == 400
        assert len(set(engine.free_blocks)) == 1


async def test_a_suspect_is_not_blamed_for_a_rank_that_was_dead_before_it_came(
    memory_bus: MemoryBus, model: Path
) -> None:
    """Two engines are killed at once: what fails at the one comes to the other before that one's death is announced."""
    async with engine_on_a_bus(memory_bus) as engine:
        worker = engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        dead = replace(engine.notes.lives[worker], incarnation=new_incarnation())
        await engine.kill(worker)
        await engine.until(lambda: engine.scheduler.core.epoch is None, "the scheduler hears of it")
        await memory_bus.publish(topics.rank_lifecycles(ENGINE), dead)  # of its successor, no more is left than this
        await engine.ready()
        state = engine.scheduler.core.epoch_state
        assert state is not None
        await engine.generate(generate("s", PROMPT, suspect_until=3))
        await engine.until(lambda: bool(state.plans_in_flight), "a plan that nobody takes")
        await memory_bus.publish(topics.rank_lifecycles(ENGINE), replace(dead, phase="failed"))
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        (failed,) = engine.notes.final
        assert isinstance(failed, RequestFailed)
        assert (failed.reason, failed.death) == (f"worker {worker}: failed", None)


async def test_cancel_stop_match_and_a_lost_detokenizer_free_everything(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.001))
        await engine.ready()
        for name in "abc":
            await engine.generate(generate(name, PROMPT, max_tokens=450))
        await engine.until(lambda: len(engine.notes.opened) == 3, "all run")
        control = topics.engine_control(ENGINE)
        await memory_bus.publish(control, Cancel(RequestId("a"), Attempt(1)))
        await memory_bus.publish(control, StopMatched(RequestId("b"), Attempt(1)))
        await memory_bus.publish(control, TokenBatchLost(DETOKENIZER))
        await engine.until(lambda: bool(engine.notes.final), "the third fails")
        await engine.until(lambda: engine.scheduler.is_idle(), "nothing is held")
        assert [f.request for f in engine.notes.final] == ["c"]
        assert len(set(engine.free_blocks)) == 1


async def test_a_probe_is_answered(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus, EngineLimits(max_running=1)) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.005))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=300))
        await engine.generate(generate("b", PROMPT, max_tokens=300))
        await engine.until(lambda: bool(engine.notes.entries), "the first token")

        async def ask(request: str) -> ProbeReply:
            question = Probe(RequestId(request), Attempt(1))
            reply = await memory_bus.request(topics.engine_probes(ENGINE), question, ProbeReply, 60)
            assert isinstance(reply, ProbeReply)
            return reply

        answer = await ask("a")
        assert (answer.state, answer.produced >= 1) == ("running", True)
        assert await ask("b") == ProbeReply("waiting", 0)
        assert await ask("c") == ProbeReply("unknown", 0)
        for name in "ab":
            await memory_bus.publish(topics.engine_control(ENGINE), Cancel(RequestId(name), Attempt(1)))
        await engine.until(lambda: engine.scheduler.is_idle(), "nothing is held")


async def test_a_draining_engine_finishes_what_it_has(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.001))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=50))
        await engine.until(lambda: bool(engine.notes.entries), "the first token")
        await memory_bus.publish(topics.instance_control(InstanceId(ENGINE)), Drain())
        await engine.until(lambda: engine.notes.lives[ENGINE].phase == "draining", "it drains")
        await engine.finished("a")
        assert len(engine.notes.output_of("a")) == 50


class DroppingBus(MemoryBus):
    """Loses the messages that a test tells it to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.liveness_now = StallProofClock()  # type: ignore[method-assign]
        self.lose: type | None = None
        self.lost = 0

    async def publish(self, topic, message, *, confirm=False):  # type: ignore[no-untyped-def]
        if self.lose is not None and isinstance(message, self.lose):
            self.lose = None
            self.lost += 1
            return
        await super().publish(topic, message, confirm=confirm)


@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_a_lost_plan_is_sent_again_and_no_request_notices(model: Path, run_ahead: int) -> None:
    """With run_ahead 0 nothing follows that would show the gap; the worker's reports do."""
    bus = DroppingBus()
    async with engine_on_a_bus(bus, EngineLimits(run_ahead=run_ahead)) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.001))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=400))
        await engine.until(lambda: bool(engine.notes.entries), "the first token")
        bus.lose = StepPlan
        await engine.finished("a")
        assert bus.lost == 1
        assert len(engine.notes.output_of("a")) == 400
        assert engine.notes.final == []
        assert len(set(engine.free_blocks)) == 1
    await bus.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_a_lost_result_is_noticed_and_the_engine_goes_on(model: Path, run_ahead: int) -> None:
    """With run_ahead 0 nothing follows that would show the gap; the worker's reports do."""
    bus = DroppingBus()
    async with engine_on_a_bus(bus, EngineLimits(run_ahead=run_ahead)) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.001))
        await engine.ready()
        await engine.generate(generate("a", PROMPT, max_tokens=400))
        await engine.until(lambda: bool(engine.notes.entries), "the first token")
        bus.lose = StepFinished
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        assert bus.lost == 1
        before = engine.notes.output_of("a")
        await engine.generate(generate("a", PROMPT, attempt=2, resume=tuple(before), max_tokens=400))
        await engine.finished("a", attempt=2)
        assert len(set(engine.free_blocks)) == 1
    await bus.close()


async def test_a_worker_says_which_plan_never_came(memory_bus: MemoryBus, model: Path) -> None:
    said: list[object] = []

    async def note(message: object) -> None:
        said.append(message)

    await memory_bus.subscribe(topics.engine_results(ENGINE), note)
    engine = EngineOnABus(memory_bus)
    worker = engine.add_worker(lambda: sim_backend(model))
    steps = topics.engine_steps(ENGINE)
    epoch, other = Incarnation(5), Incarnation(6)
    actor = engine.runtimes[worker][0].actor
    await engine.until(lambda: actor.worker_report() is not None, "the backend is loaded")
    await memory_bus.publish(steps, StepPlan(epoch=epoch, step=0))
    await engine.until(lambda: len(said) == 1, "the first step is computed")
    await memory_bus.publish(steps, StepPlan(epoch=epoch, step=0))
    await memory_bus.publish(steps, StepPlan(epoch=epoch, step=2))
    await memory_bus.publish(steps, StepPlan(epoch=other, step=1))
    await memory_bus.publish(steps, StepPlan(epoch=other, step=0))
    await engine.until(lambda: len(said) == 4, "every plan is answered once, but the repeated one")
    missed = [m for m in said if isinstance(m, StepMissed)]
    assert missed == [
        StepMissed(worker=InstanceId(worker), epoch=epoch, expected=1),
        StepMissed(worker=InstanceId(worker), epoch=other, expected=0),
    ]
    finished = {(m.epoch, m.step) for m in said if isinstance(m, StepFinished)}
    assert finished == {(epoch, 0), (other, 0)}
    runtime, task = engine.runtimes[worker]
    runtime.stop()
    await task


async def test_a_rank_of_several_that_missed_a_plan_ends(memory_bus: MemoryBus, model: Path) -> None:
    """Where the plan does not come and a new epoch begins instead: the others may wait for it inside that step."""
    engine = EngineOnABus(memory_bus)
    worker = engine.add_worker(lambda: sim_backend(model), rank=1, world_size=2)
    runtime, task = engine.runtimes[worker]
    await engine.until(lambda: runtime.actor.worker_report() is not None, "the backend is loaded")
    for epoch, step in ((1, 1), (1, 0), (1, 2), (2, 0)):
        await memory_bus.publish(topics.engine_steps(ENGINE), StepPlan(epoch=Incarnation(epoch), step=step))
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(task, 60)
    assert raised.group_contains(RankOutOfSync, match="step 1 of epoch 1 never came")


async def test_plans_that_nobody_takes_fail_their_requests(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        worker = InstanceId("engine-1-rank0")
        backend = sim_backend(model)
        report = WorkerReport(
            engine=ENGINE, rank=0, world_size=1, model=backend.card, num_blocks=8, device="a device that is gone"
        )
        life = Lifecycle(
            service="worker",
            instance=worker,
            incarnation=Incarnation(1),
            phase="ready",
            pid=1,
            host="h",
            started=0.0,
            protocol=PROTOCOL,
            worker=report,
        )
        await engine.until(lambda: ENGINE in engine.notes.lives, "the scheduler is there")
        await memory_bus.publish(topics.rank_lifecycles(ENGINE), life)
        await engine.ready()
        await engine.generate(generate("a", PROMPT))
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        assert engine.notes.final == [RequestFailed(RequestId("a"), Attempt(1), "no worker takes plans")]
        assert engine.scheduler.target_phase() == "starting"


async def test_tokens_that_no_detokenizer_takes_fail_their_request(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus) as engine:
        engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        nobody = DetokenizerId("detokenizer-9")
        await engine.generate(generate("a", PROMPT, detokenizer=nobody))
        await engine.generate(generate("b", PROMPT, max_tokens=5))
        await engine.finished("b")
        assert engine.notes.final == [RequestFailed(RequestId("a"), Attempt(1), "its detokenizer was lost")]
        assert len(set(engine.free_blocks)) == 1


class Broken(SimBackend):
    def prepare(self, plan: StepPlan) -> SimStep:
        raise ArithmeticError("the device burns")


async def test_a_compute_error_ends_the_worker(memory_bus: MemoryBus, model: Path) -> None:
    def broken() -> Backend:
        backend = sim_backend(model)
        assert isinstance(backend, SimBackend)
        return Broken(backend.card, backend.num_blocks, None, [2], "sim")

    async with engine_on_a_bus(memory_bus) as engine:
        worker = engine.add_worker(broken)
        await engine.ready()
        await engine.generate(generate("a", PROMPT))
        _, task = engine.runtimes.pop(worker)
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(task, 60)
        assert raised.group_contains(ArithmeticError, match="the device burns")
        await engine.until(lambda: bool(engine.notes.final), "the request fails")
        assert engine.notes.lives[worker].phase == "failed"


class Wedged(SimBackend):
    def prepare(self, plan: StepPlan) -> SimStep:
        time.sleep(10.0)
        return super().prepare(plan)


async def test_a_step_that_does_not_end_ends_the_scheduler(memory_bus: MemoryBus, model: Path) -> None:
    def wedged() -> Backend:
        backend = sim_backend(model)
        assert isinstance(backend, SimBackend)
        return Wedged(backend.card, backend.num_blocks, None, [2], "sim")

    async with engine_on_a_bus(memory_bus, EngineLimits(step_timeout=0.05)) as engine:
        engine.add_worker(wedged)
        await engine.ready()
        await engine.generate(generate("a", PROMPT))
        _, task = engine.runtimes.pop(ENGINE)
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await asyncio.wait_for(task, 60)
        assert [f.request for f in engine.notes.final] == ["a"]
        assert engine.notes.lives[ENGINE].phase == "failed"


def test_simulated_tokens_depend_on_seed_and_position_only(model: Path) -> None:
    def tokens(seed: int, batch: int, logprobs: int | None = None) -> list[int]:
        backend = sim_backend(model)
        new = [
            NewSequence(
                sequence=i,  # type: ignore[arg-type]
                tokens=pack(PROMPT),
                prompt_length=20,
                computed=0,
                blocks=b"",
                sampling=SamplingOptions(seed=seed + i, logprobs=logprobs),
            )
            for i in range(batch)
        ]
        work = [SequenceWork(n.sequence, 20, pack([2 * i, 2 * i + 1]), True) for i, n in enumerate(new)]
        output = run_step(backend, StepPlan(epoch=Incarnation(1), step=0, new=tuple(new), work=tuple(work)))
        said = [output.sampled[0].tokens[0]]
        for step in range(1, 8):
            plan = StepPlan(epoch=Incarnation(1), step=step, work=(SequenceWork(new[0].sequence, 1, b"", True),))
            said.append(run_step(backend, plan).sampled[0].tokens[0])
        return said

    assert tokens(7, 1) == tokens(7, 3)
    assert tokens(7, 1) != tokens(8, 1)
    assert set(tokens(7, 1)) <= set(range(2, 32)), "no special token"


async def test_an_engine_that_is_told_that_requests_fail_says_so_to_everybody(
    memory_bus: MemoryBus, model: Path
) -> None:
    limits = EngineLimits(canary_interval=60.0, ejection_time=1.0)
    async with engine_on_a_bus(memory_bus, limits) as engine:
        engine.add_worker(lambda: sim_backend(model))
        await engine.until(lambda: engine.scheduler.core.serves, "the engine is ready")
        assert engine.scheduler.core.snapshot().counters.canaries == 2, "the right answer is known before it is ready"
        await memory_bus.publish(topics.engine_control(ENGINE), OutlierReport("9 of 9 requests failed"))
        await engine.until(lambda: health(engine).suspect == "9 of 9 requests failed", "it says so")
        await engine.until(lambda: health(engine) == EngineHealth(ejections=1), "it is taken back")
        assert engine.notes.entries == []
        assert engine.notes.final == []


def health(engine: EngineOnABus) -> EngineHealth:
    report = engine.notes.lives[ENGINE].engine
    return EngineHealth() if report is None or report.health is None else report.health


async def test_coordinators_are_told_at_once_when_nothing_waits_any_more(memory_bus: MemoryBus, model: Path) -> None:
    async with engine_on_a_bus(memory_bus, EngineLimits(max_running=2)) as engine:
        engine.add_worker(lambda: sim_backend(model, step_seconds=0.005))
        await engine.ready()
        told: list[int] = []
        publish = engine.scheduler.publish_lifecycle

        async def noted() -> None:  # heartbeats go another way
            report = engine.scheduler.engine_report()
            assert report is not None
            told.append(report.waiting)
            await publish()

        engine.scheduler.publish_lifecycle = noted
        await engine.generate(generate("alone", PROMPT, max_tokens=5))
        await engine.finished("alone")
        assert told == [], "nothing has waited"
        names = [f"r{i}" for i in range(6)]
        for name in names:
            await engine.generate(generate(name, PROMPT, max_tokens=30))
        await engine.finished(*names)
        assert told
        assert set(told) == {0}
