"""`baton chat` against servers that stream well and badly."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.chat.conversation import Chat
from deploy.cli.chat.markdown import MarkdownBlocks
from deploy.cli.gateway_client import served_models
from deploy.errors import CommandError
from tests.support.terminal import Pty


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


GOOD = b": keep-alive\n\n" + chunk("Par") + chunk("is") + b'data: {"choices":[]}\n\n' + b"data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    daemon_threads = True
    asked: list[dict[str, Any]]
    keys: list[str | None]
    answer: tuple[int, bytes]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers.get("Authorization"))
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m1"}, {"id": "m2"}]}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(answer: tuple[int, bytes]) -> Iterator[tuple[Server, str]]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked, server.keys, server.answer = [], [], answer
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_an_answer_comes_in_pieces_and_the_conversation_is_remembered() -> None:
    with serving((200, GOOD)) as (server, url):
        chat = Chat(url, "secret", "m", {"temperature": 0.0}, system="be brief")
        assert list(chat.ask("What is the capital of France?")) == ["Par", "is"]
        assert "".join(chat.ask("Again?")) == "Paris"
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": "What is the capital of France?"}
    assert server.asked[0] == {"model": "m", "messages": [system, first], "temperature": 0.0, "stream": True}
    assert server.asked[1]["messages"] == [
        system,
        first,
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "Again?"},
    ]
    assert server.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, b'{"error": {"message": "no such model: x"}}'), "404: no such model: x"),
        ((502, b"<html>"), "502: <html>"),
        ((200, chunk("Par")), "without"),
        ((200, chunk("Par") + b'data: {"error": {"message": "engine lost"}}\n\n'), "engine lost"),
    ],
)
def test_what_goes_wrong_is_said_in_the_servers_words(answer: tuple[int, bytes], said: str) -> None:
    with serving(answer) as (_, url):
        chat = Chat(url, None, "m", {})
        with pytest.raises(CommandError, match=said):
            list(chat.ask("?"))


def test_a_question_that_failed_is_not_part_of_the_conversation() -> None:
    with serving((503, b"{}")) as (_, url):
        chat = Chat(url, None, "m", {})
        with pytest.raises(CommandError):
            list(chat.ask("?"))
        assert chat.history == []


def test_what_was_heard_of_an_answer_that_was_broken_off_is_kept() -> None:
    with serving((200, GOOD)) as (_, url):
        chat = Chat(url, None, "m", {})
        pieces = chat.ask("?")
        assert next(pieces) == "Par"
        pieces.close()
        assert chat.history[-1] == {"role": "assistant", "content": "Par"}


def test_a_foreign_server_is_asked_for_its_models() -> None:
    with serving((200, GOOD)) as (_, url):
        assert served_models(url, None) == ["m1", "m2"]


def test_a_question_is_taken_back_with_its_answer_and_fields_are_set_by_their_json() -> None:
    with serving((200, GOOD)) as (server, url):
        chat = Chat(url, None, "m", {})
        assert chat.undo() is None
        list(chat.ask("one"))
        list(chat.ask("two"))
        assert chat.undo() == "two"
        assert [message["content"] for message in chat.history] == ["one", "Paris"]
        for text in ("temperature=0.5", 'stop=["x"]', "user=me", "seed=1", "seed="):
            name, _, value = text.partition("=")
            chat.set(name, value)
        list(chat.ask("three"))
    assert {name: server.asked[-1].get(name) for name in ("temperature", "stop", "user", "seed")} == {
        "temperature": 0.5,
        "stop": ["x"],
        "user": "me",
        "seed": None,
    }


@pytest.mark.parametrize(
    ("text", "blocks", "rest"),
    [
        ("# A\n\nb c\n\n- d\n", ["# A\n", "b c\n"], "- d\n"),
        ("```py\na\n\nb\n```\n\nafter\n", ["```py\na\n\nb\n```\n"], "after\n"),
        ("````\n```\n\n````\n\nx", ["````\n```\n\n````\n"], "x"),
        ("one\n\n", [], "one\n\n"),
        ("\n\n\none\n\n\ntwo", ["one\n"], "two"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_markdown_is_cut_where_a_block_is_complete_however_it_comes(
    text: str, blocks: list[str], rest: str, size: int
) -> None:
    growing, done = MarkdownBlocks(), list[str]()
    for start in range(0, len(text), size):
        done += growing.add(text[start : start + size])
    assert (done, growing.rest.lstrip("\n")) == (blocks, rest)


AT_THE_PROMPT = "\x1b[?2004h"
"""Pasted text is asked to be marked as such: lines are being read. Ctrl-D between two prompts is lost."""
MARKDOWN = b"".join(map(chunk, ("# Cap", "itals\n\n", "Paris is **bold**", "\n\n```python\nprint(1)\n```\n"))) + (
    b"data: [DONE]\n\n"
)


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[..., Pty]]:
    """Starts `baton chat` with a server in a terminal of its own."""
    with contextlib.ExitStack() as stack:

        def start(url: str, *more: str) -> Pty:
            environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
            command = [sys.executable, "-m", "deploy.cli", "chat", "--url", url, *more]
            return stack.enter_context(Pty(command, environment))

        yield start


def test_a_conversation_in_a_terminal_has_several_lines_commands_and_markdown(
    typed: Callable[..., Pty], tmp_path: Path
) -> None:
    with serving((200, MARKDOWN)) as (server, url):
        terminal = typed(url)
        terminal.until(AT_THE_PROMPT)
        terminal.type("/system be brief\r")
        terminal.until("system prompt: be brief")
        terminal.until(AT_THE_PROMPT)
        terminal.type("first line\x1b\rsecond line\r")
        said = terminal.until(AT_THE_PROMPT)
        assert "Capitals" in said
        assert "# Cap" not in said
        assert "**" not in said
        assert "```" not in said
        terminal.type("/set temperature=0\r")
        terminal.until("temperature=0")
        terminal.until(AT_THE_PROMPT)
        terminal.type("/retry\r")
        terminal.until(AT_THE_PROMPT)
        terminal.type(f"/save {tmp_path}/said.json\r")
        terminal.until("3 messages")
        terminal.until(AT_THE_PROMPT)
        terminal.type("/nonsense\r")
        terminal.until("no such command")
        terminal.until(AT_THE_PROMPT)
        terminal.type("/quit\r")
        assert terminal.ended() == 0
    question = {"role": "user", "content": "first line\nsecond line"}
    system = {"role": "system", "content": "be brief"}
    assert [each["messages"] for each in server.asked] == [[system, question], [system, question]]
    assert [each.get("temperature") for each in server.asked] == [None, 0]
    saved = json.loads((tmp_path / "said.json").read_text())
    assert saved[:2] == [system, question]
    assert saved[2]["content"].startswith("# Capitals\n\nParis is **bold**")
    history = tmp_path / "baton" / "chat_history"
    assert "+second line" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_what_was_typed_before_comes_back_and_ctrl_d_ends(typed: Callable[..., Pty]) -> None:
    with serving((200, GOOD)) as (server, url):
        for key in ("where is Paris?\r", "\x1b[A\r"):
            terminal = typed(url, "--plain")
            terminal.until(AT_THE_PROMPT)
            terminal.type(key)
            terminal.until("Paris\r\n")
            terminal.until(AT_THE_PROMPT)
            terminal.type("\x04")
            assert terminal.ended() == 0
    assert [each["messages"][-1]["content"] for each in server.asked] == ["where is Paris?"] * 2


def test_an_error_is_one_line_and_the_conversation_goes_on(typed: Callable[..., Pty]) -> None:
    with serving((503, b'{"error": {"message": "no engine"}}')) as (server, url):
        terminal = typed(url)
        terminal.until(AT_THE_PROMPT)
        terminal.type("hello\r")
        terminal.until("the gateway answered 503: no engine")
        terminal.until(AT_THE_PROMPT)
        server.answer = (200, GOOD)
        terminal.type("hello\r")
        terminal.until("Paris")
        terminal.until(AT_THE_PROMPT)
        terminal.type("\x04")
        assert terminal.ended() == 0
