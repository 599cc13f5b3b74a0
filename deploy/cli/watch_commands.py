"""How the commands that watch, record and replay a stack are typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import DEFAULT, AsJson, Name, RunDir


def record(
    journal: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)],
    subjects: Annotated[
        list[str] | None, typer.Argument(help="Below the namespace, e.g. 'engine.*.steps'; > for everything.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="All that this engine's scheduler hears; may be repeated.")
    ] = None,
    duration: Annotated[str | None, typer.Option("--for", help="10s, 5m; until Ctrl-C without it.")] = None,
    limit: Annotated[str | None, typer.Option(help="Stop at this size: 512MiB.")] = None,
    ring: Annotated[
        str | None, typer.Option(help="Keep the newest of this size: in the file, and the same with .older behind.")
    ] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Write what is said on the bus to a journal; Ctrl-C ends it."""
    from deploy.cli.errors import CommandError
    from deploy.cli.record import Recording, check_patterns, heard_by_scheduler, seconds
    from deploy.cli.record import record as record_traffic
    from deploy.cli.stack_lookup import running_stack
    from shared.config import parse_bytes

    patterns = [*(subjects or ()), *(subject for each in engine or () for subject in heard_by_scheduler(each))]
    if not patterns:
        raise CommandError("name subjects, or an engine with --engine", status=2)
    if limit is not None and ring is not None:
        raise CommandError("--limit and --ring: one of them", status=2)
    check_patterns(patterns)
    try:
        size = None if limit is None and ring is None else parse_bytes(str(limit or ring))
    except ValueError as error:
        raise CommandError(f"{limit or ring}: {error}", status=2) from None
    recording = Recording(
        path=journal,
        patterns=tuple(dict.fromkeys(patterns)),
        seconds=None if duration is None else seconds(duration),
        limit=size,
        ring=ring is not None,
    )
    record_traffic(running_stack(name, run_dir), recording)


def replay(
    journal: Annotated[Path, typer.Argument(help="Of a scheduler: baton up --set scheduler.journal=FILE.")],
    listed: Annotated[bool, typer.Option("--list", help="Show the records instead; of any journal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decide again what a scheduler's journal says was decided; show the first difference, with status 1."""
    from deploy.cli.replay import list_journal, replay_journal

    (list_journal if listed else replay_journal)(journal, as_json=as_json)


def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two pictures.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, of one interval.")] = False,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Watch the stack work: engines, where their time goes, queues, KV memory, tokens/s, hit rates."""
    from deploy.cli.stack_lookup import running_stack
    from deploy.cli.top import show_top

    show_top(running_stack(name, run_dir), interval, once=once, in_json=as_json)
