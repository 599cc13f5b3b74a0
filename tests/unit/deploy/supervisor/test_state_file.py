"""The file by which a running stack is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import Counts, all_process_specs
from deploy.supervisor.processes import ProcessIdentity, start_time
from deploy.supervisor.spec import EmbeddedRedis, ModelSpec, StackSpec, StoreSpec
from deploy.supervisor.state_file import StackState, held, last_state, read_state, recorded, write_state
from shared.ids import EngineId, ModelName

SPEC = StackSpec(
    name="s",
    run_dir=Path("/r"),
    model=Path("/m"),
    served_model_name=ModelName("m"),
    host="127.0.0.1",
    port=0,
    counts=Counts(ranks=2, kvstore=1),
    store=StoreSpec(redis=EmbeddedRedis(memory=1)),
    settings={"worker": {"device": "cpu"}},
    config=Path("/c.toml"),
    namespace="baton",
    log_level="info",
    drain_timeout=1.0,
    start_timeout=1.0,
)
STATE = StackState(
    name="s",
    pid=1,
    phase="ready",
    url="http://127.0.0.1:8000",
    model="m",
    model_dir="/m",
    api_key=None,
    namespace="baton",
    nats_url=(),
    nats_user=None,
    nats_password=None,
    nats_pid=None,
    started=0.0,
    spec=SPEC,
    port=8000,
    rendezvous={EngineId("engine-1"): "h:1"},
)


def test_a_state_is_read_as_it_was_written_with_all_that_a_successor_needs(tmp_path: Path) -> None:
    members = [SupervisedProcess(process, device=1, restarts=2) for process in all_process_specs(SPEC.counts)]
    state = msgspec.structs.replace(STATE, members=tuple(map(recorded, members)))
    write_state(tmp_path, state)
    assert last_state(tmp_path) == state
    assert [record.member() for record in state.members] == members


def test_groups_of_a_supervisor_that_wrote_no_sizes_have_those_of_their_engines(tmp_path: Path) -> None:
    counts = Counts(engines=6, ranks=2, data_parallel=3)
    members = [SupervisedProcess(process) for process in all_process_specs(counts)]
    write_state(tmp_path, msgspec.structs.replace(STATE, members=tuple(map(recorded, members))))
    old = json.loads((tmp_path / "state.json").read_text())
    for record in old["members"]:
        del record["group_size"], record["group_index"]
    (tmp_path / "state.json").write_text(json.dumps(old))
    state = last_state(tmp_path)
    assert state is not None
    assert [record.member() for record in state.members] == members
    assert {record.group_size for record in state.members if record.pool} == {3}


def test_so_is_that_of_several_models(tmp_path: Path) -> None:
    own = ModelSpec(name=ModelName("org/b"), model=Path("/b"), counts=Counts(model=ModelName("org/b"), gateway=0))
    spec = msgspec.structs.replace(SPEC, models=(own,))
    members = [SupervisedProcess(process) for process in spec.planned()]
    state = msgspec.structs.replace(STATE, spec=spec, members=tuple(map(recorded, members)))
    write_state(tmp_path, state)
    assert last_state(tmp_path) == state
    assert [record.member() for record in state.members] == members
    assert state.names == ("org/b",)
    assert {member.process.model for member in members} == {None, "org/b"}


def test_a_stack_runs_while_its_supervisor_or_one_of_its_processes_lives(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) is None
    with held(tmp_path):
        assert read_state(tmp_path) == STATE
    started = start_time(os.getpid())
    assert started is not None
    for of_this_process, runs in ((started, True), (started - 1, False)):
        identity = ProcessIdentity(os.getpid(), of_this_process)
        state = msgspec.structs.replace(STATE, processes={"gateway-1": identity})
        write_state(tmp_path, state)
        assert read_state(tmp_path) == (state if runs else None)
