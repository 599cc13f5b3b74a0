"""An engine whose scheduler's process runs its rank, a coordinator and a detokenizer, too."""

from __future__ import annotations

from deploy.supervisor.core.events import (
    AnnounceDeath,
    KillProcess,
    ProcessesStalled,
    ProcessExited,
    StartProcess,
    StopRequested,
    TerminateProcess,
)
from deploy.supervisor.core.plan import Counts
from shared.ids import InstanceId
from tests.unit.deploy.supervisor.core.test_supervisor import Simulation

HOSTED = ("engine-1-rank0", "engine-1-coordinator", "engine-1-detokenizer")
COUNTS = Counts(colocate=True, coordinator=0, detokenizer=0)


def started() -> Simulation:
    """All processes run, and everything in them is ready."""
    simulation = Simulation(COUNTS)
    starts = [command for command in simulation.tick() if isinstance(command, StartProcess)]
    assert [start.process.instance for start in starts] == ["engine-1", "gateway-1", "tokenizer-1"]
    assert starts[0].device == 0, "its rank's"
    simulation.pids |= dict.fromkeys(HOSTED, simulation.pids["engine-1"])
    for name in ("engine-1", "gateway-1", "tokenizer-1"):
        simulation.hears(name, "ready")
    assert not simulation.supervisor.settled, "of the other actors nothing was heard"
    for name in HOSTED:
        simulation.hears(name, "ready")
    assert simulation.supervisor.settled
    return simulation


def test_with_the_process_all_its_actors_die_and_one_start_brings_all_back() -> None:
    simulation = started()
    commands = simulation.handle(ProcessExited(InstanceId("engine-1"), -9))
    announced = [command.lifecycle for command in commands if isinstance(command, AnnounceDeath)]
    assert [(life.instance, life.phase) for life in announced] == [(n, "failed") for n in (*HOSTED, "engine-1")]
    assert [c.process.instance for c in commands if isinstance(c, StartProcess)] == ["engine-1"]


def test_the_process_is_killed_once_where_some_of_its_actors_hang() -> None:
    simulation = started()
    commands = simulation.handle(ProcessesStalled((InstanceId("engine-1-rank0"), InstanceId("engine-1"))))
    assert commands == [KillProcess(InstanceId("engine-1"))]


def test_what_an_actor_of_a_former_process_said_counts_no_more() -> None:
    simulation = started()
    late = simulation.message("engine-1-rank0", "ready")
    simulation.handle(ProcessExited(InstanceId("engine-1"), 1))
    member = simulation.supervisor.member(InstanceId("engine-1-rank0"))
    assert member is simulation.supervisor.member(InstanceId("engine-1"))
    assert member is not None
    assert (member.hosted, late.pid == member.pid) == ({}, False)
    assert simulation.supervisor.looks_after(InstanceId("engine-1-coordinator"))


def test_it_ends_behind_the_gateways_and_as_one() -> None:
    simulation = started()
    assert simulation.handle(StopRequested()) == [TerminateProcess(InstanceId("gateway-1"))]
    commands = simulation.handle(ProcessExited(InstanceId("gateway-1"), 0))
    assert commands == [TerminateProcess(InstanceId("engine-1")), TerminateProcess(InstanceId("tokenizer-1"))]
