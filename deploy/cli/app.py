"""The `baton` command line: which commands there are. Each one's module is imported only when it is typed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from deploy.cli import end_at_once, raise_interrupt
from deploy.errors import CommandError
from shared.machine.home import NoHome

RUN, USE, WATCH, OPERATE = "Run", "Use", "Watch and diagnose", "Operate"
MEASURE, DEBUG = "Measure and size", "Develop"
EXAMPLES = (
    "baton up --model Qwen/Qwen3-0.6B --port 8000",
    'baton chat "What is the capital of France?"',
    "baton up --help",
)
ELSEWHERE: Mapping[str, str] = {"serve": "up", "run-batch": "batch", "collect-env": "doctor"}
"""What vLLM's commands are called here, for a message."""
PASSED_ON: Mapping[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that hands everything it does not know, `--help` too, to another program."""


class Command(NamedTuple):
    """A command as `baton --help` shows it, and where it is."""

    panel: str
    module: str
    """It has a function of the command's name, with `_` for `-`."""
    help: str
    """The first paragraph of that function's docstring; a test compares them."""
    settings: Mapping[str, Any] = {}


COMMANDS: Mapping[str, Command] = {
    "up": Command(
        RUN,
        "deploy.cli.up.command",
        "Start everything on this machine: bus, gateway, tokenizer, coordinator, engines, KV store, detokenizer.",
    ),
    "down": Command(RUN, "deploy.cli.operate", "Drain and stop a stack, with its supervisor or without one."),
    "join": Command(
        RUN,
        "deploy.cli.hosts.join",
        "Make this host part of another host's stack: with engines, a KV store and a NATS server of its own.",
    ),
    "token": Command(RUN, "deploy.cli.hosts.token", "Make a token by which other hosts join this one's stack."),
    "keys": Command(RUN, "deploy.cli.keys", "Make an API key, or list those of a file: baton keys new NAME, list."),
    "chat": Command(USE, "deploy.cli.chat.command", "Talk to the model in the terminal."),
    "batch": Command(
        USE,
        "deploy.cli.batch.command",
        "Answer a file of requests in OpenAI's batch format; a second run continues where the first stopped.",
    ),
    "ps": Command(WATCH, "deploy.cli.ps", "Show every process of a stack: phase, load, uptime."),
    "top": Command(
        WATCH,
        "deploy.cli.top.command",
        "Show live figures of a stack: engines, time per step phase, queues, KV memory, tokens/s, hit rates.",
    ),
    "logs": Command(
        WATCH,
        "deploy.cli.logs",
        "Show the services' log lines, merged in time order. Works on a stack that has ended, too.",
    ),
    "trace": Command(
        WATCH,
        "deploy.cli.top.trace",
        "Follow one request through the services, hop by hop with times: an open one, or one that ended a while ago.",
    ),
    "doctor": Command(
        WATCH, "deploy.cli.doctor", "Check this machine and a running stack; for each problem say what to do."
    ),
    "prometheus-config": Command(
        WATCH,
        "deploy.cli.diagnosis.prometheus",
        "Print a configuration by which Prometheus scrapes a stack and judges it by Baton's alert rules.",
    ),
    "support-bundle": Command(
        WATCH,
        "deploy.cli.diagnosis.support_bundle",
        "Collect what a bug report needs in one archive: versions, findings, metrics, logs, without secrets and texts.",
    ),
    "scale": Command(OPERATE, "deploy.cli.operate", "Start or stop instances: baton scale tokenizer=3."),
    "drain": Command(OPERATE, "deploy.cli.operate", "Let an instance finish its open requests and accept no new ones."),
    "undrain": Command(OPERATE, "deploy.cli.operate", "Let a drained instance accept requests again."),
    "lora": Command(
        OPERATE,
        "deploy.cli.operate",
        "Show a stack's LoRA adapters, or change them: baton lora list, load NAME FOLDER, unload NAME.",
    ),
    "plan": Command(
        OPERATE,
        "deploy.cli.plan",
        "Say how many engines meet the latency targets of a stack's load, or with --act start and drain them.",
    ),
    "cluster": Command(
        OPERATE,
        "deploy.cli.hosts.cluster",
        "Show the clusters of a federation, or switch one: baton cluster list, drain NAME, undrain NAME, secret.",
    ),
    "nats-env": Command(
        OPERATE, "deploy.cli.operate", 'Print what the `nats` command needs: eval "$(baton nats-env)"; nats micro ls.'
    ),
    "bench": Command(
        MEASURE,
        "deploy.cli.bench",
        "Measure: baton bench serve|latency|throughput|interference|hops|ring|startup|profile|prefixes|kv|idle|"
        "speculation|perplexity|roofline|kernels|routing|peers|gpu.",
        PASSED_ON,
    ),
    "simulate": Command(
        MEASURE,
        "deploy.cli.sizing.simulate",
        "Simulate a fleet under load: the real coordinator and schedulers on a virtual clock, with simulated devices.",
    ),
    "tune": Command(
        MEASURE,
        "deploy.cli.sizing.tune",
        "Find the settings that serve a load best: trials on the simulator, or on real stacks.",
    ),
    "chaos": Command(
        MEASURE,
        "deploy.cli.chaos",
        "Take a stack of this command's own apart under load, fault by fault, and check that no stream is lost or "
        "altered.",
    ),
    "record": Command(DEBUG, "deploy.cli.journals", "Record the messages on the bus in a journal; Ctrl-C ends it."),
    "replay": Command(
        DEBUG,
        "deploy.cli.journals",
        "Repeat the decisions of a scheduler from its journal; a difference is shown and ends with status 1.",
    ),
    "version": Command(DEBUG, "deploy.cli.doctor", "Show the versions of Baton, Python and the libraries."),
}


def loaded(name: str) -> TyperCommand:
    """The whole command, with its options. Imports its module."""
    listed = COMMANDS[name]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function = getattr(import_module(listed.module), name.replace("-", "_"))
    app.command(name, context_settings=dict(listed.settings))(function)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand), "one function is one command"
    return command


