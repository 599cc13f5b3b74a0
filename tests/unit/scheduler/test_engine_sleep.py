"""What ranks say of their sleep is compared with the wish, and they are told until both agree."""

from __future__ import annotations

from services.scheduler.engine_sleep import EngineSleep
from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase, SleepReport
from shared.messages.scheduler import SleepState
from shared.messages.worker import RankOrder, SleepLevel, SleepRank, WakeRank


def rank(number: int, asleep: SleepLevel | None = None, phase: Phase = "starting") -> Lifecycle:
    return Lifecycle(
        service="worker",
        instance=InstanceId(f"rank-{number}"),
        incarnation=Incarnation(1),
        phase=phase,
        pid=1,
        host="h",
        started=0,
        sleep=None if asleep is None else SleepReport(asleep),
    )


def told(sleep: EngineSleep, *lives: Lifecycle) -> list[RankOrder | None]:
    return [sleep.record_lifecycle(life) for life in lives]


def test_an_engine_is_asleep_once_all_its_ranks_are() -> None:
    sleep = EngineSleep()
    assert told(sleep, rank(0, phase="ready"), rank(1, phase="ready")) == [None, None]
    assert sleep.decide(1) == SleepRank(1)
    assert sleep.state(2, serves=False) == SleepState(1, 2)
    assert told(sleep, rank(0, phase="stopped"), rank(0, 1)) == [None, None]
    assert sleep.state(2, serves=False) == SleepState(1, 1)
    assert told(sleep, rank(1, phase="ready")) == [SleepRank(1)], "the order was lost"
    assert told(sleep, rank(1, 1)) == [None]
    assert sleep.state(2, serves=False) == SleepState(1, 0)


def test_a_rank_that_dies_asleep_is_put_to_sleep_when_it_has_loaded() -> None:
    sleep = EngineSleep()
    sleep.decide(2)
    told(sleep, rank(0, 2))
    assert told(sleep, rank(0, phase="failed"), rank(0), rank(0, phase="ready")) == [None, None, SleepRank(2)]


def test_those_that_still_sleep_are_woken_again_under_the_same_number() -> None:
    sleep = EngineSleep()
    sleep.decide(1)
    woken = sleep.decide(None)
    assert isinstance(woken, WakeRank)
    assert sleep.decide(None) == woken
    assert told(sleep, rank(0, 1), rank(1), rank(1, phase="ready")) == [woken, None, None]
    assert sleep.state(2, serves=False) == SleepState(None, 1)
    assert sleep.state(2, serves=True) == SleepState(None, 0)
    sleep.decide(1)
    assert sleep.decide(None) != woken, "ranks meet anew"


def test_a_new_scheduler_takes_over_the_sleep_that_it_finds() -> None:
    sleep = EngineSleep()
    assert told(sleep, rank(0, 2), rank(1, phase="ready")) == [None, SleepRank(2)]
    assert sleep.report(None) == SleepReport(2)
    sleep = EngineSleep()
    woken = sleep.decide(None)
    assert told(sleep, rank(0, 2)) == [woken], "but not where it was told to wake up"


def test_a_deeper_sleep_is_told_to_those_that_sleep() -> None:
    sleep = EngineSleep()
    told(sleep, rank(0, 1))
    sleep.decide(2)
    assert told(sleep, rank(0, 1), rank(0, 2)) == [SleepRank(2), None]
