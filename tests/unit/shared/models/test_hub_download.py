"""Fetching a model from a hub, said with its size and time; the hub is a server of our own that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
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
OLD, OLD_FILES = "d" * 40, {"config.json": b"{ }"}
"""Of the revision `old`."""
GGUFS = ("m-Q8_0.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-F16-00001-of-00002.gguf", "part/m-q4_0.gguf")
OF_GGUFS = {name: f"GGUF of {name}".encode() for name in GGUFS}
REVISIONS = {
    ("owner/model", "main"): (COMMIT, FILES),
    ("owner/model", "old"): (OLD, OLD_FILES),
    ("owner/ggufs", "main"): ("e" * 40, OF_GGUFS),
}
FETCH = (
    "from shared.models.model_files import resolve_model as r; print('at', r('owner/model', weights=True, say=print))"
)


API = re.compile(r"/api/models/(?P<name>[^/]+/[^/?]+)(?:/(?P<what>tree|revision)/(?P<revision>[^/?]+))?(?:[/?].*)?$")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its library asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        asked = API.match(self.path)
        if asked is None:
            self._file()
            return
        named = asked["revision"] or "main"
        found = [
            (commit, files)
            for (name, revision), (commit, files) in REVISIONS.items()
            if name == asked["name"] and named in (revision, commit)
        ]
        if not found:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        ((commit, files),) = found
        if asked["what"] == "tree":
            body: Any = [
                {"type": "file", "path": name, "size": len(text), "oid": "0" * 40} for name, text in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            body = {"id": asked["name"], "sha": commit, "siblings": siblings}
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self) -> None:
        for (repository, _), (commit, files) in REVISIONS.items():
            owner, _, name = self.path.partition(f"/resolve/{commit}/")
            if owner == f"/{repository}" and name in files:
                tag = hashlib.sha256(files[name]).hexdigest()
                self._answer(200, files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": commit})
                return
        self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

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


ASK = """
import sys
from shared.models.model_files import ModelNotFound, hub_gguf, resolve_model
for name in sys.argv[1:]:
    try:
        print(hub_gguf(name) or resolve_model(name, weights=True))
    except ModelNotFound as error:
        print(error)
"""


def asked(hub: str, home: Path, *names: str) -> list[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", ASK, *names]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_revision_and_a_gguf_file_of_a_repository_are_fetched_alone(hub: str, tmp_path: Path) -> None:
    names = ("owner/model@old", f"owner/model@{COMMIT}", "owner/ggufs:Q4_K_M", "owner/ggufs@main:ud-q4_k_m")
    names = (*names, "owner/ggufs:Q4_0")
    old, new, *ggufs = map(Path, asked(hub, tmp_path, *names))
    assert (old / "config.json").read_bytes() == OLD_FILES["config.json"]
    assert (new.name, sorted(path.name for path in new.iterdir())) == (COMMIT, ["config.json", "model.safetensors"])
    wanted = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "part/m-q4_0.gguf"]
    assert [path.read_bytes() for path in ggufs] == [OF_GGUFS[name] for name in wanted]
    assert {path.name for path in ggufs[0].parent.iterdir()} == {"m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "part"}
    away = asked("http://127.0.0.1:9", tmp_path, "owner/model@old", "owner/ggufs:Q4_K_M")
    assert away == [str(old), str(ggufs[0])], "what is here needs no hub"


def test_revisions_and_files_that_are_not_there_are_errors_that_say_what_is(hub: str, tmp_path: Path) -> None:
    revision, file, parts, path = asked(
        hub, tmp_path, "owner/model@new", "owner/ggufs:Q2_K", "owner/ggufs:F16", "./owner/model:x"
    )
    assert revision.startswith(
        "owner/model@new: not a directory here, and fetching it from the Hugging Face hub failed"
    )
    assert file.startswith("owner/ggufs:Q2_K: a file of one part that ends in Q2_K.gguf is expected; m-Q8_0.gguf, m-")
    assert parts.startswith("owner/ggufs:F16: a file of one part that ends in F16.gguf")
    assert path.startswith("./owner/model:x: no such directory")
