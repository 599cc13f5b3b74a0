"""The ring in containers, built and run for real. Minutes, so only by `make test-compose`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.cluster.ports import free_port
from tests.support.models.tiny_images import image_part, make_image_model, picture, shown, text_part
from tests.support.paths import REPOSITORY

BUILD_DEADLINE = 1800.0
START_DEADLINE = 180.0
COMMAND_DEADLINE = 120.0
LIGHT = ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer", "kvstore")
AGGREGATED, DISAGGREGATED = 8, 10
"""Containers of each profile."""
LONG_QUESTION = f"{'The fox and the hare met by the old mill. ' * 30}What is the capital of France?"


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

    def __init__(self, command: list[str], name: str, *profiles: str, **environment: str) -> None:
        self.port = free_port()
        chosen = [flag for profile in profiles for flag in ("--profile", profile)]
        self._command = [*command, "--project-name", f"batontest{name}{os.getpid()}", *chosen]
        self._environment = {
            "BATON_PORT": str(self.port),
            "BATON_API_KEYS": "compose-key",
            **environment,
        }

    def __call__(self, *argv: str, deadline: float = COMMAND_DEADLINE) -> str:
        done = _run([*self._command, *argv], deadline, **self._environment)
        assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def chat(self, question: str | list[Any], key: str = "compose-key", **more: Any) -> dict[str, Any]:
        body = {"model": "baton-demo", "temperature": 0, "messages": [{"role": "user", "content": question}], **more}
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
            states = [self.state(container) for container in self.running()]
            if len(states) == count and set(states) == {"healthy"}:
                return
            time.sleep(1)
        raise AssertionError(f"not healthy within {START_DEADLINE} s: {self('ps')}\n{self('logs', '--tail=20')}")

    def running(self) -> list[str]:
        """Ids of the containers that are up; without the one that makes the secrets and ends."""
        containers = self("ps", "-q").split()
        return [each for each in containers if inspected(each, "{{.State.Running}}") == "true"]

    def metric(self, service: str, line: str) -> float:
        """A number of that service's /metrics, by the beginning of its line; 0 where there is none."""
        fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
        shown = self("exec", "-T", service, "python", "-c", fetch).splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in shown if each.startswith(line))

    def state(self, container: str) -> str:
        return inspected(container, "{{.State.Health.Status}}")


def inspected(container: str, what: str) -> str:
    return _run(["docker", "inspect", "--format", what, container]).stdout.strip()


@contextlib.contextmanager
def up(containers: int, name: str, *profiles: str, **environment: str) -> Iterator[ComposeProject]:
    """Built, started, all of them healthy; gone at the end."""
    command = compose_command()
    if command is None:
        pytest.skip("no Docker daemon with compose answers here")
    running = ComposeProject(command, name, *profiles, **environment)
    try:
        running("build", deadline=BUILD_DEADLINE)
        running("up", "--detach")
        running.until_healthy(containers)
        yield running
    finally:
        running("down", "--volumes", "--timeout", "10")


@pytest.fixture(scope="module")
def project() -> Iterator[ComposeProject]:
    """Without a profile, which is the aggregated one."""
    with up(AGGREGATED, "one") as project:
        yield project


@pytest.fixture
def pools() -> Iterator[ComposeProject]:
    with up(DISAGGREGATED, "pools", "disaggregated", BATON_ENGINES="0") as project:
        yield project


pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_DEADLINE + START_DEADLINE)]


def test_a_chat_goes_through_the_containers(project: ComposeProject) -> None:
    answer = project.chat("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_without_a_key_the_gateway_refuses(project: ComposeProject) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        project.chat("hello", key="wrong")
    refused.value.close()


def test_a_file_outlives_the_gateways_container(project: ComposeProject) -> None:
    """The database lies in a volume."""
    with OpenAI(base_url=f"http://127.0.0.1:{project.port}/v1", api_key="compose-key", max_retries=5) as client:
        file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        project("up", "--detach", "--force-recreate", "--no-deps", "gateway")
        project.until_healthy(AGGREGATED)
        assert client.files.content(file.id).content == b"{}\n"


def test_tokenizers_are_scaled_by_compose(project: ComposeProject) -> None:
    project("up", "--detach", "--no-recreate", "--scale", "tokenizer=3")
    project.until_healthy(AGGREGATED + 2)
    for _ in range(6):
        assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]
    project("up", "--detach", "--no-recreate", "--scale", "tokenizer=1")
    project.until_healthy(AGGREGATED)


@pytest.mark.parametrize("service", LIGHT)
def test_light_images_carry_no_torch_and_run_as_nobody_special(project: ComposeProject, service: str) -> None:
    probe = "import importlib.util, os; print(importlib.util.find_spec('torch'), os.getuid())"
    assert project("exec", "-T", service, "python", "-c", probe).split() == ["None", "10001"]


