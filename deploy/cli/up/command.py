"""How `baton up` is typed: the settings of the stack and of its services, and what is the command's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli import end_at_once, raise_interrupt
from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of
from deploy.cli.up.assignments import parsed_settings
from deploy.cli.up.choices import stack_spec
from deploy.cli.up.models import split_assignments
from deploy.cli.up.options import DETACH, Detach, StackAssignments, offers, with_options


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
    where = run_dir_of(name, run_dir)
    if detach:
        from deploy.supervisor.background import start_in_background

        raise_interrupt()
        start_in_background(where, [each for each in sys.argv[1:] if each not in DETACH])
        named = "" if name == DEFAULT else f" --name {name}"
        down = f"baton down{named}" if run_dir is None else f"baton down --run-dir {run_dir}"
        print(f"\nIt runs in the background; stop it with: {down}")
        return
    from deploy.cli.up.run import run_stack

    asked = split_assignments(settings or [])
    assigned, models = parsed_settings(asked.shared), typed.pop("model") or []
    spec = stack_spec(typed, assigned, name=name, run_dir=where, config=config, models=models, own=asked.own)
    raise_interrupt()
    run_stack(spec, ready_fd)


SEVERAL_MODELS = "Several, each as NAME=PATH_OR_ID: a stack of several models."
with_options(up, ({**offers(), "model": offers()["model"]._replace(more=SEVERAL_MODELS)}).values())
