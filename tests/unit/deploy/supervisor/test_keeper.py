"""A keeper ends a stack whose supervisor is gone, and takes hardly any memory until then."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.supervisor.keeper import keeper_command

DEADLINE = 60.0


@pytest.mark.parametrize("tools", ["flock", "none"])
def test_a_keeper_becomes_the_command_once_nobody_holds_the_lock(
    tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tools == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    lock, ended = tmp_path / "lock", tmp_path / "ended"
    command = keeper_command(lock, 0.2, [sys.executable, "-c", f"open({str(ended)!r}, 'w')"])
    assert (command[0] == sys.executable) is (tools == "none")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        keeper = subprocess.Popen(command, start_new_session=True)
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(1.0)
        assert os.path.samefile(f"/proc/{keeper.pid}/exe", sys.executable) is (tools == "none")
    assert keeper.wait(DEADLINE) == 0
    assert ended.exists()


def test_a_supervisor_that_comes_back_keeps_its_stack(tmp_path: Path) -> None:
    lock, ended = tmp_path / "lock", tmp_path / "ended"
    lock.touch()
    keeper = subprocess.Popen(keeper_command(lock, 3.0, [sys.executable, "-c", f"open({str(ended)!r}, 'w')"]))
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # waits for as long as the keeper looks
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(4.5)
        assert not ended.exists()
    assert keeper.wait(DEADLINE) == 0
    assert ended.exists()
