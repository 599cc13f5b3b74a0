"""Engines whose ranks are on several hosts: who runs what, and what a death anywhere leads to."""

from __future__ import annotations

import pytest

from deploy.cli.up.choices import hosts_choice
from deploy.errors import CommandError
from deploy.supervisor.core.events import (
    ClockTick,
    Command,
    KillProcess,
    ProcessExited,
    ProcessStarted,
    RanksLost,
    RanksRequested,
    ReplyToScale,
    ScaleRequested,
    StartProcess,
)
from deploy.supervisor.core.other_hosts import HOST_SILENCE_SECONDS, OtherHostRanks
from deploy.supervisor.core.plan import Counts, all_process_specs
from deploy.supervisor.core.supervisor import Supervisor
from deploy.supervisor.servers.nats_config import passwords_of
from deploy.supervisor.spec import HostsSpec
from shared.ids import EngineId, InstanceId
from shared.messages.supervisor import EngineRanks, RankStatus

ENGINE = EngineId("engine-1")
TWO = Counts(ranks=4, stages=2, hosts=2)
SECOND = Counts(ranks=4, stages=2, hosts=2, host=1)


def names(counts: Counts) -> set[str]:
    return {str(process.instance) for process in all_process_specs(counts)}


def started(commands: list[Command]) -> list[str]:
    return [str(command.process.instance) for command in commands if isinstance(command, StartProcess)]


def killed(commands: list[Command]) -> list[str]:
    return [str(command.instance) for command in commands if isinstance(command, KillProcess)]


class Host:
    """A supervisor whose processes start and end as told."""

    def __init__(self, counts: Counts) -> None:
        self.supervisor = Supervisor(counts)
        self.now = 0.0

    def tell(self, *events: object) -> list[Command]:
        commands: list[Command] = []
        for event in events:
            commands += self.supervisor.handle(event, self.now)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, StartProcess):
                self.supervisor.handle(ProcessStarted(command.process.instance, 7), self.now)
        return commands

    def end(self, *instances: str) -> list[Command]:
        self.now += 1.0
        return self.tell(*(ProcessExited(InstanceId(instance), -9) for instance in instances))


def test_the_first_host_runs_everything_and_its_ranks_the_others_ranks_alone() -> None:
    assert names(TWO) >= {"gateway-1", "engine-1", "engine-1-rank0", "engine-1-rank1"}
    assert not names(TWO) & names(SECOND)
    assert names(SECOND) == {"engine-1-rank2", "engine-1-rank3"}


def test_ranks_that_do_not_divide_are_spread_as_evenly_as_can_be() -> None:
    parts = [Counts(ranks=5, hosts=3, host=host).ranks_here("engines") for host in range(3)]
    assert [rank for part in parts for rank in part] == list(range(5))
    assert sorted(map(len, parts)) == [1, 2, 2]


def test_another_hosts_ranks_start_when_they_are_called_and_not_before() -> None:
    host = Host(SECOND)
    assert started(host.tell(ClockTick())) == []
    assert started(host.tell(RanksRequested(ENGINE, "h:1"))) == ["engine-1-rank2", "engine-1-rank3"]
    assert list(host.supervisor.answered()) == [(ENGINE, "h:1", True)]
    assert host.tell(RanksRequested(ENGINE, "h:1"), ClockTick()) == [], "said again, it is the same start"


def test_a_dead_rank_takes_its_neighbours_along_and_they_wait_for_the_next_call() -> None:
    host = Host(SECOND)
    host.tell(RanksRequested(ENGINE, "h:1"))
    assert killed(host.end("engine-1-rank3")) == ["engine-1-rank2"]
    assert started(host.end("engine-1-rank2")) == []
    assert list(host.supervisor.answered()) == [(ENGINE, "h:1", False)]
    host.now += 60
    assert started(host.tell(ClockTick())) == []
    assert started(host.tell(RanksRequested(ENGINE, "h:2"))) == ["engine-1-rank2", "engine-1-rank3"]
    assert list(host.supervisor.answered()) == [(ENGINE, "h:2", True)]


