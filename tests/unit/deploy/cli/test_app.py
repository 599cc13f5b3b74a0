"""The list of commands says of each what the command says of itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from deploy.cli.app import COMMANDS, command_line, loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_as_it_describes_itself(name: str) -> None:
    described = (loaded(name).help or "").split("\n\n")[0]
    assert "".join(described.split()) == "".join(COMMANDS[name].help.split())


def test_listing_the_commands_loads_none_of_them() -> None:
    program = (
        "import sys, deploy.cli.app as app; app.command_line().main(['--help'], standalone_mode=False);"
        "print(*(name for name in sys.modules if name in {listed.module for listed in app.COMMANDS.values()}))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines()[-1] == ""


def test_whoever_supervises_a_stack_carries_nothing_of_its_services() -> None:
    program = "import sys, deploy.cli.up.command, deploy.cli.up.run; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    only_for_services = {"services.scheduler.core.engine", "services.gateway.api.chat", "services.gateway.http.call"}
    libraries = {"numpy", "tokenizers", "jinja2", "cryptography"}
    assert not set(said.stdout.split()) & (only_for_services | libraries)


def test_a_supervisor_in_the_background_carries_nothing_of_the_command_line() -> None:
    program = "import sys, deploy.cli.up.__main__, deploy.cli.up.run; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {name.partition(".")[0] for name in said.stdout.split()} & {"typer", "click", "rich", "pydantic"}


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    command_line().main(["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"baton {version('baton-serve')}\n"


@pytest.mark.parametrize(("typed", "meant"), [("pss", "'ps'"), ("serve", "`baton up`"), ("run-batch", "`baton batch`")])
def test_a_name_that_is_none_is_met_with_what_it_may_have_meant(typed: str, meant: str) -> None:
    with pytest.raises(Exception, match=f"No such command '{typed}'.*{meant}"):
        command_line().main([typed], standalone_mode=False)


@pytest.mark.parametrize(
    ("typed", "found"),
    [("baton sca", "scale"), ("baton lora lo", "load"), ("baton up --kvstore-mem", "--kvstore-memory")],
)
def test_a_shell_completes_commands_and_their_options(
    typed: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the function asks that `baton --install-completion` gives to bash."""
    for name, value in (("_BATON_COMPLETE", "complete_bash"), ("COMP_WORDS", typed), ("COMP_CWORD", typed.count(" "))):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit):
        command_line().main([], prog_name="baton")
    assert capsys.readouterr().out.split() == [found]
