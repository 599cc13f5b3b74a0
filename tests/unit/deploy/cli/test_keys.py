"""`baton keys` makes keys whose secrets are nowhere but on the screen."""

from __future__ import annotations

import contextlib
import io
import re
import stat
from pathlib import Path

import pytest

from deploy.cli.app import loaded
from deploy.errors import CommandError
from services.gateway.core.api_keys import KeyRing, read_keys


def run(file: Path, *argv: str) -> str:
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loaded("keys").main([*argv, "--keys-file", str(file)], standalone_mode=False)
    return printed.getvalue()


def test_a_new_key_is_printed_once_and_works_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    secrets = [
        run(file, "new", name, *more).strip()
        for name, more in (("alice", ()), ("ops", ("--scope", "admin", "--scope", "inference", "--model", "m")))
    ]
    assert all(re.fullmatch(r"sk-baton-[\w-]{43}", secret) for secret in secrets)
    ring = KeyRing(read_keys(file.read_text()))
    found = [ring.find(secret.encode()) for secret in secrets]
    assert [key and (key.name, sorted(key.scopes), key.models) for key in found] == [
        ("alice", ["inference"], None),
        ("ops", ["admin", "inference"], {"m"}),
    ]
    assert not any(secret in file.read_text() for secret in secrets)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [line.split()[0] for line in run(file, "list").splitlines()] == ["alice", "ops"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("new", "alice"), "there is a key of this name already"),
        (("new", "a/b"), "is no name of a key"),
        (("new",), "a name is expected"),
        (("new", "bob", "--scope", "root"), "'root'.*; allowed are inference, read-only, admin"),
        (("new", "bob", "--priority-ceiling", "3000000000"), "priority_ceiling"),
    ],
)
def test_what_makes_no_key_changes_nothing(tmp_path: Path, argv: tuple[str, ...], says: str) -> None:
    file = tmp_path / "keys.toml"
    run(file, "new", "alice")
    before = file.read_text()
    with pytest.raises(CommandError, match=says):
        run(file, *argv)
    assert file.read_text() == before


def test_a_file_that_is_not_there_has_no_list(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        run(tmp_path / "none.toml", "list")