def test_a_new_call_ends_what_runs_and_starts_it_anew() -> None:
    host = Host(SECOND)
    host.tell(RanksRequested(ENGINE, "h:1"))
    assert killed(host.tell(RanksRequested(ENGINE, "h:2"))) == ["engine-1-rank2", "engine-1-rank3"]
    assert list(host.supervisor.answered()) == [], "neither runs nor is lost"
    assert started(host.end("engine-1-rank2", "engine-1-rank3")) == ["engine-1-rank2", "engine-1-rank3"]


def test_ranks_lost_elsewhere_start_ours_anew_at_another_place() -> None:
    host = Host(TWO)
    host.tell(ClockTick())
    assert killed(host.tell(RanksLost(ENGINE))) == ["engine-1-rank0", "engine-1-rank1"]
    again = host.end("engine-1-rank0", "engine-1-rank1")
    assert started(again) == ["engine-1-rank0", "engine-1-rank1"]
    assert [c.new_rendezvous for c in again if isinstance(c, StartProcess)] == [True, False]


def test_engines_over_several_hosts_are_not_scaled() -> None:
    answer = Host(TWO).tell(ScaleRequested("engines", 2))[0]
    assert isinstance(answer, ReplyToScale)
    assert "cannot be scaled" in str(answer.answer)


CURRENT = {ENGINE: "h:1"}


def held(*rendezvous: str, lost: tuple[str, ...] = ()) -> RankStatus:
    return RankStatus(
        1, tuple(EngineRanks(ENGINE, each) for each in rendezvous), tuple(EngineRanks(ENGINE, each) for each in lost)
    )


def test_what_another_host_lost_of_the_present_start_is_lost_and_of_earlier_ones_is_not() -> None:
    companions = OtherHostRanks()
    assert companions.record_status(held(), CURRENT, 0.0) == [], "it has not started yet"
    assert companions.record_status(held(lost=("h:0",)), CURRENT, 0.0) == []
    assert companions.record_status(held("h:1"), CURRENT, 1.0) == []
    assert companions.record_status(held(lost=("h:1",)), CURRENT, 2.0) == [ENGINE]


def test_a_host_that_knows_nothing_of_what_it_ran_was_started_anew() -> None:
    companions = OtherHostRanks()
    companions.record_status(held("h:1"), CURRENT, 0.0)
    assert companions.record_status(held(), CURRENT, 1.0) == [ENGINE]
    assert companions.record_status(held(), CURRENT, 2.0) == [], "once"


def test_a_silent_host_is_lost_once() -> None:
    companions = OtherHostRanks()
    companions.record_status(held("h:1"), CURRENT, 0.0)
    assert companions.silent(CURRENT, HOST_SILENCE_SECONDS) == []
    assert companions.silent(CURRENT, HOST_SILENCE_SECONDS + 1) == [ENGINE]
    assert companions.silent(CURRENT, HOST_SILENCE_SECONDS + 2) == []


def chosen(**options: object) -> HostsSpec | None:
    given = {
        "nodes": 2,
        "node_rank": 0,
        "master": "10.0.0.1:4222",
        "token": "0123456789abcdef",
        "outside_bus": False,
        "ranks": 2,
        "pools": 0,
        "kvstore_memory": None,
    }
    return hosts_choice(**{**given, **options})  # type: ignore[arg-type]


def test_hosts_are_what_was_typed() -> None:
    assert chosen() == HostsSpec(master="10.0.0.1", port=4222, token="0123456789abcdef")
    assert chosen(nodes=1) is None
    assert chosen(outside_bus=True, token=None, kvstore_memory="0") == HostsSpec(master="10.0.0.1", port=4222)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"node_rank": 2}, "--node-rank 2"),
        ({"nodes": 1, "node_rank": 1}, "--node-rank 1"),
        ({"ranks": 1}, "1 ranks"),
        ({"pools": 1}, "pools"),
        ({"kvstore_memory": "1GiB"}, "KV store"),
        ({"token": None}, "BATON_CLUSTER_TOKEN"),
        ({"token": "short"}, "BATON_CLUSTER_TOKEN"),
        ({"master": None}, "--master"),
        ({"master": "host"}, "--master host"),
        ({"master": "host:99999"}, "--master"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(CommandError, match=named):
        chosen(**wrong)


def test_all_hosts_find_the_same_passwords_and_each_service_another() -> None:
    one, other = passwords_of("a token of both"), passwords_of("a token of both")
    assert one == other
    assert len(set(one.values())) == len(one)
    assert passwords_of("another token of both") != one
