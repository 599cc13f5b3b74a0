"""`baton chat`: one question, or a conversation, streamed to the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.gateway_client import served_models, stream_chat
from deploy.cli.running_stack import DEFAULT, Name, RunDir, running_stack
from deploy.errors import CommandError

HELP = "/system TEXT sets the system prompt, /new forgets the conversation, /quit or Ctrl-D ends."


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
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Talk to the model in the terminal."""
    limits = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    converse(Chat.with_server(url, api_key, model, name, run_dir, system, limits), question)


@dataclass(slots=True)
class Chat:
    """Owns the conversation so far."""

    url: str
    key: str | None
    model: str
    settings: Mapping[str, Any]
    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def with_server(
        cls,
        url: str | None,
        key: str | None,
        model: str | None,
        name: str,
        run_dir: Path | None,
        system: str | None,
        settings: Mapping[str, Any],
    ) -> Chat:
        """With the running stack, or with any server at `url`. Raises CommandError."""
        given = {setting: value for setting, value in settings.items() if value is not None}
        if url is None:
            state = running_stack(name, run_dir)
            return cls(state.url, key or state.api_key, model or state.model, given, system)
        url = url.rstrip("/").removesuffix("/v1")
        if model is None:
            offered = served_models(url, key)
            if not offered:
                raise CommandError(f"{url} serves no model")
            model = offered[0]
        return cls(url, key, model, given, system)

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece; what has arrived of it, if anything has, is kept in the history."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        message = {"role": "user", "content": question}
        body = {"model": self.model, "messages": [*system, *self.history, message], **self.settings}
        answer: list[str] = []
        try:
            for piece in stream_chat(self.url, self.key, body):
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.history += [message, {"role": "assistant", "content": "".join(answer)}]


def converse(chat: Chat, question: str | None) -> None:
    """One answer to `question`, or to what is piped in; otherwise a conversation."""
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            raise CommandError("no question: nothing was piped in", status=2)
    if question is not None:
        _print_answer(chat, question)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    print(f"{chat.model} at {chat.url}. {HELP}")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            _one_turn(chat, input("\n> ").strip())
    print()


def _one_turn(chat: Chat, line: str) -> None:
    match line.split(maxsplit=1):
        case []:
            return
        case ["/quit" | "/exit"]:
            raise EOFError
        case ["/new"]:
            chat.history.clear()
        case ["/system", *text]:
            chat.system = text[0] if text else None
        case ["/help"]:
            print(HELP)
        case _:
            try:
                _print_answer(chat, line)
            except CommandError as error:
                print(f"\n{error}", file=sys.stderr)
            except KeyboardInterrupt:
                print(" …")


def _print_answer(chat: Chat, question: str) -> None:
    """Ctrl-C breaks the answer off; the server notices and stops computing it."""
    with contextlib.closing(chat.ask(question)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
