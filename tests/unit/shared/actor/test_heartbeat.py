"""When a process says again how it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from shared.actor.heartbeat import Heartbeat
from shared.ids import EngineId, Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle, StepSums, WorkerReport
from shared.messages.model_card import ModelCard

CARD = ModelCard(name=ModelName("m"), max_model_len=1, vocab_size=1, eos_token_ids=(), dtype="f", created=0)
RANK = WorkerReport(engine=EngineId("e"), rank=0, world_size=1, model=CARD, num_blocks=1, device="sim")
LIFE = Lifecycle(
    service="worker",
    instance=InstanceId("e-rank0"),
    incarnation=Incarnation(1),
    phase="ready",
    pid=1,
    host="h",
    started=0.0,
    worker=RANK,
)


def said(keep_alive: float, seconds: float, **lateness: float) -> list[float]:
    """When a process that does not change publishes, by looks that come every half second and a little late."""
    beat, at, published = Heartbeat(keep_alive), 0.0, []
    while at < seconds:
        if beat.is_due(replace(LIFE, progress=int(at * 10)), at):
            beat.record_published(LIFE, at)
            published.append(round(at, 1))
        at += HEARTBEAT_SECONDS + lateness.get("late", 0.0)
    return published


def test_what_does_not_change_is_said_as_often_as_promised() -> None:
    assert said(0.5, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert said(1.0, 4.0) == [0.0, 1.0, 2.0, 3.0]
    assert said(5.0, 16.0) == [0.0, 5.0, 10.0, 15.0]


def test_looks_that_come_a_little_late_break_no_promise() -> None:
    times = said(3.0, 60.0, late=0.03)
    assert max(after - before for before, after in pairwise(times)) <= 3.25, "the receiver waits for twice as long"


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ({"load": 1}, True),
        ({"phase": "draining"}, True),
        ({"worker": replace(RANK, received=1)}, True),
        ({"progress": 9}, False),
        ({"worker": replace(RANK, sums=StepSums(paused=3.0))}, False),
    ],
)
def test_what_others_act_on_is_said_at_the_next_look(change: dict[str, Any], due: bool) -> None:
    beat = Heartbeat(10.0)
    beat.record_published(LIFE, 0.0)
    assert beat.is_due(replace(LIFE, **change), 0.5) == due


def test_who_asks_is_told_once() -> None:
    beat = Heartbeat(10.0)
    beat.record_published(LIFE, 0.0)
    beat.request()
    assert beat.is_due(LIFE, 0.5)
    beat.record_published(LIFE, 0.5)
    assert not beat.is_due(LIFE, 1.0)


def test_a_fleet_s_pace_slows_both_down_and_is_promised_at_once() -> None:
    beat = Heartbeat(1.0)
    beat.record_published(LIFE, 0.0)
    beat.set_interval(8.0)
    assert beat.keep_alive == 8.0
    assert beat.is_due(LIFE, 0.5), "receivers still wait for what was promised before"
    beat.record_published(LIFE, 0.5)
    beat.set_interval(8.0)
    changed = replace(LIFE, load=1)
    assert not beat.is_due(changed, 4.0)
    assert beat.is_due(changed, 4.5)
    assert not beat.is_due(LIFE, 8.0)
    assert beat.is_due(LIFE, 8.5)


def test_who_says_less_often_by_itself_goes_on_so() -> None:
    beat = Heartbeat(10.0)
    beat.record_published(LIFE, 0.0)
    beat.set_interval(4.0)
    assert beat.keep_alive == 10.0
    assert not beat.is_due(LIFE, 4.0)
    assert beat.is_due(replace(LIFE, load=1), 2.0)
