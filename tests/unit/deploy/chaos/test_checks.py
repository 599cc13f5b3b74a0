"""When a stack counts as whole and at rest, by what its processes say of themselves."""

from __future__ import annotations

import os

import msgspec

from deploy.chaos.checks import StackWatch, held
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import all_process_specs
from deploy.supervisor.processes import ProcessIdentity
from deploy.supervisor.state_file import recorded
from shared.messages.lifecycle import StoreReport
from tests.support.engines.coordinator_events import engine, life
from tests.unit.deploy.supervisor.test_state_file import SPEC, STATE

STORE = StoreReport(node="n", slots=8, committed=4, reserved=2, pinned=1, bytes_used=1, bytes_total=2, hits=0, misses=0)


def test_what_is_held_is_named() -> None:
    heard = {"engine-1": engine("engine-1", running=2, blocks_used=5), "kvstore-1": life("kvstore", "k", store=STORE)}
    assert held(heard) == {
        "engine-1: requests": 2,
        "engine-1: blocks": 5,
        "kvstore-1: pins": 1,
        "kvstore-1: reserved slots": 2,
    }
    assert held({"engine-1": engine("engine-1", blocks_used=0), "gateway-1": life("gateway", "gateway-1")}) == {}


async def test_a_stack_is_whole_when_each_process_that_is_to_be_there_says_that_it_is_ready() -> None:
    members = [SupervisedProcess(process, pid=7) for process in all_process_specs(SPEC.counts)]
    state = msgspec.structs.replace(STATE, members=tuple(map(recorded, members)))
    watch, names = StackWatch(), sorted(member.process.instance for member in members)
    assert watch.unready(state) == names
    for member in members:
        await watch.record(life(member.process.service, member.process.instance))
    assert watch.unready(state) == []
    await watch.record(life("gateway", "gateway-1", phase="draining"))
    await watch.record(life("tokenizer", "tokenizer-1", pid=6))  # the one before
    assert watch.unready(state) == ["gateway-1", "tokenizer-1"]


def test_a_server_whose_process_is_gone_is_not_back() -> None:
    state = msgspec.structs.replace(STATE, processes={"nats-server": ProcessIdentity(os.getpid(), 0.0)})
    assert StackWatch().unready(state) == ["nats-server"]
