"""What each fault strikes in a stack, by the rows of the matrix, and which errors it may cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deploy.chaos.faults.choice import FAULTS, chosen_faults, needs_of
from deploy.chaos.run import ChaosOptions, ChaosRun
from deploy.chaos.schedule import Case
from deploy.chaos.stack import ChaosStack
from deploy.errors import CommandError
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import Counts, all_process_specs
from deploy.supervisor.processes import ProcessIdentity, start_time
from deploy.supervisor.state_file import held, recorded, write_state
from tests.unit.deploy.supervisor.test_state_file import SPEC, STATE

COUNTS = Counts(gateway=2, engines=2, ranks=2, prefill=1, prefill_ranks=1, kvstore=1)
ACTORS = {
    "coordinator",
    "detokenizer",
    "gateway",
    "kvstore",
    "prefill rank 0",
    "prefill scheduler",
    "rank 0",
    "rank 1",
    "scheduler",
    "tokenizer",
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ChaosStack]:
    """One that only stands in a state file; its servers are this very process."""
    me = ProcessIdentity(os.getpid(), start_time(os.getpid()) or 0.0)
    members = tuple(recorded(SupervisedProcess(process, pid=7)) for process in all_process_specs(COUNTS))
    servers = {"nats-server": me, "redis-server": me, "keeper": me}
    spec = msgspec.structs.replace(SPEC, counts=COUNTS)
    with held(tmp_path):
        write_state(tmp_path, msgspec.structs.replace(STATE, spec=spec, members=members, processes=servers))
        yield ChaosStack(tmp_path, [])


def test_every_service_rank_and_server_has_a_row(stack: ChaosStack) -> None:
    servers = {"keeper", "nats-server", "redis-server"}
    assert set(FAULTS["kill"].targets(stack)) == ACTORS | servers | {"supervisor"}
    assert set(FAULTS["pause"].targets(stack)) == ACTORS | servers | {"supervisor"}
    assert set(FAULTS["terminate"].targets(stack)) == ACTORS | servers - {"keeper"}
    assert set(FAULTS["stop"].targets(stack)) == ACTORS
    assert set(FAULTS["cut"].targets(stack)) == ACTORS | {"bus"}
    assert FAULTS["kill"].targets(stack)["rank 1"] == ["engine-1-rank1", "engine-2-rank1"]
    assert set(FAULTS["weights-missing"].targets(stack)) == {"rank 0", "rank 1", "prefill rank 0"}
    assert FAULTS["scale-drain"].targets(stack) == {"": ["engine-1", "engine-2"]}
    assert FAULTS["calm"].targets(stack) == {"": ["nobody"]}


@pytest.mark.parametrize(
    ("fault", "victim", "errors"),
    [
        ("kill", "gateway-1", {"refused", "connection"}),
        ("pause", "gateway-1", {"refused"}),
        ("kill", "tokenizer-1", {"refused"}),
        ("kill", "engine-1-rank0", set()),
        ("kill", "prefill-1", set()),
        ("kill", "kvstore-1", set()),
        ("kill", "redis-server", set()),
        ("kill", "supervisor", set()),
        ("kill", "nats-server", {"refused"}),
        ("cut", "bus", {"refused"}),
        ("cut", "gateway-1", {"refused"}),
        ("cut", "engine-2", set()),
        ("bad-requests", "gateways", set()),
    ],
)
def test_only_what_has_no_other_of_its_kind_may_cost_an_error(
    stack: ChaosStack, fault: str, victim: str, errors: set[str]
) -> None:
    assert FAULTS[fault].allowed(stack, victim) == errors


def test_a_run_strikes_the_targets_that_were_named(stack: ChaosStack) -> None:
    options = ChaosOptions(seed=0, duration=1.0, clients=1, tokens=2)
    run = ChaosRun(stack, chosen_faults("kill:rank 1,stop:gateway,redis-loss"), options)
    assert run.cases == [Case("kill", "rank 1"), Case("stop", "gateway")]
    assert set(run.skipped) == {"redis-loss"}
    with pytest.raises(CommandError, match="kill:rank 7: its targets are "):
        ChaosRun(stack, chosen_faults("kill:rank 7"), options)


def test_deadlines_are_those_after_which_the_product_notices(stack: ChaosStack) -> None:
    deadlines = {name: FAULTS[name].deadline(stack, "engine-1") for name in ("kill", "stop", "pause", "cut")}
    assert deadlines == {"kill": 0.0, "stop": SPEC.silence_limit, "pause": 3.0, "cut": 3.0}


def test_what_cannot_be_done_says_why(stack: ChaosStack) -> None:
    skipped = {name: why for name, fault in FAULTS.items() if (why := fault.missing(stack))}
    assert set(skipped) == {"redis-session", "redis-loss", "link-down", "low-rate", "full-disk", "clock-jump"}
    assert "--redis" in skipped["redis-loss"]
    assert "libfaketime" in skipped["clock-jump"]
    assert "not permitted" in skipped["link-down"]


def test_a_stack_is_made_with_what_its_faults_need() -> None:
    assert needs_of(chosen_faults("kill,stop")) == set()
    assert needs_of(chosen_faults("cut,weights-missing")) == {"proxy", "model copy"}
    assert needs_of(chosen_faults(None)) == {"proxy", "model copy", "namespaces", "disk", "clock"}
