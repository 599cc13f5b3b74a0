"""What `~` stands for, and what is said where it stands for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.machine.home import NoHome, expanded
from tests.support.paths import REPOSITORY


def test_a_path_begins_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/models/a") == expanded(Path("~/models/a")) == tmp_path / "models" / "a"
    assert expanded("models/~") == Path("models/~")


def test_a_home_of_nobody_is_named() -> None:
    with pytest.raises(NoHome, match=r"'~no-such-user/a': there is no home .* allowed: a path without it, or HOME=DIR"):
        expanded("~no-such-user/a")


def test_a_command_says_so_in_a_line() -> None:
    baton = [sys.executable, "-m", "deploy.cli"]
    done = subprocess.run(
        [*baton, "ps", "--run-dir", "~no-such-user/x"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("baton: '~no-such-user/x': there is no home that ~ could stand for")
    assert done.stderr.count("\n") == 1
