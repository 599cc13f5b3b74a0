"""The ring in containers, built and run for real. Minutes, so only by `make test-compose`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nats_server import free_port

REPOSITORY = Path(__file__).parents[2]
BUILD_DEADLINE = 1800.0
START_DEADLINE = 180.0
COMMAND_DEADLINE = 120.0
LIGHT = ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer")


def compose_command() -> list[str] | None:
    """The plugin or the older program, where a Docker daemon answers."""
    if shutil.which("docker") is None or _run(["docker", "info"]).returncode != 0:
        return None
    if _run(["docker", "compose", "version"]).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def _run(
    argv: Sequence[str], deadline: float = COMMAND_DEADLINE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=deadline,
        stdin=subprocess.DEVNULL,
        check=False,
    )


class ComposeProject:
    """Owns one project of its own name, so that nobody else's containers are touched."""

    def __init__(self, command: list[str]) -> None:
        self.port = free_port()
        self._command = [*command, "--project-name", f"batontest{os.getpid()}"]
        self._environment = {"BATON_PORT": str(self.port), "BATON_API_KEYS": "compose-key", "NATS_PASSWORD": "a-test"}

    def __call__(self, *argv: str, deadline: float = COMMAND_DEADLINE) -> str:
        done = _run([*self._command, *argv], deadline, **self._environment)
        assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def chat(self, question: str, key: str = "compose-key") -> dict[str, Any]:
        body = {"model": "baton-demo", "temperature": 0, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def until_healthy(self, count: int) -> None:
        """Until so many containers are up and each says that it is healthy."""
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            states = [self.state(container) for container in self("ps", "-q").split()]
            if len(states) == count and set(states) == {"healthy"}:
                return
            time.sleep(1)
        raise AssertionError(f"not healthy within {START_DEADLINE} s: {self('ps')}\n{self('logs', '--tail=20')}")

    def state(self, container: str) -> str:
        return _run(["docker", "inspect", "--format", "{{.State.Health.Status}}", container]).stdout.strip()


@pytest.fixture(scope="module")
def project() -> Iterator[ComposeProject]:
    command = compose_command()
    if command is None:
        pytest.skip("no Docker daemon with compose answers here")
    running = ComposeProject(command)
    try:
        running("build", deadline=BUILD_DEADLINE)
        running("up", "--detach")
        running.until_healthy(7)
        yield running
    finally:
        running("down", "--volumes", "--timeout", "10")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_DEADLINE + START_DEADLINE)]


def test_a_chat_goes_through_the_containers(project: ComposeProject) -> None:
    answer = project.chat("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_without_a_key_the_gateway_refuses(project: ComposeProject) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        project.chat("hello", key="wrong")
    refused.value.close()


def test_tokenizers_are_scaled_by_compose(project: ComposeProject) -> None:
    project("up", "--detach", "--no-recreate", "--scale", "tokenizer=3")
    project.until_healthy(9)
    for _ in range(6):
        assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]
    project("up", "--detach", "--no-recreate", "--scale", "tokenizer=1")
    project.until_healthy(7)


@pytest.mark.parametrize("service", LIGHT)
def test_light_images_carry_no_torch_and_run_as_nobody_special(project: ComposeProject, service: str) -> None:
    probe = "import importlib.util, os; print(importlib.util.find_spec('torch'), os.getuid())"
    assert project("exec", "-T", service, "python", "-c", probe).split() == ["None", "10001"]


def test_an_engine_whose_worker_is_gone_is_not_healthy_and_recovers(project: ComposeProject) -> None:
    scheduler = project("ps", "-q", "scheduler").strip()
    project("stop", "--timeout", "5", "worker")
    deadline = time.monotonic() + START_DEADLINE
    while project.state(scheduler) != "unhealthy" and time.monotonic() < deadline:
        time.sleep(1)
    assert project.state(scheduler) == "unhealthy"
    project("start", "worker")
    project.until_healthy(7)
    assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]
