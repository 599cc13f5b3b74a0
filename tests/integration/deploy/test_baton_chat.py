"""`baton chat` against servers that stream well and badly."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli.chat import Chat
from deploy.cli.gateway_client import served_models
from deploy.errors import CommandError


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
