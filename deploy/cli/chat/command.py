"""How `baton chat` is typed: one question, or a conversation."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from deploy.cli.chat.conversation import Chat
from deploy.cli.running_stack import DEFAULT, Name, RunDir
from deploy.errors import CommandError


def chat(
    question: Annotated[str | None, typer.Argument(help="One question. Without it a conversation starts.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the stack's model.")] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server, in place of a Baton stack.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key for the server.", envvar="BATON_API_KEY")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; the same seed gives the same answer.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show answers as they come, not as Markdown; so it is in a pipe.")
    ] = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Talk to the model in the terminal."""
    limits = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    conversation = Chat.with_server(url, api_key, model, name, run_dir, system, limits)
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            raise CommandError("no question: nothing was piped in", status=2)
    if question is None:
        from deploy.cli.chat.terminal import Terminal  # what edits lines is needed for conversations only

        Terminal(conversation, plain=plain).run()
    elif plain or not sys.stdout.isatty():
        print_plain(conversation, question)
    else:
        from deploy.cli.chat.markdown import show_markdown

        show_markdown(conversation.ask(question))


def print_plain(conversation: Chat, question: str) -> None:
    """Prints each piece of the answer when it comes. Ctrl-C breaks the answer off; the server notices and stops."""
    with contextlib.closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
