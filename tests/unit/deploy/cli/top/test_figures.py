"""What `baton top` makes of two words of everybody."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from deploy.cli.top.view import view
from shared.ids import EngineId, Incarnation, InstanceId, NodeId
from shared.messages.lifecycle import EngineReport, Lifecycle, Service, StepSums, StoreReport, WorkerReport
from shared.telemetry.lifecycle_listener import LifecycleListener
from shared.telemetry.stack_figures import Figures, TimedLifecycle, as_json, figures
from tests.support.engines.checking_worker import card

SUMS = StepSums(steps=100, wait=1.0, prepare=1.0, forward=8.0, sample=1.0, answer=0.5, computed=4000, sampled=900)
ENGINE = EngineReport(
    model=card(),
    waiting=2,
    running=3,
    max_waiting=9,
    max_running=9,
    blocks_total=100,
    blocks_free=75,
    steps=100,
    tokens=900,
    prompt_tokens=1000,
    cached_tokens=500,
    prefill_tokens=77,
    drafted_tokens=100,
    accepted_tokens=10,
)
WORKER = WorkerReport(
    engine=EngineId("engine-1"), rank=0, world_size=1, model=card(), num_blocks=100, device="cpu", sums=SUMS
)
STORE = StoreReport(
    node=NodeId("n"),
    slots=8,
    committed=4,
    reserved=0,
    pinned=1,
    bytes_used=2**20,
    bytes_total=2**21,
    hits=10,
    misses=30,
)


def life(service: Service, instance: str, **more: Any) -> Lifecycle:
    return Lifecycle(
        service=service,
        instance=InstanceId(instance),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=0.0,
        **more,
    )


BEFORE = {
    "engine-1": life("scheduler", "engine-1", engine=ENGINE),
    "engine-1-rank0": life("worker", "engine-1-rank0", worker=WORKER),
    "kvstore-1": life("kvstore", "kvstore-1", store=STORE),
    "gateway-1": life("gateway", "gateway-1", load=4, progress=50),
}
LATER = replace(ENGINE, tokens=1100, prompt_tokens=1400, cached_tokens=600, drafted_tokens=150, accepted_tokens=48)
AFTER = {
    "engine-1": replace(BEFORE["engine-1"], engine=LATER),
    "engine-1-rank0": replace(
        BEFORE["engine-1-rank0"],
        worker=replace(WORKER, sums=StepSums(steps=150, wait=1.1, prepare=1.1, forward=8.7, sample=1.1, computed=5000)),
    ),
    "kvstore-1": replace(BEFORE["kvstore-1"], store=replace(STORE, hits=19, misses=31)),
    "gateway-1": replace(BEFORE["gateway-1"], load=5, progress=70),
}


def at(seconds: float, lives: dict[str, Lifecycle]) -> dict[str, TimedLifecycle]:
    return {instance: TimedLifecycle(seconds, each) for instance, each in lives.items()}


def test_rates_and_shares_are_those_of_the_interval() -> None:
    found = figures(at(10.0, BEFORE), at(12.0, AFTER))
    (engine,) = found.engines
    assert (engine.running, engine.waiting, engine.prefill_tokens) == (3, 2, 77)
    assert (engine.kv_blocks, engine.kv_blocks_total, engine.kv_share) == (25, 100, 0.25)
    assert engine.tokens_per_second == found.tokens_per_second == 100.0
    assert engine.hit_rate == 0.25
    assert engine.acceptance == 0.76
    (rank,) = engine.ranks
    assert rank.steps_per_second == 25.0
    assert rank.tokens_per_second == 500.0
    assert rank.step_ms == pytest.approx(1000 * 0.9 / 50)
    assert rank.idle_share == pytest.approx(0.1)
    assert rank.wait_ms == pytest.approx(2.0)
    assert rank.forward_ms == pytest.approx(14.0)
    (store,) = found.stores
    assert store.hit_rate == 0.9
    assert [(each.instance, each.load, each.messages_per_second) for each in found.others] == [("gateway-1", 5, 10.0)]
    assert (found.streams, found.running, found.waiting) == (5, 3, 2)


def test_nothing_is_made_up_of_one_word_or_of_two_lives() -> None:
    reborn = {instance: replace(each, incarnation=Incarnation(2)) for instance, each in AFTER.items()}
    for before, now in (({}, BEFORE), (BEFORE, reborn)):
        found = figures(at(10.0, before), at(12.0, now))
        (engine,) = found.engines
        assert engine.tokens_per_second is None
        assert found.tokens_per_second is None
        assert engine.ranks[0].idle_share is None
        assert engine.ranks[0].step_ms is None
        assert found.others[0].messages_per_second is None
        assert engine.hit_rate is not None, "since the start"


def test_an_engine_without_workers_has_no_figures_but_is_shown() -> None:
    found = figures({}, at(1.0, {"engine-1": life("scheduler", "engine-1")}))
    assert found.engines[0].kv_share is None
    assert drawn(found)


def drawn(found: Figures) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(view("title", found))
    return captured.get()


def test_every_figure_is_in_the_picture_and_in_the_json() -> None:
    found = figures(at(10.0, BEFORE), at(12.0, AFTER))
    text = drawn(found)
    for shown in (
        "engine-1",
        "25/100",
        "25.0%",
        "76.0%",
        "10.0%",
        "14.00",
        "kvstore-1",
        "90.0%",
        "gateway-1",
        "5 streams",
    ):
        assert shown in text, shown
    told = as_json(found, name="x")
    assert told["name"] == "x"
    assert told["engines"][0]["ranks"][0]["idle_share"] == 0.1


def test_who_says_nothing_new_keeps_its_figures_and_who_ends_is_gone() -> None:
    now = 10.0
    listener = LifecycleListener(lambda: now)

    async def say(lives: dict[str, Lifecycle]) -> None:
        for each in lives.values():
            await listener.record(each)

    asyncio.run(say(BEFORE))
    listener.look()
    now = 12.0
    asyncio.run(say(AFTER))
    assert listener.look().tokens_per_second == 100.0
    now = 12.3
    assert listener.look().tokens_per_second == 100.0
    asyncio.run(say({"gateway-1": replace(AFTER["gateway-1"], phase="stopped")}))
    assert listener.look().others == ()
    now = 30.0
    assert listener.look().engines == ()