class _Commands(TyperGroup):
    """Lists all commands by their first sentence, and loads the one that was typed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Loads the command that was typed. For an unknown name TyperGroup ends the program with a suggestion."""
        if args and (here := ELSEWHERE.get(args[0])) is not None:
            ctx.fail(f"No such command '{args[0]}'. It is `baton {here}`.")
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        end_at_once()
        command = loaded(name)
        if name == "up":
            rest = _from_vllm(rest, command)
        raise_interrupt()
        return name, command, rest


def _from_vllm(line: list[str], command: Any) -> list[str]:
    from deploy.cli.up.vllm_line import switches_of, translated

    made, said = translated(line, switches_of(command))
    if not any(each.startswith("--ready-fd") for each in line):  # else --detach has said it already
        for each in said:
            print(f"baton: {each}", file=sys.stderr)
    return made


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"baton {version('baton-serve')}")
        raise typer.Exit


def _own_options() -> list[Any]:
    """Those of `baton` itself, without a command."""
    app = typer.Typer(add_completion=False)

    @app.callback()
    def baton(
        version: Annotated[
            bool,
            typer.Option(
                "--version", is_eager=True, expose_value=False, callback=_show_version, help="Show Baton's version."
            ),
        ] = False,
    ) -> None: ...

    return typer.main.get_group(app).params


def command_line() -> TyperGroup:
    """All commands, none of which is loaded yet."""
    return _Commands(
        name="baton",
        help="Large language models served as small actors on a NATS bus.",
        commands={
            name: TyperCommand(name, help=listed.help, rich_help_panel=listed.panel)
            for name, listed in COMMANDS.items()
        },
        epilog="\n\n".join(("Examples:", *EXAMPLES)),
        params=[*_own_options(), *typer.main.get_install_completion_arguments()],
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def main() -> None:
    """Runs the command that was typed; an expected failure is one line and a status."""
    raise_interrupt()
    logging.getLogger().addHandler(logging.NullHandler())  # what libraries log is not the user's concern
    try:
        command_line()()
    except CommandError as error:
        print(f"baton: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    except NoHome as error:
        print(f"baton: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of a pipe went away: `baton logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
