"""A conversation in the terminal: lines with history, commands that begin with `/`, answers as Markdown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markdown import Markdown

from deploy.cli.chat.command import print_plain
from deploy.cli.chat.conversation import Chat
from deploy.cli.chat.markdown import show_markdown
from deploy.errors import CommandError
from shared.config import home_folder, process_environment
from shared.machine.home import expanded
from shared.private_files import PRIVATE_FOLDER, private_opener

KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-C breaks an answer off, Ctrl-D ends; /help says what else."
HELP = """\
/system TEXT     sets the system prompt; without TEXT there is none
/set NAME=VALUE  a field of further requests: /set temperature=0.2, /set max_tokens=; alone it shows them
/retry           asks the last question again
/undo            takes the last question and its answer back
/history         shows what was said
/save FILE       writes what was said as JSON, in the shape of `messages`
/new             forgets what was said
/quit            ends"""


class Terminal:
    """Owns the prompt and what is on the screen."""

    def __init__(self, chat: Chat, *, plain: bool) -> None:
        self._chat = chat
        self._plain = plain
        self._console = Console()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/system": self._system,
            "/set": self._set,
            "/retry": self._retry,
            "/undo": self._undo,
            "/history": self._history,
            "/save": self._save,
            "/new": lambda _: chat.history.clear(),
            "/quit": self._quit,
            "/exit": self._quit,
        }

    def run(self) -> None:
        """Returns when the user ends the conversation."""
        session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            key_bindings=_keys(),
            history=_input_history(),
            completer=WordCompleter(sorted(self._commands), sentence=True),
            complete_while_typing=False,
            prompt_continuation="  ",
        )
        print(f"{self._chat.model} at {self._chat.url}. {KEYS}")
        with contextlib.suppress(EOFError):
            while True:
                try:
                    self.take(session.prompt().strip())
                except KeyboardInterrupt:
                    continue

    def take(self, text: str) -> None:
        """Does what was typed. Raises EOFError where that is to end."""
        word, _, rest = text.partition(" ")
        if command := self._commands.get(word):
            self._said(lambda: command(rest.strip()))
        elif word.startswith("/") and "\n" not in text and "/" not in word[1:]:
            print(f"{word}: no such command; /help lists them", file=sys.stderr)
        elif text:
            self._said(lambda: self._answer(text))

    def _said(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CommandError as error:
            print(f"\n{error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(" …")

    def _answer(self, question: str) -> None:
        if self._plain:
            print_plain(self._chat, question)
        else:
            show_markdown(self._chat.ask(question), self._console)

    def _system(self, text: str) -> None:
        self._chat.system = text or None
        print(f"system prompt: {text}" if text else "no system prompt")

    def _set(self, text: str) -> None:
        name, _, value = text.partition("=")
        if name.strip():
            self._chat.set(name.strip(), value.strip())
        print(", ".join(f"{name}={value}" for name, value in self._chat.settings.items()) or "nothing is set")

    def _retry(self, _: str) -> None:
        question = self._chat.undo()
        if question is None:
            raise CommandError("nothing was asked yet")
        self._answer(question)

    def _undo(self, _: str) -> None:
        question = self._chat.undo()
        print("nothing was asked yet" if question is None else f"taken back: {question}")

    def _history(self, _: str) -> None:
        for message in self._chat.messages():
            self._console.print(f"[bold]{message['role']}[/bold]")
            self._console.print(message["content"] if self._plain else Markdown(message["content"]))

    def _save(self, name: str) -> None:
        if not name:
            raise CommandError("/save FILE: which file?")
        path = expanded(name)
        self._chat.save(path)
        print(f"{len(self._chat.messages())} messages are in {path}")

    def _quit(self, _: str) -> None:
        raise EOFError


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _input_history() -> History:
    """What was typed before, in the user's state folder, for the owner alone; none where that cannot be had."""
    state = process_environment().get("XDG_STATE_HOME")
    try:
        path = (Path(state) if state else home_folder() / ".local" / "state") / "baton" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        os.close(private_opener(path, os.O_WRONLY | os.O_CREAT))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
