"""A real Prometheus server, where Debian's package `prometheus` (or another) is installed, and what it is asked."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.ports import free_port

ANSWER_DEADLINE = 60.0


def program(name: str) -> str:
    """The path of promtool or prometheus. Skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} is installed (apt-get install prometheus)")
    return path


def promtool(*arguments: str, folder: Path | None = None) -> str:
    """Runs it and returns what it says. Raises AssertionError where it finds fault."""
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    return said


class PrometheusServer:
    """Owns a process and its data."""

    def __init__(self, url: str) -> None:
        self._ready = f"{url}/-/ready"
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=20)

    def is_ready(self) -> bool:
        """Whether it has read what it has on disk; it answers nothing else before. Raises TransportError."""
        return self._http.get(self._ready).status_code == 200

    def ask(self, path: str, **parameters: Any) -> Any:
        """What its API answers. Raises AssertionError where it refuses."""
        answer = self._http.get(f"/{path}", params=parameters)
        assert answer.status_code == 200, f"{path} {parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression has just now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def close(self) -> None:
        """Ends its connections; the process goes on."""
        self._http.close()

    def until(self, what: Callable[[], Any]) -> Any:
        """The first answer that is something. Raises AssertionError when none comes."""
        deadline = time.monotonic() + ANSWER_DEADLINE
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if found := what():
                    return found
            time.sleep(0.1)
        raise AssertionError(f"not within {ANSWER_DEADLINE} s")

    def families(self) -> Mapping[str, str]:
        """The type of every metric that a target has shown, with samples or not, by its name."""
        return {each["metric"]: each["type"] for each in self.ask("targets/metadata", limit=100_000)}

    def names(self) -> Sequence[str]:
        """The names of all series."""
        found: list[str] = self.ask("label/__name__/values")
        return found


@contextlib.contextmanager
def prometheus_server(folder: Path, configuration: Path) -> Iterator[PrometheusServer]:
    """Runs one on a free port of loopback, with its data in `folder`, until the context ends."""
    url = f"http://127.0.0.1:{free_port()}"
    argv = [
        program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    server = PrometheusServer(url)
    try:
        server.until(server.is_ready)
        yield server
    finally:
        server.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
