"""The `baton` command line: what can be typed. Bodies live in their own modules and are imported when needed."""

from __future__ import annotations

import logging
import os
import sys

import typer

from deploy.cli import operate_commands, use_commands, watch_commands
from deploy.cli.batch_command import batch
from deploy.cli.errors import CommandError
from deploy.cli.interrupts import raise_interrupt
from deploy.cli.up_command import up

app = typer.Typer(
    name="baton",
    help="Large language models served as small actors on a NATS bus.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RUN, USE, OPERATE = "Run", "Use", "Operate"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(rich_help_panel=RUN)(up)
app.command(rich_help_panel=RUN)(operate_commands.down)
app.command(rich_help_panel=USE)(use_commands.chat)
app.command(rich_help_panel=USE)(batch)
app.command(rich_help_panel=USE, context_settings=PASSED_ON | {"help_option_names": []})(use_commands.bench)
app.command(rich_help_panel=OPERATE)(operate_commands.ps)
app.command(rich_help_panel=OPERATE)(watch_commands.top)
app.command(rich_help_panel=OPERATE)(operate_commands.logs)
app.command(rich_help_panel=OPERATE)(operate_commands.drain)
app.command(rich_help_panel=OPERATE)(operate_commands.undrain)
app.command(rich_help_panel=OPERATE)(operate_commands.scale)
app.command(rich_help_panel=OPERATE)(operate_commands.nats_env)
app.command(rich_help_panel=OPERATE)(watch_commands.record)
app.command(rich_help_panel=OPERATE)(watch_commands.replay)
app.command(rich_help_panel=OPERATE)(use_commands.doctor)
app.command(rich_help_panel=OPERATE)(use_commands.version)


def main() -> None:
    """Runs the command that was typed; an expected failure is one line and a status."""
    raise_interrupt()
    logging.getLogger().addHandler(logging.NullHandler())  # what libraries log is not the user's concern
    try:
        app()
    except CommandError as error:
        print(f"baton: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    except BrokenPipeError:  # the reader of a pipe went away: `baton logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
