"""Fetching a model from a hub, said with its size and time; the hub is a server of our own that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"0" * 3_000_000, "picture.png": b"1" * 5_000_000}
FETCH = (
    "from shared.models.model_files import resolve_model as r; print('at', r('owner/model', weights=True, say=print))"
)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its library asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/owner/model/tree/"):
            tree = [{"type": "file", "path": name, "size": len(text), "oid": "0" * 40} for name, text in FILES.items()]
            self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            body = json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode()
            self._answer(200, body, {"Content-Type": "application/json"})
        else:
            self._file()

    def _file(self) -> None:
        owner, _, name = self.path.partition(f"/resolve/{COMMIT}/")
        if owner != "/owner/model" or name not in FILES:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        content = FILES[name]
        tag = hashlib.sha256(content).hexdigest()
        self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_not_here_is_said_before_and_after_and_what_is_here_is_not(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    def fetch() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", FETCH], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "%" not in done.stderr
        return done.stdout.splitlines()

    before, after, at = fetch()
    folder = Path(at.removeprefix("at "))
    assert before == "fetching owner/model from the Hugging Face hub: 3 MB"
    assert after.startswith("owner/model: 3 MB in ")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert fetch() == [at]


def test_a_hub_that_does_not_answer_is_an_error_that_says_so(tmp_path: Path) -> None:
    away = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FETCH], cwd=REPOSITORY, env=away, capture_output=True, text=True, timeout=60
    )
    assert "ModelNotFound: owner/model: not a directory here, and fetching it from the Hugging Face hub failed" in (
        done.stderr
    )
