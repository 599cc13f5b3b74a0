"""When an engine's ranks are complete, what they can do together, and when one is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import (
    LorasChanged,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.worker_ranks import UnequalRanks, UnusableRanks, WorkerRanks
from shared.ids import EngineId, Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import Lifecycle, Phase, Role, WorkerReport
from shared.messages.model_card import LoraCard, LoraRefusal
from shared.protocol import PROTOCOL
from tests.support.engines.checking_worker import card
from tests.unit.gateway.api.test_audio import AUDIO

ENGINE = EngineId("e")

CARD = card()


def life(
    rank: int,
    *,
    incarnation: int = 1,
    phase: Phase = "ready",
    blocks: int = 10,
    world_size: int = 2,
    created: int = 0,
    dtype: str = "float32",
    engine: EngineId = ENGINE,
    seqs: int | None = None,
    protocol: int = PROTOCOL,
) -> Lifecycle:
    return Lifecycle(
        service="worker",
        instance=InstanceId(f"{engine}-rank{rank}"),
        incarnation=Incarnation(incarnation),
        phase=phase,
        pid=1,
        host="h",
        started=0.0,
        protocol=protocol,
        worker=WorkerReport(
            engine=engine,
            rank=rank,
            world_size=world_size,
            model=replace(CARD, created=created, dtype=dtype),
            num_blocks=blocks,
            device="cpu",
            max_num_seqs=seqs,
        ),
    )


def test_ranks_of_another_release_do_not_work_under_this_scheduler() -> None:
    ranks = WorkerRanks(ENGINE, None)
    ranks.record_lifecycle(life(0, protocol=1), 0.0)
    ranks.record_lifecycle(life(1), 0.0)
    assert ranks.assemble() == UnequalRanks(f"the ranks speak protocol [1, {PROTOCOL}], their scheduler {PROTOCOL}")


def test_ranks_are_complete_when_all_are_ready_and_count_with_the_least_of_each() -> None:
    ranks = WorkerRanks(ENGINE, None)
    assert ranks.assemble() is None
    ranks.record_lifecycle(life(1, blocks=7, created=5, seqs=64), 0.0)
    ranks.record_lifecycle(life(0, phase="starting"), 0.0)
    ranks.record_lifecycle(life(0, engine=EngineId("other")), 0.0)
    assert ranks.assemble() is None
    ranks.record_lifecycle(life(0, blocks=9), 0.1)
    assert ranks.assemble() == WorkersReady(CARD, 7, max_running=64, max_batch_tokens=None, world_size=2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_with_states_are_no_engine_that_hands_requests_over(role: Role) -> None:
    said = life(0, world_size=1)
    assert said.worker is not None
    said = replace(said, worker=replace(said.worker, state_checkpoints=3))
    refused, plain = WorkerRanks(ENGINE, None, role), WorkerRanks(ENGINE, None)
    for ranks in (refused, plain):
        ranks.record_lifecycle(said, 0.0)
    assert refused.assemble() == UnusableRanks(
        f"no {role} engine: requests of {CARD.name}, a model with states, are handed over on CPUs alone, by ranks of "
        "one stage with KV heads of their own; start its engines without --prefill and --decode"
    )
    assert plain.assemble() == WorkersReady(CARD, 10, state_checkpoints=3)


def test_a_model_that_hears_is_in_no_pool() -> None:
    said = life(0, world_size=1)
    assert said.worker is not None
    hearing = replace(said.worker, model=replace(CARD, audio=AUDIO))
    refused, plain = WorkerRanks(ENGINE, None, "prefill"), WorkerRanks(ENGINE, None)
    for ranks in (refused, plain):
        ranks.record_lifecycle(replace(said, worker=hearing), 0.0)
    found = refused.assemble()
    assert isinstance(found, UnusableRanks)
    assert "start its engines without --prefill and --decode" in found.reason
    assert isinstance(plain.assemble(), WorkersReady)


def test_ranks_draft_as_much_as_the_one_that_drafts_least() -> None:
    ranks = WorkerRanks(ENGINE, None)
    for rank, (drafts, jump, rows) in enumerate([(5, 8, 1), (3, 16, 4)]):
        said = life(rank)
        assert said.worker is not None
        worker = replace(said.worker, max_speculate=drafts, max_jump_ahead=jump, rows_per_draft=rows)
        ranks.record_lifecycle(replace(said, worker=worker), 0.0)
    ready = ranks.assemble()
    assert isinstance(ready, WorkersReady)
    assert (ready.max_speculate, ready.max_jump_ahead, ready.rows_per_draft) == (3, 8, 4)


def test_a_configured_world_size_is_waited_for() -> None:
    ranks = WorkerRanks(ENGINE, 2)
    ranks.record_lifecycle(life(0, world_size=1), 0.0)
    assert ranks.assemble() is None


def test_ranks_with_different_models_do_not_work_together() -> None:
    ranks = WorkerRanks(ENGINE, None)
    ranks.record_lifecycle(life(0), 0.0)
    ranks.record_lifecycle(life(1, dtype="bfloat16"), 0.0)
    assert isinstance(ranks.assemble(), UnequalRanks)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (life(1, incarnation=2, phase="starting"), WorkersLost("worker e-rank1: restarted", died=True)),
        (life(1, phase="failed"), WorkersLost("worker e-rank1: failed", died=True)),
        (life(1, phase="draining"), None),
        (life(1), None),
    ],
)
def test_a_member_that_is_not_what_it_was_is_lost(event: Lifecycle, reason: WorkersLost | None) -> None:
    ranks = WorkerRanks(ENGINE, None)
    ranks.record_lifecycle(life(0), 0.0)
    ranks.record_lifecycle(life(1), 0.0)
    ranks.assemble()
    assert ranks.record_lifecycle(event, 0.5) == reason


def test_a_member_that_falls_silent_is_lost_once() -> None:
    ranks = WorkerRanks(ENGINE, None)
    ranks.record_lifecycle(life(0), 0.0)
    ranks.record_lifecycle(life(1), 0.0)
    ranks.assemble()
    ranks.record_lifecycle(life(0), 2.5)
    assert ranks.expire(2.6, None) == WorkersLost("worker e-rank1: silent for 2 s")
    assert ranks.expire(9.0, None) is None


@pytest.fixture
def quiet_ranks() -> WorkerRanks:
    """Two that the engine works with, heard at 0.0, which promised to speak every 8 s, as in a large fleet."""
    ranks = WorkerRanks(ENGINE, None)
    for rank in range(2):
        ranks.record_lifecycle(replace(life(rank), keep_alive=8.0), 0.0)
    assert isinstance(ranks.assemble(), WorkersReady)
    return ranks


def test_ranks_are_asked_when_a_step_is_late_and_they_are_silent(quiet_ranks: WorkerRanks) -> None:
    assert not quiet_ranks.ping_is_due(7.0, None), "nothing is awaited"
    assert not quiet_ranks.ping_is_due(7.0, 6.5), "the step is not late"
    for rank in range(2):
        quiet_ranks.record_lifecycle(replace(life(rank), keep_alive=8.0), 7.0)
    assert not quiet_ranks.ping_is_due(7.9, 6.5), "they have just spoken"
    assert quiet_ranks.ping_is_due(8.1, 6.5)
    assert quiet_ranks.ping_is_due(8.6, 6.5), "the first may have been lost"


def test_a_rank_that_does_not_answer_is_lost_long_before_its_promise_is_broken(quiet_ranks: WorkerRanks) -> None:
    assert quiet_ranks.ping_is_due(2.0, 0.5)
    quiet_ranks.record_lifecycle(replace(life(0), keep_alive=8.0), 2.1)
    assert quiet_ranks.expire(3.9, None) is None
    lost = quiet_ranks.expire(4.1, None)
    assert lost == WorkersLost("worker e-rank1: silent for 2 s after it was asked, as a step is late")
    quiet_ranks.record_lifecycle(replace(life(0), keep_alive=8.0), 4.2)
    assert quiet_ranks.assemble() is None, "it counts as ready before it has spoken"
    quiet_ranks.record_lifecycle(replace(life(1), keep_alive=8.0), 5.0)
    assert isinstance(quiet_ranks.assemble(), WorkersReady)
    assert quiet_ranks.expire(20.0, None) is None


def test_ranks_that_answer_may_take_their_time_for_a_step(quiet_ranks: WorkerRanks) -> None:
    now = 0.0
    while now < 60.0:
        if quiet_ranks.ping_is_due(now, 0.0):
            for rank in range(2):
                quiet_ranks.record_lifecycle(replace(life(rank), keep_alive=8.0), now + 0.1)
        now += 0.5
        assert quiet_ranks.expire(now, None) is None


def test_a_plan_that_no_worker_takes_counts_once_a_death_would_have_been_announced(quiet_ranks: WorkerRanks) -> None:
    quiet_ranks.record_undelivered_plan(Incarnation(5), 7, 1.0)
    assert quiet_ranks.expire(1.05, Incarnation(5)) is None
    assert quiet_ranks.expire(1.2, Incarnation(5)) == WorkersLost("no worker takes plans")
    quiet_ranks.record_undelivered_plan(Incarnation(5), 7, 2.0)
    assert quiet_ranks.expire(3.0, Incarnation(6)) is None, "another epoch has begun"


def test_a_death_says_which_plan_was_the_first_that_came_too_late_for_it(quiet_ranks: WorkerRanks) -> None:
    for step in (7, 8):
        quiet_ranks.record_undelivered_plan(Incarnation(5), step, 1.0)
    dead = WorkersLost("worker e-rank1: failed", died=True, unheard=7)
    assert quiet_ranks.record_lifecycle(life(1, phase="failed"), 1.05) == dead
    quiet_ranks.record_lifecycle(life(1, incarnation=2), 2.0)
    assert quiet_ranks.assemble() is not None
    dead = WorkersLost("worker e-rank1: failed", died=True)
    assert quiet_ranks.record_lifecycle(life(1, incarnation=2, phase="failed"), 3.0) == dead


def test_the_engine_serves_the_adapters_that_all_its_ranks_have() -> None:
    ranks, (one, two, *_) = WorkerRanks(ENGINE, None), CARD.loras
    refusal = LoraRefusal(ModelName("x"), "/x", "no")

    def report(rank: int, *loras: LoraCard, refusals: tuple[LoraRefusal, ...] = ()) -> None:
        said = life(rank)
        assert said.worker is not None
        worker = replace(said.worker, model=replace(CARD, loras=loras), lora_refusals=refusals)
        ranks.record_lifecycle(replace(said, worker=worker), 0.0)

    report(0, one, two)
    report(1, two)
    ready = ranks.assemble()
    assert isinstance(ready, WorkersReady)
    assert ready.card.loras == (two,)
    assert ranks.loras() == LorasChanged((two,))
    report(1, two, one, refusals=(refusal,))
    assert ranks.loras() == LorasChanged((one, two), (refusal,))
