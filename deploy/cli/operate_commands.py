"""How the commands that operate a running stack are typed."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import DEFAULT, AsJson, Name, RunDir


def down(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests to finish.")] = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Drain and stop a stack."""
    from deploy.cli.down import remove_what_was_left, stop_stack
    from deploy.cli.stack_lookup import run_dir_of, running_stack

    where = run_dir_of(name, run_dir)
    if not remove_what_was_left(where):
        stop_stack(running_stack(name, run_dir), where, now=now)


def ps(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Show every process of a stack: phase, load, uptime."""
    from deploy.cli.ps import show_processes
    from deploy.cli.stack_lookup import running_stack

    show_processes(running_stack(name, run_dir), as_json=as_json)


def logs(
    service: Annotated[str | None, typer.Argument(help="A service or an instance; all without it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    request: Annotated[str | None, typer.Option(help="Only lines about this request.")] = None,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last so many.")] = None,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Show the services' log lines, merged in time order. Works on a stack that has ended, too."""
    from deploy.cli.log_lines import LogQuery
    from deploy.cli.logs import show_logs
    from deploy.cli.stack_lookup import run_dir_of

    query = LogQuery(service=service, request=request, lines=lines)
    show_logs(run_dir_of(name, run_dir) / "logs", query, follow=follow, as_json=as_json)


def drain(
    instance: Annotated[str, typer.Argument(help="As `baton ps` shows it, e.g. engine-1; or a pool: prefill, decode.")],
    force: Annotated[bool, typer.Option("--force", help="Even if it is the last of its kind.")] = False,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Let an instance finish what it has and take no more."""
    from deploy.cli.admin import drain_instance
    from deploy.cli.stack_lookup import running_stack

    drain_instance(running_stack(name, run_dir), instance, force=force, as_json=as_json)


def undrain(
    instance: Annotated[str, typer.Argument(help="As `baton ps` shows it, or a pool.")],
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Let a drained instance take requests again."""
    from deploy.cli.admin import undrain_instance
    from deploy.cli.stack_lookup import running_stack

    undrain_instance(running_stack(name, run_dir), instance, as_json=as_json)


def scale(
    service: Annotated[
        str, typer.Argument(help="gateway, tokenizer, detokenizer, coordinator, engines, prefill or decode =N.")
    ],
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Start or stop instances: baton scale tokenizer=3."""
    from deploy.cli.admin import scale_service
    from deploy.cli.stack_lookup import running_stack

    scale_service(running_stack(name, run_dir), service, as_json=as_json)


def nats_env(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Print what the `nats` command needs: eval "$(baton nats-env)"; nats micro ls."""
    from deploy.cli.nats_env import show_nats_environment
    from deploy.cli.stack_lookup import running_stack

    show_nats_environment(running_stack(name, run_dir), as_json=as_json)
