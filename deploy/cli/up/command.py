"""How `baton up` is typed: the settings of the stack and of its services, and what is the command's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli import end_at_once, raise_interrupt
from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of
from deploy.cli.up.assignments import parsed_settings
from deploy.cli.up.choices import stack_spec
from deploy.cli.up.models import split_assignments
from deploy.cli.up.options import Detach, StackAssignments, offers, with_options
from deploy.cli.up.sources import unread_variables
from deploy.errors import CommandError
from deploy.supervisor.background import check_free, start_in_background
from shared.config import process_environment, replace_environment
from shared.machine.home import expanded


def up(
    *,
    settings: StackAssignments = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file that every service reads.", exists=True, dir_okay=False)
    ] = None,
    detach: Detach = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
    **typed: Any,
) -> None:
    """Start everything on this machine: bus, gateway, tokenizer, coordinator, engines, KV store, detokenizer."""
    end_at_once()
    for line in unread_variables(process_environment()):
        print(line, file=sys.stderr)
    where = run_dir_of(name, run_dir)
    if detach:
        check_run_dir(where)
        check_free(where)
    else:
        from deploy.cli.up.run import run_stack

    if (folder := typed.get("download_dir")) is not None:
        fetch_to(folder)
    asked = split_assignments(settings or [])
    assigned, models = parsed_settings(asked.shared), typed.pop("model") or []
    spec = stack_spec(typed, assigned, name=name, run_dir=where, config=config, models=models, own=asked.own)
    raise_interrupt()
    check_run_dir(where)
    if detach:
        start_in_background(where, spec)
        named = "" if name == DEFAULT else f" --name {name}"
        down = f"baton down{named}" if run_dir is None else f"baton down --run-dir {run_dir}"
        print(f"\nIt runs in the background; stop it with: {down}")
        return
    run_stack(spec, ready_fd)


def fetch_to(folder: str) -> None:
    """Has this process, and those that it starts, look for repositories of the hub in `folder`, which need not exist;
    the hub's library reads that as it is loaded."""
    replace_environment({**process_environment(), "HF_HUB_CACHE": str(expanded(folder).absolute())})


def check_run_dir(path: Path) -> None:
    """Makes the folder where there is none. Raises CommandError where it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "it may not be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise CommandError(f"--run-dir {path}: {reason}; logs and the state of the stack lie there", status=2)


SEVERAL_MODELS = "Several, each as NAME=PATH_OR_ID: a stack of several models."
with_options(up, ({**offers(), "model": offers()["model"]._replace(more=SEVERAL_MODELS)}).values())