def test_no_secret_can_be_seen_from_outside_a_container(project: ComposeProject) -> None:
    made = project("exec", "-T", "nats", "cat", "/etc/nats/secrets/passwords.conf")
    passwords = dict(re.findall(r'(\w+)_PASSWORD: "(\S+)"', made))
    assert set(passwords) == {service.upper() for service in (*LIGHT, "worker", "encoder", "operator")}
    for container in project("ps", "-q").split():
        shown = _run(["docker", "inspect", container]).stdout
        assert shown
        assert [user for user, password in passwords.items() if password in shown] == []
    for container in project.running():
        shown = _run(["docker", "top", container]).stdout
        assert [user for user, password in passwords.items() if password in shown] == []
    for service in (*LIGHT, "worker"):
        seen = project("exec", "-T", service, "sh", "-c", "stat -c %a:%u /run/baton/*; cat /run/baton/*")
        assert [user for user, password in passwords.items() if password in seen] == [service.upper()]
        assert set(re.findall(r"^\d+:\d+$", seen, re.M)) == {"600:10001"}


def test_a_hung_service_is_restarted(project: ComposeProject) -> None:
    container = project("ps", "-q", "tokenizer").strip()
    started = inspected(container, "{{.State.StartedAt}}")
    project("exec", "-T", "tokenizer", "sh", "-c", "kill -STOP $(cat /proc/1/task/1/children)")
    deadline = time.monotonic() + START_DEADLINE
    while inspected(container, "{{.State.StartedAt}}") == started and time.monotonic() < deadline:
        time.sleep(1)
    assert inspected(container, "{{.State.StartedAt}}") != started
    project.until_healthy(AGGREGATED)
    assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]


def test_an_engine_whose_worker_is_gone_is_not_healthy_and_recovers(project: ComposeProject) -> None:
    scheduler = project("ps", "-q", "scheduler").strip()
    project("stop", "--timeout", "5", "worker")
    deadline = time.monotonic() + START_DEADLINE
    while project.state(scheduler) != "unhealthy" and time.monotonic() < deadline:
        time.sleep(1)
    assert project.state(scheduler) == "unhealthy"
    project("start", "worker")
    project.until_healthy(AGGREGATED)
    assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]


def test_blocks_of_the_store_outlive_its_container_and_the_engines(project: ComposeProject) -> None:
    project.chat(LONG_QUESTION)
    until(lambda: project.metric("kvstore", 'baton_kvstore_slots{state="committed"') > 0)
    project("kill", "kvstore", "scheduler")
    project("up", "--detach", "--no-recreate")
    project.until_healthy(AGGREGATED)
    usage = project.chat(LONG_QUESTION)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COMMAND_DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1)


def test_a_prefill_engine_hands_over_to_a_decode_engine(pools: ComposeProject) -> None:
    assert "Paris" in pools.chat(LONG_QUESTION)["choices"][0]["message"]["content"]
    assert pools.metric("coordinator", 'baton_router_requests_total{kind="disaggregated"') == 1
    assert pools.metric("scheduler-decode", "baton_scheduler_output_tokens_total") > 1
    pools("stop", "--timeout", "5", "scheduler-prefill")
    assert "Paris" in pools.chat("What is the capital of France?")["choices"][0]["message"]["content"]


def test_redis_below_the_store_is_started_by_its_profile() -> None:
    image = os.environ.get("REDIS_IMAGE", "redis:7-alpine")
    command = compose_command()
    if command is not None and not image_is_there(image):
        pytest.skip(f"{image} can neither be found nor fetched here")
    with up(AGGREGATED + 1, "redis", "redis", BATON_REDIS_URL_FILE="/run/baton/redis-url") as project:
        assert "NOAUTH" in project("exec", "-T", "redis", "redis-cli", "ping")
        assert "Paris" in project.chat("What is the capital of France?")["choices"][0]["message"]["content"]


def test_the_encoder_of_its_profile_sees_images(tmp_path: Path) -> None:
    model, image, length = make_image_model(tmp_path), picture(0), 16
    for each in (tmp_path, *tmp_path.iterdir()):  # the containers' user reads it
        each.chmod(0o755)
    question = [image_part(image), text_part("What is it?")]
    with up(AGGREGATED + 1, "images", "images", BATON_MODEL_DIR=str(tmp_path)) as project:
        answer = project.chat(question, max_tokens=length, ignore_eos=True)
    said = answer["choices"][0]["message"]["content"]
    assert said == model.text(shown([{"role": "user", "content": question}]), [image], length)


def image_is_there(image: str) -> bool:
    return any(_run(["docker", *how, image]).returncode == 0 for how in (["image", "inspect"], ["pull"]))
