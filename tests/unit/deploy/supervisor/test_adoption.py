"""What nobody knows of any more is ended, with all that it has started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from deploy.supervisor.adoption import end_strays
from deploy.supervisor.processes import RUN_DIR_MARK
from deploy.supervisor.template.identity import NAME_MARK


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_stray_ends_with_what_it_waits_for(tmp_path: Path, stubborn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper is a shell that waits for `flock`, which waits for a supervisor's lock: for as long as that lives."""
    monkeypatch.setattr("deploy.supervisor.adoption.END_DEADLINE", 0.5)
    environment = {**os.environ, RUN_DIR_MARK: str(tmp_path), NAME_MARK: "keeper"}
    script = ("trap '' TERM; " if stubborn else "") + "sleep 1000 & echo $!; wait; true"
    with subprocess.Popen(
        ["sh", "-c", script], env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        waits = psutil.Process(int(shell.stdout.readline()))
        end_strays(tmp_path)
        assert shell.wait(0) < 0, "it has ended, by a signal"
        waits.wait(60)
