"""What several commands share of their command line: which stack, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import CommandError
from deploy.supervisor.state_file import StackState, default_run_dir, is_held, read_state
from shared.config import home_folder
from shared.machine.home import expanded

Name = Annotated[str, typer.Option("--name", help="Name of the stack.", envvar="BATON_NAME")]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Directory of the stack's logs and state. Default: ~/.local/state/baton/NAME."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
DEFAULT = "default"
KubernetesUrl = Annotated[
    str | None,
    typer.Option(
        "--kubernetes",
        envvar="BATON_KUBERNETES_URL",
        help="URL of `kubectl proxy`, e.g. http://127.0.0.1:8001: scales the pods of deploy/kubernetes there.",
    ),
]
KubernetesNamespace = Annotated[str, typer.Option("--kubernetes-namespace", help="With --kubernetes: their namespace.")]


# Which running stack a command means: the one named, in the run directory given or its usual place.


def run_dir_of(name: str, run_dir: Path | None) -> Path:
    """Raises CommandError for a name that is none."""
    if run_dir is not None:
        return expanded(run_dir).absolute()
    try:
        return default_run_dir(name, home_folder())
    except OSError as error:
        raise CommandError(f"{error}, or give --run-dir", status=2) from None
    except ValueError as error:
        raise CommandError(str(error), status=2) from None


def running_stack(name: str, run_dir: Path | None) -> StackState:
    """Raises CommandError where none runs."""
    where = run_dir_of(name, run_dir)
    state = read_state(where)
    if state is None:
        others = [] if run_dir is not None else _running_beside(where)
        hint = f"; running here: {', '.join(others)} (--name NAME)" if others else "; start one with: baton up"
        raise CommandError(f"no stack runs in {where}{hint}")
    return state


def _running_beside(where: Path) -> list[str]:
    """Names of the stacks that run in the usual places."""
    if not where.parent.is_dir():
        return []
    return sorted(folder.name for folder in where.parent.iterdir() if read_state(folder) or is_held(folder))
