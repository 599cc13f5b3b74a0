"""Whoever lives and does nothing is found: engines by their steps, everybody by silence."""

from __future__ import annotations

from msgspec.structs import replace

from deploy.supervisor.core.watchdog import (
    FAULTS_UNTIL_RESTART,
    RESTART_PAUSE,
    PauseFreeClock,
    Stall,
    Watchdog,
    WatchLimits,
)
from shared.ids import EngineId, Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import EngineHealth, EngineReport, Lifecycle, Phase, WorkerReport
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import PauseMode

CARD = ModelCard(name=ModelName("m"), max_model_len=8, vocab_size=8, eos_token_ids=(), dtype="float32", created=0)


def said(
    *,
    steps: int = 0,
    running: int = 0,
    waiting: int = 0,
    phase: Phase = "ready",
    incarnation: int = 1,
    step_deadline: float = 0.0,
    faults: int = 0,
    engine: str = "engine-1",
    paused: PauseMode | None = None,
) -> Lifecycle:
    report = EngineReport(
        model=CARD,
        waiting=waiting,
        running=running,
        max_waiting=8,
        max_running=8,
        blocks_total=8,
        blocks_free=8,
        steps=steps,
        tokens=0,
        step_deadline=step_deadline,
        health=EngineHealth(suspect="canary: wrong" if faults else None, faults=faults),
        paused=paused,
    )
    return Lifecycle(
        service="scheduler",
        instance=InstanceId(engine),
        incarnation=Incarnation(incarnation),
        phase=phase,
        pid=1,
        host="h",
        started=0,
        engine=report,
    )


def watched(*messages: tuple[float, Lifecycle]) -> Watchdog:
    dog = Watchdog(WatchLimits(step=60, silence=15))
    for at, message in messages:
        dog.record_lifecycle(message, at)
    return dog


def reasons(dog: Watchdog, now: float) -> list[str]:
    return [stall.reason for stall in dog.stalled(now)]


def every_second(last: int, **what: int) -> list[tuple[float, Lifecycle]]:
    return [(float(second), said(**what)) for second in range(last + 1)]


def test_an_engine_that_has_work_and_makes_no_step_is_found_once() -> None:
    dog = watched(*every_second(61, steps=5, running=1))
    assert reasons(dog, 60.0) == []
    assert reasons(dog, 61.0) == ["work in hand and no step for 60 s"]
    assert reasons(dog, 62.0) == []


def test_an_engine_whose_scheduler_allows_long_steps_is_given_them() -> None:
    dog = Watchdog(WatchLimits(step=60, silence=15))
    for second in range(302):
        dog.record_lifecycle(said(steps=5, running=1, step_deadline=200.0), float(second))
    assert reasons(dog, 300.0) == []
    assert reasons(dog, 301.0) == ["work in hand and no step for 300 s"]


def test_waiting_requests_are_work_too() -> None:
    assert reasons(watched(*every_second(61, steps=5, waiting=1)), 61.0)


def test_an_idle_engine_may_stand_still_for_ever() -> None:
    assert reasons(watched(*every_second(500, steps=5)), 500.0) == []


def test_a_paused_engine_may_stand_still_with_work_in_hand() -> None:
    paused = [(float(second), said(steps=5, running=1, paused="all")) for second in range(501)]
    dog = watched(*paused, (501.0, said(steps=5, running=1)), (559.0, said(steps=5, running=1)))
    assert reasons(dog, 559.0) == []
    assert reasons(watched(*paused, *((float(at), said(steps=5, running=1)) for at in (501, 562))), 562.0)


