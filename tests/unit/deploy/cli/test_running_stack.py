"""Which stack a command means, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.running_stack import running_stack
from deploy.errors import CommandError
from deploy.supervisor.state_file import default_run_dir, held


def test_stacks_of_other_names_are_named_where_the_one_meant_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CommandError, match=r"no stack runs in .*default; start one with: baton up"):
        running_stack("default", None)
    with held(default_run_dir("first", tmp_path)), held(default_run_dir("second", tmp_path)):
        with pytest.raises(CommandError, match=r"default; running here: first, second \(--name NAME\)"):
            running_stack("default", None)
        with pytest.raises(CommandError, match="baton up"):
            running_stack("default", tmp_path / "elsewhere")


def test_a_user_without_a_home_has_to_say_where_the_stack_is(homeless: None) -> None:
    with pytest.raises(CommandError, match=r"user [0-9]+ has no home: set HOME, or give --run-dir"):
        running_stack("default", None)
