"""Engines whose ranks are on several hosts: who runs what, and what a death anywhere leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.cli.up.other_hosts import check_outside_bus, hosts_choice
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
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import HostsSpec, TlsFiles
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


TOKEN = "0123456789abcdef"


def chosen(
    outside_bus: bool = False, ranks: int = 2, kvstore_memory: str | None = None, **typed: Any
) -> HostsSpec | None:
    given = {"nodes": 2, "master": "10.0.0.1:4222", "cluster_token": TOKEN, "insecure": True}
    stack = StackSettings(**{**given, **typed})
    return hosts_choice(stack, outside_bus=outside_bus, ranks=ranks, kvstore_memory=kvstore_memory)


def test_hosts_are_what_was_typed() -> None:
    assert chosen() == HostsSpec(master="10.0.0.1", port=4222, token=TOKEN)
    assert chosen(nodes=1) is None
    assert chosen(outside_bus=True, cluster_token=None, kvstore_memory="0") == HostsSpec(master="10.0.0.1", port=4222)


def test_a_bus_beyond_the_host_is_encrypted_unless_it_may_be_insecure(tmp_path: Path) -> None:
    authority, certificate, key = (str(tmp_path / name) for name in ("ca.pem", "h.pem", "h.key"))
    for path in (authority, certificate, key):
        Path(path).touch()
    for host, given in ((0, {}), (1, {}), (0, {"tls_ca": authority})):
        with pytest.raises(CommandError, match="unencrypted"):
            chosen(insecure=False, node_rank=host, **given)
    first = chosen(insecure=False, tls_ca=authority, tls_cert=certificate, tls_key=key)
    assert first is not None
    assert first.tls == TlsFiles(authority=authority, certificate=certificate, key=key)
    other = chosen(insecure=False, node_rank=1, tls_ca=authority)
    assert other is not None
    assert other.tls == TlsFiles(authority=authority)
    assert chosen(insecure=False, master="127.0.0.1:4222") is not None
    assert chosen(insecure=False, outside_bus=True) is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tls_cert": "h.pem", "tls_ca": "ca.pem"}, "--tls-cert and --tls-key together"),
        ({"tls_cert": "h.pem", "tls_key": "h.key"}, "--tls-ca is for every host"),
        ({"tls_ca": "elsewhere.pem"}, "--tls-ca .*elsewhere.pem: there is no such file"),
    ],
)
def test_files_of_tls_are_given_together_and_are_there(
    given: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ca.pem", "h.pem", "h.key"):
        Path(name).touch()
    with pytest.raises(CommandError, match=named):
        chosen(**given)


def test_ranks_meet_on_a_private_network_only(tmp_path: Path) -> None:
    path = tmp_path / "file.pem"
    path.touch()
    files = {"tls_ca": str(path), "tls_cert": str(path), "tls_key": str(path)}
    with pytest.raises(CommandError, match="private network"):
        chosen(insecure=False, master="8.8.8.8:4222", **files)
    with pytest.raises(CommandError, match="private network"):
        chosen(insecure=False, master="8.8.8.8:4222", outside_bus=True)
    assert chosen(master="8.8.8.8:4222") is not None


@pytest.mark.parametrize("url", ["nats://10.0.0.1:4222", "10.0.0.1", "ws://nats.example.com"])
def test_an_external_bus_beyond_the_host_is_encrypted_unless_it_may_be_insecure(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandError, match="unencrypted"):
        check_outside_bus(["tls://nats.example.com", url], insecure=False)
    check_outside_bus([url], insecure=True)
    check_outside_bus(["tls://nats.example.com", "wss://nats.example.com", "nats://127.0.0.1:4222"], insecure=False)
    monkeypatch.setenv("BATON_NATS_CA", "ca.pem")
    check_outside_bus([url], insecure=False)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"node_rank": 2}, "--node-rank 2"),
        ({"nodes": 1, "node_rank": 1}, "--node-rank 1"),
        ({"ranks": 1}, "1 ranks"),
        ({"prefill": 1}, "pools"),
        ({"kvstore_memory": "1GiB"}, "KV store"),
        ({"cluster_token": None}, "BATON_CLUSTER_TOKEN"),
        ({"cluster_token": "short"}, "BATON_CLUSTER_TOKEN"),
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