def test_steps_are_progress() -> None:
    slow = [(float(second), said(steps=second // 50, running=1)) for second in range(500)]
    assert reasons(watched(*slow), 499.0) == []


def test_work_that_arrives_after_an_idle_time_gets_its_whole_time() -> None:
    dog = watched(*every_second(500, steps=5), (501.0, said(steps=5, running=1)), (559.0, said(steps=5, running=1)))
    assert reasons(dog, 559.0) == []


def test_an_engine_that_waits_for_its_ranks_is_not_blamed() -> None:
    waiting = [(float(second), said(phase="starting", running=1)) for second in range(120)]
    assert reasons(watched(*waiting), 119.0) == []


def test_a_new_process_starts_afresh() -> None:
    dog = watched((0, said(running=1)), (59, said(running=1, incarnation=2)), (100, said(running=1, incarnation=2)))
    assert reasons(dog, 100.0) == []


def test_silence_after_readiness_is_found() -> None:
    dog = watched((0, said()))
    assert reasons(dog, 15.0) == []
    assert reasons(dog, 15.1) == ["silent for 15 s"]


def test_who_was_ready_under_a_former_supervisor_may_not_be_silent() -> None:
    dog = watched()
    dog.expect(InstanceId("engine-1"), 5.0)
    assert reasons(dog, 20.0) == []
    assert reasons(dog, 20.1) == ["silent for 15 s"]
    dog.expect(InstanceId("engine-1"), 30.0)
    dog.record_lifecycle(said(phase="starting", incarnation=2), 31.0)
    assert reasons(dog, 300.0) == [], "another program took its place, and loads a model"


def test_silence_while_a_model_is_loaded_is_not_blamed() -> None:
    assert reasons(watched((0, said(phase="starting"))), 300.0) == []


def test_who_took_leave_may_be_silent() -> None:
    assert reasons(watched((0, said()), (1, said(phase="stopped"))), 300.0) == []


def test_time_that_the_supervisor_itself_stood_still_blames_nobody() -> None:
    clock = PauseFreeClock()
    dog = watched((clock.now(1000.0), said()))
    assert reasons(dog, clock.now(1300.0)) == []
    assert reasons(dog, sum(0.2 for _ in range(80)) + clock.now(1300.0)) == ["silent for 15 s"]


def test_time_in_which_the_bus_stood_still_blames_nobody() -> None:
    clock = PauseFreeClock()
    dog = watched((clock.now(1000.0), said()))
    for tick in range(300):
        assert reasons(dog, clock.now(1000.0 + tick)) == []
    for tick in range(300, 312):
        clock.record_answer()
        assert reasons(dog, clock.now(1000.0 + tick)) == []
    clock.record_answer()
    assert reasons(dog, clock.now(1312.0)) == ["silent for 15 s"]


def test_the_watch_clock_goes_with_the_real_one_while_it_is_looked_at() -> None:
    clock = PauseFreeClock()
    clock.record_answer()
    readings = [clock.now(1000.0 + tick * 0.25) for tick in range(9)]
    assert readings == [tick * 0.25 for tick in range(9)]
    assert clock.now(900.0) == 2.0


# Engines that compute something wrong.


def rank(engine: str, number: int, incarnation: int = 1) -> Lifecycle:
    report = WorkerReport(engine=EngineId(engine), rank=number, world_size=2, model=CARD, num_blocks=8, device="cpu")
    return Lifecycle(
        service="worker",
        instance=InstanceId(f"{engine}-rank{number}"),
        incarnation=Incarnation(incarnation),
        phase="ready",
        pid=1,
        host="h",
        started=0,
        worker=report,
    )


def test_all_ranks_of_an_engine_that_stays_wrong_are_replaced_once() -> None:
    dog = watched((0, rank("engine-1", 0)), (0, rank("engine-1", 1)), (0, rank("engine-2", 0)), (0, said()))
    dog.record_lifecycle(said(faults=FAULTS_UNTIL_RESTART - 1), 0.5)
    assert dog.stalled(0.6) == []
    dog.record_lifecycle(said(faults=FAULTS_UNTIL_RESTART), 1.0)
    why = "engine-1 is suspect: canary: wrong"
    ranks = [InstanceId("engine-1-rank0"), InstanceId("engine-1-rank1")]
    assert dog.stalled(1.1) == [Stall(rank, why, engine_too=False) for rank in ranks]
    dog.record_lifecycle(said(faults=FAULTS_UNTIL_RESTART), 1.5)
    assert dog.stalled(1.6) == [], "they are being replaced"


def test_engines_that_are_wrong_at_once_are_replaced_one_after_the_other() -> None:
    dog = watched()
    replaced = []
    for half in range(int(2 * RESTART_PAUSE) + 4):
        now = half / 2
        for engine in ("engine-1", "engine-2"):
            dog.record_lifecycle(said(faults=FAULTS_UNTIL_RESTART, engine=engine), now)
            dog.record_lifecycle(rank(engine, 0, incarnation=1 + len(replaced)), now)
        replaced += [(now, stall.instance) for stall in dog.stalled(now)]
    assert [when for when, _ in replaced] == [0.0, RESTART_PAUSE]


def test_a_process_that_promised_to_speak_seldom_is_waited_for() -> None:
    quiet = replace(said(), keep_alive=20.0)
    assert reasons(watched((0.0, quiet)), 40.0) == []
    assert reasons(watched((0.0, quiet)), 40.1) == ["silent for 40 s"]
