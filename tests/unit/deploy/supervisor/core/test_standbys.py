"""Engines that stand by: started behind the others, promoted at once, replaced, and never more than wanted."""

from __future__ import annotations

from deploy.supervisor.core.events import LifecycleReceived, ReplyToScale, ScaleRequested, SetStandby, StartProcess
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import Counts
from deploy.supervisor.core.supervisor import Supervisor
from deploy.supervisor.state_file import recorded
from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase
from shared.messages.supervisor import ScaleResult
from tests.unit.deploy.supervisor.core.test_supervisor import Simulation, started


class StandbyStack(Simulation):
    """Processes do what they are told, as real ones do."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(counts)
        self.told: list[SetStandby] = []
        self.tick()
        self.obeys()
        self.obeys()

    def member(self, instance: str) -> SupervisedProcess:
        return next(m for m in self.supervisor.members() if m.process.instance == instance)

    def reports(self, instance: str, phase: Phase, *, standby: bool = False) -> None:
        message = Lifecycle(
            service="scheduler",
            instance=InstanceId(instance),
            incarnation=Incarnation(7),
            phase=phase,
            pid=self.pids[instance],
            host="h",
            started=0.0,
            standby=standby,
        )
        self.told += [c for c in self.handle(LifecycleReceived(message)) if isinstance(c, SetStandby)]

    def obeys(self) -> None:
        """Every engine is loaded, and is what it is to be."""
        for each in list(self.supervisor.members()):
            is_standby = each.standby and each.process.service == "scheduler"
            self.reports(each.process.instance, "draining" if is_standby else "ready", standby=is_standby)

    def standing_by(self) -> set[str]:
        return {m.process.instance for m in self.supervisor.members() if m.standby}

    def scaled(self, count: int, pool: str = "engines") -> tuple[ScaleResult, list[SetStandby]]:
        commands = self.handle(ScaleRequested(pool, count))
        (answer,) = (c.answer for c in commands if isinstance(c, ReplyToScale))
        assert isinstance(answer, ScaleResult)
        return answer, [c for c in commands if isinstance(c, SetStandby)]


def test_a_standby_is_started_behind_a_stack_that_is_ready() -> None:
    stack = Simulation(Counts(standby=1))
    assert "engine-2" not in started(stack.tick())
    for instance in list(stack.pids)[:-1]:
        stack.says(instance, "ready")
    message = Lifecycle(
        service="gateway",
        instance=InstanceId(list(stack.pids)[-1]),
        incarnation=Incarnation(7),
        phase="ready",
        pid=list(stack.pids.values())[-1],
        host="h",
        started=0.0,
    )
    commands = stack.handle(LifecycleReceived(message))
    assert {(c.process.instance, c.standby) for c in commands if isinstance(c, StartProcess)} == {
        ("engine-2", True),
        ("engine-2-rank0", True),
    }


def test_scaling_up_takes_the_standby_and_another_is_started_behind_it() -> None:
    stack = StandbyStack(Counts(standby=1))
    assert stack.standing_by() == {"engine-2", "engine-2-rank0"}
    answer, told = stack.scaled(2)
    assert answer == ScaleResult(started=(InstanceId("engine-2"), InstanceId("engine-2-rank0")), stopping=())
    assert told == [SetStandby(InstanceId("engine-2"), False)]
    assert stack.standing_by() == {"engine-3", "engine-3-rank0"}
    stack.reports("engine-2", "draining", standby=True)
    assert stack.told == told, "told again until it has heard"
    stack.reports("engine-2", "ready")
    assert stack.told == told
    stack.obeys()
    answer, _ = stack.scaled(1)
    assert answer.started == ()
    assert InstanceId("engine-2") in answer.stopping
    assert stack.standing_by() == {"engine-3", "engine-3-rank0"}, "who stands by stays"


def test_more_than_stand_by_are_started_as_ever() -> None:
    stack = StandbyStack(Counts(standby=1))
    answer, told = stack.scaled(3)
    assert answer.started == tuple(
        InstanceId(name) for name in ("engine-2", "engine-2-rank0", "engine-3", "engine-3-rank0")
    )
    assert [each.instance for each in told] == ["engine-2"]
    assert stack.standing_by() == {"engine-4", "engine-4-rank0"}


def test_an_engine_that_loses_a_rank_changes_places_with_the_standby() -> None:
    stack = StandbyStack(Counts(standby=1))
    commands = stack.ends("engine-1-rank0")
    assert {(c.instance, c.standby) for c in commands if isinstance(c, SetStandby)} == {
        ("engine-2", False),
        ("engine-1", True),
    }
    assert stack.standing_by() == {"engine-1", "engine-1-rank0"}
    assert [(c.process.instance, c.standby) for c in commands if isinstance(c, StartProcess)] == [
        ("engine-1-rank0", True)
    ]
    stack.reports("engine-1", "starting", standby=True)
    stack.reports("engine-2", "ready")
    assert stack.told == []
    stack.obeys()
    assert stack.standing_by() == {"engine-1", "engine-1-rank0"}, "as many as before, of each"


def test_without_a_loaded_standby_an_engine_is_restarted_where_it_is() -> None:
    stack = StandbyStack(Counts(standby=1))
    stack.ends("engine-2-rank0")
    stack.reports("engine-2", "starting", standby=True)
    commands = stack.ends("engine-1-rank0")
    assert not [c for c in commands if isinstance(c, SetStandby)]
    assert stack.standing_by() == {"engine-2", "engine-2-rank0"}


def test_who_is_undrained_by_an_operator_serves_and_is_replaced() -> None:
    stack = StandbyStack(Counts(standby=1))
    stack.reports("engine-2", "ready")
    assert stack.told == []
    assert stack.standing_by() == {"engine-3", "engine-3-rank0"}
    answer, _ = stack.scaled(1)
    assert len(answer.stopping) == 2, "two serve, one shall"


def test_the_next_supervisor_knows_who_stands_by() -> None:
    stack = StandbyStack(Counts(standby=1))
    members = [recorded(member).member() for member in stack.supervisor.members()]
    successor = Supervisor(Counts(standby=1))
    successor.adopt(members, settled=True, requested={})
    assert {m.process.instance for m in successor.members() if m.standby} == stack.standing_by()


def test_each_pool_has_standbys_of_its_own_role() -> None:
    counts = Counts(engines=0, prefill=1, decode=2, standby=1)
    assert (counts.all_engines, counts.all_ranks) == (5, 5)
    stack = StandbyStack(counts)
    assert stack.standing_by() == {"prefill-2", "prefill-2-rank0", "decode-3", "decode-3-rank0"}
    commands = stack.ends("decode-1-rank0")
    assert {(c.instance, c.standby) for c in commands if isinstance(c, SetStandby)} == {
        ("decode-3", False),
        ("decode-1", True),
    }
    stack.obeys()
    answer, told = stack.scaled(2, "prefill")
    assert answer.started == ("prefill-2", "prefill-2-rank0")
    assert told == [SetStandby(InstanceId("prefill-2"), False)]
    stack.obeys()
    assert stack.standing_by() == {"prefill-3", "prefill-3-rank0", "decode-1", "decode-1-rank0"}


def test_a_pool_without_engines_has_none_that_stand_by() -> None:
    assert StandbyStack(Counts(engines=1, standby=1)).standing_by() == {"engine-2", "engine-2-rank0"}
