"""The file by which a running stack is found."""

from __future__ import annotations

from pathlib import Path

from deploy.supervisor.state_file import StackState, held, read_state, write_state

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
)


def test_what_a_killed_supervisor_left_is_not_taken_for_what_its_successor_says(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    with held(tmp_path):
        assert read_state(tmp_path) is None
        write_state(tmp_path, STATE)
        assert read_state(tmp_path) == STATE
    assert read_state(tmp_path) is None
