"""How the commands that use or examine an installation are typed."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import DEFAULT, AsJson, Name, RunDir


def chat(
    question: Annotated[str | None, typer.Argument(help="One question; without it a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; the stack's own without it.")] = None,
    url: Annotated[str | None, typer.Option(help="Any OpenAI-compatible server instead of a stack of ours.")] = None,
    api_key: Annotated[str | None, typer.Option(help="To be shown to the server.", envvar="BATON_API_KEY")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Talk to the model in the terminal."""
    from deploy.cli.chat import Chat, converse

    limits = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    talk = Chat.with_server(url, api_key, model, name, run_dir, system, limits)
    converse(talk, question)


def bench(
    context: typer.Context,
    up: Annotated[str | None, typer.Option(help="Start a stack with these arguments for this run.")] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Measure: baton bench serve|latency|throughput|interference|prefixes|kv|idle|speculation|roofline|kernels|
    peers|gpu.

    All other arguments are passed on (baton bench serve --help).
    """
    from deploy.cli.bench import run_bench

    run_bench(context.args, up, name, run_dir)


def doctor(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Check this machine and a running stack, and say what to do about what is wrong."""
    from deploy.cli.doctor import examine
    from deploy.cli.stack_lookup import run_dir_of

    examine(run_dir_of(name, run_dir), as_json=as_json)


def version(as_json: AsJson = False) -> None:
    """Show versions."""
    from deploy.cli.versions import show_versions

    show_versions(as_json=as_json)
