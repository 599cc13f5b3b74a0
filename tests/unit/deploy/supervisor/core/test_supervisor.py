"""The supervisor's decisions: who starts, who is restarted, in which order all end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from deploy.supervisor.core.events import (
    AbortStart,
    AnnounceDeath,
    ClockTick,
    Command,
    KillProcess,
    LifecycleReceived,
    ProcessesStalled,
    ProcessExited,
    ProcessStarted,
    ReplyToScale,
    ScaleRequested,
    StartProcess,
    StopRequested,
    TerminateProcess,
    WorkersReleased,
)
from deploy.supervisor.core.members import RestartPolicy
from deploy.supervisor.core.plan import MAX_COUNT, Counts
from deploy.supervisor.core.supervisor import BAD_SETTINGS_STATUS, StopDeadlines, Supervisor
from shared.ids import Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import Lifecycle, Phase
from shared.messages.supervisor import ScaleRefusal, ScaleResult


class Simulation:
    """Plays the shell: gives every start a pid, and lets processes say and do what a test wants."""

    def __init__(
        self, counts: Counts | None = None, models: Sequence[Counts] = (), max_instances: int = MAX_COUNT
    ) -> None:
        deadlines = StopDeadlines(drain=32, idle=5, hurry=2)
        self.supervisor = Supervisor(
            counts or Counts(), RestartPolicy(), deadlines, models=models, max_instances=max_instances
        )
        self.now = 100.0
        self.pids: dict[str, int] = {}
        self._next_pid = 1000

    def handle(self, event: object) -> list[Command]:
        commands = self.supervisor.handle(event, self.now)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, StartProcess):
                self._next_pid += 1
                self.pids[command.process.instance] = self._next_pid
                assert self.supervisor.handle(ProcessStarted(command.process.instance, self._next_pid), self.now) == []
        return commands

    def tick(self, seconds: float = 0.0) -> list[Command]:
        self.now += seconds
        return self.handle(ClockTick())

    def message(self, instance: str, phase: Phase) -> Lifecycle:
        return Lifecycle(
            service="gateway",
            instance=InstanceId(instance),
            incarnation=Incarnation(7),
            phase=phase,
            pid=self.pids[instance],
            host="h",
            started=0.0,
        )

    def hears(self, instance: str, phase: Phase) -> list[Command]:
        return self.handle(LifecycleReceived(self.message(instance, phase)))

    def says(self, instance: str, phase: Phase) -> Lifecycle:
        assert self.hears(instance, phase) == []
        return self.message(instance, phase)

    def ends(self, instance: str, status: int = -9) -> list[Command]:
        return self.handle(ProcessExited(InstanceId(instance), status))

    def all_ready(self) -> Simulation:
        self.tick()
        for instance in list(self.pids):
            self.says(instance, "ready")
        assert self.supervisor.settled
        return self

    def present(self) -> set[str]:
        return {m.process.instance for m in self.supervisor.members()}


def started(commands: Iterable[Command]) -> set[str]:
    return {c.process.instance for c in commands if isinstance(c, StartProcess)}


def test_everybody_starts_at_once_engines_first() -> None:
    commands = Simulation(Counts(gateway=2, engines=1, ranks=2)).tick()
    assert [c.process.instance for c in commands if isinstance(c, StartProcess)] == [
        "engine-1",
        "engine-1-rank0",
        "engine-1-rank1",
        "gateway-1",
        "gateway-2",
        "tokenizer-1",
        "coordinator-1",
        "detokenizer-1",
    ]


def test_workers_and_encoders_wait_for_what_they_are_forked_from_and_nobody_else_does() -> None:
    stack = Simulation(Counts(ranks=2, encoder=1))
    stack.supervisor = Supervisor(Counts(ranks=2, encoder=1), holds_workers=True)
    assert started(stack.tick()) == {"engine-1", "gateway-1", "tokenizer-1", "coordinator-1", "detokenizer-1"}
    assert started(stack.handle(WorkersReleased())) == {"engine-1-rank0", "engine-1-rank1", "encoder-1"}
    assert started(stack.tick()) == set()


def test_a_stack_may_end_before_its_workers_were_started() -> None:
    stack = Simulation()
    stack.supervisor = Supervisor(Counts(), holds_workers=True)
    stack.tick()
    stack.handle(StopRequested())
    for instance in ("gateway-1", "tokenizer-1", "coordinator-1", "detokenizer-1", "engine-1"):
        stack.ends(instance, 0)
    assert stack.supervisor.is_empty


def test_pools_are_engines_with_names_of_their_own() -> None:
    counts = Counts(engines=0, prefill=2, decode=1, decode_ranks=2, kvstore=1)
    commands = Simulation(counts).tick()
    assert [c.process.instance for c in commands if isinstance(c, StartProcess)][:8] == [
        *("prefill-1", "prefill-1-rank0", "prefill-2", "prefill-2-rank0"),
        *("decode-1", "decode-1-rank0", "decode-1-rank1", "kvstore-1"),
    ]


def test_the_stack_is_settled_once_all_were_ready_together() -> None:
    stack = Simulation()
    stack.tick()
    names = list(stack.pids)
    for name in names[:-1]:
        stack.says(name, "ready")
    assert not stack.supervisor.settled
    stack.says(names[-1], "ready")
    assert stack.supervisor.settled


def test_a_killed_process_is_announced_as_failed_and_started_at_once() -> None:
    stack = Simulation().all_ready()
    last = stack.says("gateway-1", "ready")
    commands = stack.ends("gateway-1")
    assert [c.lifecycle.phase for c in commands if isinstance(c, AnnounceDeath)] == ["failed"]
    assert next(c.lifecycle for c in commands if isinstance(c, AnnounceDeath)).incarnation == last.incarnation
    assert started(commands) == {"gateway-1"}


@pytest.mark.parametrize("last_word", ["stopped", "failed"])
def test_who_took_leave_is_not_announced_again(last_word: Phase) -> None:
    stack = Simulation().all_ready()
    stack.says("gateway-1", last_word)
    assert not [c for c in stack.ends("gateway-1", 0) if isinstance(c, AnnounceDeath)]


def test_who_died_before_its_first_word_is_not_announced() -> None:
    stack = Simulation()
    stack.tick()
    assert not [c for c in stack.ends("gateway-1") if isinstance(c, AnnounceDeath)]


def test_words_of_a_former_process_do_not_make_the_new_one_ready() -> None:
    stack = Simulation().all_ready()
    old = stack.says("gateway-1", "ready")
    stack.ends("gateway-1")
    stack.handle(LifecycleReceived(old))
    assert not stack.supervisor.all_ready


def test_pauses_grow_while_a_process_keeps_dying_and_are_bounded() -> None:
    stack = Simulation().all_ready()
    waited = []
    for _ in range(12):
        commands, pause = stack.ends("tokenizer-1"), 0.0
        while not started(commands):
            pause += 0.25
            commands = stack.tick(0.25)
        waited.append(pause)
    assert waited == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_long_life_is_a_new_beginning() -> None:
    stack = Simulation().all_ready()
    stack.ends("tokenizer-1")
    stack.ends("tokenizer-1")
    stack.tick(1.0)
    stack.says("tokenizer-1", "ready")
    stack.tick(31.0)
    assert started(stack.ends("tokenizer-1")) == {"tokenizer-1"}


def test_how_long_a_start_takes_is_no_life() -> None:
    stack = Simulation().all_ready()
    for _ in range(6):
        stack.ends("tokenizer-1", 1)
        stack.tick(61.0)
        stack.says("tokenizer-1", "starting")
        stack.tick(300.0)
    assert stack.supervisor.failed() == {"tokenizer-1"}


def test_who_keeps_dying_has_failed_until_it_is_ready() -> None:
    stack = Simulation().all_ready()
    for _ in range(5):
        stack.ends("tokenizer-1", 3)
        stack.tick(61.0)
    assert not stack.supervisor.failed()
    stack.ends("tokenizer-1", 3)
    assert stack.supervisor.failed() == {"tokenizer-1"}
    assert next(m.status for m in stack.supervisor.members() if m.process.instance == "tokenizer-1") == 3
    assert started(stack.tick(61.0)) == {"tokenizer-1"}
    assert stack.supervisor.failed() == {"tokenizer-1"}
    stack.says("tokenizer-1", "ready")
    assert not stack.supervisor.failed()


def test_a_start_that_fails_three_times_is_given_up() -> None:
    stack = Simulation()
    stack.tick()
    assert not [c for c in [*stack.ends("gateway-1", 1), *stack.ends("gateway-1", 1)] if isinstance(c, AbortStart)]
    stack.tick(1.0)
    assert AbortStart(InstanceId("gateway-1"), 1) in stack.ends("gateway-1", 1)


def test_bad_settings_are_given_up_at_once() -> None:
    stack = Simulation()
    stack.tick()
    assert AbortStart(InstanceId("gateway-1"), BAD_SETTINGS_STATUS) in stack.ends("gateway-1", BAD_SETTINGS_STATUS)


def test_after_the_start_nothing_is_ever_given_up() -> None:
    stack = Simulation().all_ready()
    for _ in range(20):
        assert not [c for c in stack.ends("gateway-1", BAD_SETTINGS_STATUS) if isinstance(c, AbortStart)]
        stack.tick(61.0)


# ---- engines


def test_a_ranks_death_restarts_all_ranks_of_its_engine_together_and_nobody_else() -> None:
    stack = Simulation(Counts(engines=2, ranks=2)).all_ready()
    commands = stack.ends("engine-1-rank1")
    assert [c for c in commands if isinstance(c, KillProcess | StartProcess)] == [
        KillProcess(InstanceId("engine-1-rank0"))
    ]
    commands = stack.ends("engine-1-rank0")
    assert [(c.process.instance, c.new_rendezvous) for c in commands if isinstance(c, StartProcess)] == [
        ("engine-1-rank0", True),
        ("engine-1-rank1", False),
    ]


def test_ranks_wait_for_the_pause_of_the_one_that_keeps_dying() -> None:
    stack = Simulation(Counts(ranks=2)).all_ready()
    for _ in range(2):
        stack.ends("engine-1-rank1")
        commands = stack.ends("engine-1-rank0")
    assert started(commands) == set()
    assert started(stack.tick(0.25)) == {"engine-1-rank0", "engine-1-rank1"}


def test_a_schedulers_death_leaves_its_ranks_alone() -> None:
    stack = Simulation(Counts(ranks=2)).all_ready()
    commands = stack.ends("engine-1")
    assert started(commands) == {"engine-1"}
    assert not [c for c in commands if isinstance(c, KillProcess)]


def test_a_stalled_engine_is_killed_and_started_anew() -> None:
    stack = Simulation(Counts(engines=2)).all_ready()
    engine = (InstanceId("engine-2"), InstanceId("engine-2-rank0"))
    assert stack.handle(ProcessesStalled(engine)) == [KillProcess(each) for each in engine]
    assert started([*stack.ends("engine-2"), *stack.ends("engine-2-rank0")]) == set(engine)


def test_the_silence_of_a_rank_that_is_killed_and_not_yet_gone_is_no_stall_of_its_next_scheduler() -> None:
    stack = Simulation().all_ready()
    scheduler, rank = InstanceId("engine-1"), InstanceId("engine-1-rank0")
    assert stack.handle(ProcessesStalled((scheduler, rank))) == [KillProcess(scheduler), KillProcess(rank)]
    assert started(stack.ends("engine-1")) == {"engine-1"}
    assert stack.handle(ProcessesStalled((rank, scheduler))) == []
    assert started(stack.ends("engine-1-rank0")) == {"engine-1-rank0"}


def test_a_process_that_survives_its_kill_is_killed_again() -> None:
    stack = Simulation().all_ready()
    stack.handle(ProcessesStalled((InstanceId("gateway-1"),)))
    assert stack.tick(0.5) == []
    assert stack.tick(0.6) == [KillProcess(InstanceId("gateway-1"))]


# ---- scaling


def answer(commands: Iterable[Command]) -> object:
    return next(c.answer for c in commands if isinstance(c, ReplyToScale))


def test_scaling_up_starts_the_next_numbers() -> None:
    stack = Simulation().all_ready()
    commands = stack.handle(ScaleRequested("tokenizer", 3))
    assert answer(commands) == ScaleResult(started=("tokenizer-2", "tokenizer-3"), stopping=())
    assert started(commands) == {"tokenizer-2", "tokenizer-3"}


def test_scaling_down_drains_the_newest() -> None:
    stack = Simulation(Counts(tokenizer=3)).all_ready()
    commands = stack.handle(ScaleRequested("tokenizer", 1))
    assert answer(commands) == ScaleResult(started=(), stopping=("tokenizer-2", "tokenizer-3"))
    assert [c for c in commands if isinstance(c, TerminateProcess)] == [
        TerminateProcess(InstanceId("tokenizer-2")),
        TerminateProcess(InstanceId("tokenizer-3")),
    ]
    assert started([*stack.ends("tokenizer-2", 0), *stack.ends("tokenizer-3", 0), *stack.tick(60)]) == set()


def of_two_models(standby: int = 0) -> Simulation:
    shared = Counts(engines=0, tokenizer=0, detokenizer=0)
    big = Counts(model=ModelName("org/big"), ranks=2, standby=standby, gateway=0, coordinator=0)
    return Simulation(shared, [big, Counts(model=ModelName("small"), gateway=0, coordinator=0)])


def test_each_model_has_processes_that_bear_its_name() -> None:
    stack = of_two_models().all_ready()
    assert stack.present() == {
        *("gateway-1", "coordinator-1"),
        *("org-big-engine-1", "org-big-engine-1-rank0", "org-big-engine-1-rank1"),
        *("org-big-tokenizer-1", "org-big-detokenizer-1"),
        *("small-engine-1", "small-engine-1-rank0", "small-tokenizer-1", "small-detokenizer-1"),
    }
    workers = [member.device for member in stack.supervisor.members() if member.process.service == "worker"]
    assert sorted(workers) == [0, 1, 2]  # type: ignore[type-var]


def test_pools_of_several_models_are_scaled_by_name() -> None:
    stack = of_two_models().all_ready()
    small, big = ModelName("small"), ModelName("org/big")
    commands = stack.handle(ScaleRequested("engines", 2, small))
    assert answer(commands) == ScaleResult(started=("small-engine-2", "small-engine-2-rank0"), stopping=())
    assert answer(stack.handle(ScaleRequested("engines", 1, small))) == ScaleResult(
        started=(), stopping=("small-engine-2", "small-engine-2-rank0")
    )
    assert answer(stack.handle(ScaleRequested("tokenizer", 2, big))) == ScaleResult(("org-big-tokenizer-2",), ())
    assert answer(stack.handle(ScaleRequested("gateway", 2))) == ScaleResult(("gateway-2",), ())
    for asked, why in (
        (ScaleRequested("engines", 2), "model: engines are of one model each; there are org/big, small"),
        (ScaleRequested("gateway", 2, small), "model: gateway serves all models"),
        (ScaleRequested("engines", 2, ModelName("x")), "model: 'x' is not served; there are org/big, small"),
        (ScaleRequested("engines", 0, small), "engines=0: from 1 to 256 are possible (--max-instances)"),
    ):
        assert answer(stack.handle(asked)) == ScaleRefusal(why)
    assert answer(Simulation().all_ready().handle(ScaleRequested("engines", 2, small))) == ScaleRefusal(
        "model: 'small' is not needed, as the stack serves one model"
    )


def test_a_standby_takes_the_place_of_an_engine_of_its_own_model_only() -> None:
    stack = of_two_models(standby=1)
    stack.tick()
    started_last = [started(stack.hears(instance, "ready")) for instance in list(stack.pids)][-1]
    assert started_last == {"org-big-engine-2", "org-big-engine-2-rank0", "org-big-engine-2-rank1"}
    scheduler = stack.message("org-big-engine-2", "draining")
    stack.handle(LifecycleReceived(msgspec.structs.replace(scheduler, service="scheduler", standby=True)))
    standing_by = {m.process.engine for m in stack.supervisor.members() if m.standby}
    stack.ends("small-engine-1-rank0")
    assert {m.process.engine for m in stack.supervisor.members() if m.standby} == standing_by == {"org-big-engine-2"}
    stack.ends("org-big-engine-1-rank0")
    assert {m.process.engine for m in stack.supervisor.members() if m.standby} == {"org-big-engine-1"}


def test_an_engine_that_goes_keeps_its_ranks_until_its_scheduler_has_finished() -> None:
    stack = Simulation(Counts(engines=2, ranks=2)).all_ready()
    commands = stack.handle(ScaleRequested("engines", 1))
    assert answer(commands) == ScaleResult(started=(), stopping=("engine-2", "engine-2-rank0", "engine-2-rank1"))
    assert [c for c in commands if isinstance(c, TerminateProcess)] == [TerminateProcess(InstanceId("engine-2"))]
    assert stack.ends("engine-2", 0) == [TerminateProcess(InstanceId(f"engine-2-rank{rank}")) for rank in range(2)]


def test_a_name_that_still_drains_is_not_given_to_another() -> None:
    stack = Simulation(Counts(tokenizer=2)).all_ready()
    stack.handle(ScaleRequested("tokenizer", 1))
    assert started(stack.handle(ScaleRequested("tokenizer", 2))) == {"tokenizer-3"}


def test_who_serves_stays_where_fewer_are_wanted() -> None:
    stack = Simulation(Counts(tokenizer=4, engines=3)).all_ready()
    stack.says("tokenizer-1", "draining")
    stack.says("tokenizer-3", "starting")
    stack.says("engine-2", "draining")
    assert answer(stack.handle(ScaleRequested("tokenizer", 2))) == ScaleResult((), ("tokenizer-1", "tokenizer-3"))
    assert answer(stack.handle(ScaleRequested("tokenizer", 1))) == ScaleResult((), ("tokenizer-4",))
    assert answer(stack.handle(ScaleRequested("engines", 2))) == ScaleResult((), ("engine-2", "engine-2-rank0"))


def test_who_does_not_finish_draining_is_killed() -> None:
    stack = Simulation(Counts(tokenizer=2)).all_ready()
    stack.handle(ScaleRequested("tokenizer", 1))
    assert stack.tick(31.0) == []
    assert stack.tick(1.0) == [KillProcess(InstanceId("tokenizer-2"))]


def test_a_pool_is_scaled_with_its_own_number_of_ranks() -> None:
    stack = Simulation(Counts(engines=0, prefill=1, decode=1, decode_ranks=2)).all_ready()
    commands = stack.handle(ScaleRequested("decode", 2))
    assert answer(commands) == ScaleResult(started=("decode-2", "decode-2-rank0", "decode-2-rank1"), stopping=())
    commands = stack.handle(ScaleRequested("prefill", 2))
    assert answer(commands) == ScaleResult(started=("prefill-2", "prefill-2-rank0"), stopping=())


def test_a_pool_may_be_emptied_while_others_decode() -> None:
    stack = Simulation(Counts(engines=1, prefill=1, decode=1)).all_ready()
    assert answer(stack.handle(ScaleRequested("prefill", 0))) == ScaleResult((), ("prefill-1", "prefill-1-rank0"))
    assert answer(stack.handle(ScaleRequested("engines", 0))) == ScaleResult((), ("engine-1", "engine-1-rank0"))
    assert answer(stack.handle(ScaleRequested("decode", 0))) == ScaleRefusal(
        "decode=0: from 1 to 256 are possible (--max-instances)"
    )


@pytest.mark.parametrize(
    ("service", "count"),
    [("tokenizer", 0), ("tokenizer", 257), ("scheduler", 2), ("kvstore", 2), ("engines", 0), ("", 1)],
)
def test_what_cannot_be_scaled_is_refused(service: str, count: int) -> None:
    stack = Simulation().all_ready()
    before = stack.present()
    assert isinstance(answer(stack.handle(ScaleRequested(service, count))), ScaleRefusal)
    assert stack.present() == before


def test_a_stack_is_scaled_as_far_as_it_may_be_and_none_is_stopped_for_that() -> None:
    stack = Simulation(Counts(tokenizer=5), max_instances=3).all_ready()
    refused = answer(stack.handle(ScaleRequested("engines", 4)))
    assert refused == ScaleRefusal("engines=4: from 1 to 3 are possible (--max-instances)")
    assert isinstance(answer(stack.handle(ScaleRequested("engines", 3))), ScaleResult)
    refused = answer(stack.handle(ScaleRequested("tokenizer", 6)))
    assert refused == ScaleRefusal("tokenizer=6: from 1 to 5 are possible (--max-instances)")
    for count, left in ((5, ()), (4, ("tokenizer-5",))):
        assert answer(stack.handle(ScaleRequested("tokenizer", count))) == ScaleResult((), left)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_engines_that_hand_nothing_over_have_no_pools(pool: str) -> None:
    models = [Counts(model=ModelName("writer"), hands_over=False), Counts(model=ModelName("chat"))]
    alone, several = Simulation(Counts(hands_over=False)).all_ready(), Simulation(models=models).all_ready()
    for stack, model in ((alone, None), (several, ModelName("writer"))):
        refused = answer(stack.handle(ScaleRequested(pool, 1, model)))
        assert refused == ScaleRefusal(
            f"{pool}: an encoder reads the model's prompts, and engines hand nothing over; engines can be scaled"
        )
        assert isinstance(answer(stack.handle(ScaleRequested("engines", 2, model))), ScaleResult)
    assert isinstance(answer(several.handle(ScaleRequested(pool, 1, ModelName("chat")))), ScaleResult)


# ---- the end


def ends_of(commands: Iterable[Command]) -> set[str]:
    return {c.instance for c in commands if isinstance(c, TerminateProcess)}


def test_gateways_end_first_then_what_they_needed_then_the_ranks_then_the_store() -> None:
    stack = Simulation(Counts(gateway=2, kvstore=1)).all_ready()
    assert ends_of(stack.handle(StopRequested())) == {"gateway-1", "gateway-2"}
    assert ends_of(stack.ends("gateway-1", 0)) == set()
    middle = {"tokenizer-1", "coordinator-1", "detokenizer-1", "engine-1"}
    assert ends_of(stack.ends("gateway-2", 0)) == middle
    ended = [command for name in sorted(middle) for command in stack.ends(name, 0)]
    assert ends_of(ended) == {"engine-1-rank0"}
    assert ends_of(stack.ends("engine-1-rank0", 0)) == {"kvstore-1"}
    stack.ends("kvstore-1", 0)
    assert stack.supervisor.is_empty


def test_what_the_gateways_still_need_is_restarted_while_they_drain() -> None:
    stack = Simulation().all_ready()
    stack.handle(StopRequested())
    assert started(stack.ends("tokenizer-1")) == {"tokenizer-1"}


def test_a_second_request_to_stop_ends_everybody_soon() -> None:
    stack = Simulation().all_ready()
    stack.handle(StopRequested())
    assert ends_of(stack.handle(StopRequested())) == stack.present() - {"gateway-1"}
    assert {c.instance for c in stack.tick(2.0) if isinstance(c, KillProcess)} == stack.present()


def test_a_third_request_to_stop_kills() -> None:
    stack = Simulation().all_ready()
    stack.handle(StopRequested())
    stack.handle(StopRequested())
    assert {c.instance for c in stack.handle(StopRequested()) if isinstance(c, KillProcess)} == stack.present()


def test_a_stop_during_a_pause_starts_nobody() -> None:
    stack = Simulation()
    stack.tick()
    stack.ends("gateway-1", 1)
    stack.ends("gateway-1", 1)
    assert started(stack.handle(StopRequested())) == set()
    assert "gateway-1" not in stack.present()


def test_nothing_is_scaled_while_stopping() -> None:
    stack = Simulation().all_ready()
    stack.handle(StopRequested())
    assert isinstance(answer(stack.handle(ScaleRequested("tokenizer", 2))), ScaleRefusal)


def devices(simulation: Simulation) -> dict[str, int | None]:
    return {m.process.instance: m.device for m in simulation.supervisor.members() if m.process.service == "worker"}


def test_every_rank_of_a_host_has_a_device_of_its_own_and_gives_it_back() -> None:
    simulation = Simulation(Counts(engines=2, ranks=2, decode=1)).all_ready()
    assert devices(simulation) == {
        "engine-1-rank0": 0,
        "engine-1-rank1": 1,
        "engine-2-rank0": 2,
        "engine-2-rank1": 3,
        "decode-1-rank0": 4,
    }
    simulation.handle(ScaleRequested("engines", 1))
    for instance in ("engine-2", "engine-2-rank0", "engine-2-rank1"):
        simulation.ends(instance, 0)
    simulation.handle(ScaleRequested("decode", 2))
    simulation.handle(ScaleRequested("engines", 2))
    assert devices(simulation)["decode-2-rank0"] == 2
    assert devices(simulation)["engine-2-rank0"] == 5, "two in a row are not free before that"


def test_a_rank_that_is_started_again_has_the_device_it_had() -> None:
    simulation = Simulation(Counts(engines=2)).all_ready()
    commands = [*simulation.ends("engine-2-rank0"), *simulation.tick(60)]
    (start,) = (c for c in commands if isinstance(c, StartProcess))
    assert (start.process.instance, start.device) == ("engine-2-rank0", 1)


def killed(commands: Iterable[Command]) -> set[str]:
    return {c.instance for c in commands if isinstance(c, KillProcess)}


def test_engines_of_a_data_parallel_group_start_and_lose_their_ranks_together() -> None:
    stack = Simulation(Counts(engines=4, ranks=2, data_parallel=2))
    begun = [c for c in stack.tick() if isinstance(c, StartProcess)]
    assert [(c.process.instance, c.process.group) for c in begun if c.new_rendezvous] == [
        ("engine-1-rank0", "engine-1"),
        ("engine-3-rank0", "engine-3"),
    ]
    stack.all_ready()
    assert killed(stack.ends("engine-4-rank1")) == {"engine-3-rank0", "engine-3-rank1", "engine-4-rank0"}
    assert started(stack.ends("engine-3-rank0")) == started(stack.ends("engine-3-rank1")) == set()
    again = stack.ends("engine-4-rank0")
    assert started(again) == {"engine-3-rank0", "engine-3-rank1", "engine-4-rank0", "engine-4-rank1"}
    assert [c.new_rendezvous for c in again if isinstance(c, StartProcess)] == [True, False, False, False]
    assert killed(stack.ends("engine-1")) == set(), "a scheduler's ranks go on without it"


def scaled(commands: Iterable[Command]) -> ScaleResult:
    result = answer(commands)
    assert isinstance(result, ScaleResult)
    return result


def test_groups_of_engines_are_scaled_as_wholes_and_their_ranks_serve_until_the_last_scheduler_has_ended() -> None:
    stack = Simulation(Counts(engines=2, data_parallel=2)).all_ready()
    refused = answer(stack.handle(ScaleRequested("engines", 3)))
    assert refused == ScaleRefusal("engines=3: whole groups are needed, of data_parallel_size 2")
    assert started(stack.handle(ScaleRequested("engines", 4))) == {
        *("engine-3", "engine-3-rank0", "engine-4", "engine-4-rank0")
    }
    stack.all_ready()
    fewer = answer(stack.handle(ScaleRequested("engines", 2)))
    assert fewer == ScaleResult((), ("engine-3", "engine-3-rank0", "engine-4", "engine-4-rank0"))
    assert ends_of(stack.ends("engine-3", 0)) == set(), "engine 4 still has streams"
    assert ends_of(stack.ends("engine-4", 0)) == {"engine-3-rank0", "engine-4-rank0"}


def test_groups_of_another_size_take_the_place_of_those_that_serve_once_all_are_ready() -> None:
    stack = Simulation(Counts(engines=2, data_parallel=2)).all_ready()
    commands = stack.handle(ScaleRequested("engines", 4, data_parallel_size=4))
    old = ("engine-1", "engine-1-rank0", "engine-2", "engine-2-rank0")
    assert scaled(commands).superseded == old
    begun = [c.process for c in commands if isinstance(c, StartProcess) and c.process.service == "worker"]
    assert [(p.instance, p.group, p.group_size, p.group_index) for p in begun] == [
        (f"engine-{number}-rank0", "engine-3", 4, number - 3) for number in range(3, 7)
    ]
    assert ends_of([*commands, *stack.tick(60)]) == set()
    assert killed(stack.ends("engine-6-rank0")) == {f"engine-{number}-rank0" for number in (3, 4, 5)}
    for number in (3, 4, 5, 1):
        stack.ends(f"engine-{number}-rank0")
    assert started(stack.ends("engine-2-rank0")) == {"engine-1-rank0", "engine-2-rank0"}, "what serves still, goes on"
    stack.tick(60)
    ready = [command for instance in list(stack.pids) for command in stack.hears(instance, "ready")]
    assert ends_of(ready) == {"engine-1", "engine-2"}
    assert isinstance(answer(stack.handle(ScaleRequested("engines", 4))), ScaleResult), "four are one group now"


def test_what_takes_the_place_of_others_may_be_given_up() -> None:
    stack = Simulation(Counts(engines=2, data_parallel=2)).all_ready()
    stack.handle(ScaleRequested("engines", 4, one_group=True))
    back = stack.handle(ScaleRequested("engines", 2, data_parallel_size=2))
    assert scaled(back).started == scaled(back).stopping == ()
    assert ends_of(back) == {f"engine-{number}" for number in range(3, 7)}
    refused = answer(
        Simulation(Counts(engines=2)).all_ready().handle(ScaleRequested("engines", 4, data_parallel_size=2))
    )
    assert isinstance(refused, ScaleRefusal)
    assert refused.message.startswith("data_parallel_size 2: is of stacks that were started with data-parallel groups")
