"""A container's health check kills a service that was ready and stands still, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.healthcheck import LOOKS_BEFORE_KILL, is_live, is_stalled, look, wait_for_leaders_end
from tests.support.cluster.ports import free_port

SERVICE = """
import sys, time
from prometheus_client import start_http_server
from shared.telemetry.metrics import HEARTBEAT_AGE, PHASE
PHASE.labels("tokenizer", sys.argv[2]).set(1)
HEARTBEAT_AGE.set(float(sys.argv[3]))
start_http_server(int(sys.argv[1]), addr="127.0.0.1")
print("listening", flush=True)
time.sleep(600)
"""
INIT = """
import subprocess, sys
raise SystemExit(subprocess.call([sys.executable, "-c", *sys.argv[1:]]))
"""


class Container:
    """A first process that waits for a service, as in a container."""

    def __init__(self, folder: Path, phase: str, age: float) -> None:
        self.port, self.notes = str(free_port()), folder / "notes"
        argv = [sys.executable, "-c", INIT, SERVICE, self.port, phase, str(age)]
        self.init = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        assert self.init.stdout is not None
        assert self.init.stdout.readline() == b"listening\n"

    def look(self) -> int:
        return look(self.port, self.notes, self.init.pid, wait=0.5)

    def stop(self) -> None:
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.init.pid, signal.SIGKILL)
        self.init.wait()
        assert self.init.stdout is not None
        self.init.stdout.close()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[list[Container]]:
    running: list[Container] = []
    yield running
    for each in running:
        each.end()


def test_a_service_that_stands_still_is_killed_after_a_few_looks(containers: list[Container], tmp_path: Path) -> None:
    container = Container(tmp_path, "ready", 0.1)
    containers.append(container)
    assert container.look() == 0
    container.stop()
    assert [container.look() for _ in range(LOOKS_BEFORE_KILL - 1)] == [1] * (LOOKS_BEFORE_KILL - 1)
    time.sleep(0.1)
    assert container.init.poll() is None
    assert container.look() == 1
    assert container.init.wait(60) == -signal.SIGKILL % 256


def test_an_event_loop_that_does_not_turn_stands_still_though_its_metrics_answer(
    containers: list[Container], tmp_path: Path
) -> None:
    container = Container(tmp_path, "ready", 60.0)
    containers.append(container)
    assert [container.look() for _ in range(LOOKS_BEFORE_KILL)] == [1] * LOOKS_BEFORE_KILL
    assert container.init.wait(60) == -signal.SIGKILL % 256


def test_who_starts_may_take_as_long_as_it_takes(containers: list[Container], tmp_path: Path) -> None:
    container = Container(tmp_path, "starting", 60.0)
    containers.append(container)
    container.stop()
    assert {container.look() for _ in range(LOOKS_BEFORE_KILL + 1)} == {1}
    assert container.init.poll() is None
    assert look(str(free_port()), container.notes, container.init.pid) == 1


def test_a_service_lives_while_its_event_loop_turns_be_it_ready_or_not(
    containers: list[Container], tmp_path: Path
) -> None:
    found = {}
    for phase, age in (("starting", 0.1), ("ready", 60.0)):
        container = Container(tmp_path, phase, age)
        containers.append(container)
        found[phase] = is_live(container.port, wait=60.0)
    assert found == {"starting": 0, "ready": 1}
    assert is_live(str(free_port())) == 1
    containers[0].stop()
    assert is_live(containers[0].port, wait=0.5) == 1
    assert [each.init.poll() for each in containers] == [None, None]


def test_a_service_of_this_release_publishes_the_age_that_is_judged() -> None:
    from prometheus_client import generate_latest

    from shared.telemetry.metrics import HEARTBEAT_AGE

    HEARTBEAT_AGE.set_function(lambda: 7.0)
    assert is_stalled(generate_latest().decode())
    HEARTBEAT_AGE.set_function(lambda: 1.0)
    assert not is_stalled(generate_latest().decode())


def test_who_waits_for_a_leader_returns_when_nobody_listens_there_any_more() -> None:
    with ThreadPoolExecutor(1) as threads:
        with socket.create_server(("127.0.0.1", 0)) as leader:
            port = str(leader.getsockname()[1])
            waiting = threads.submit(wait_for_leaders_end, "127.0.0.1", port)
            leader.settimeout(60)
            leader.accept()[0].close()
            assert not waiting.done()
        assert waiting.result(60) == 0
    assert wait_for_leaders_end("127.0.0.1", port) == 0


def test_who_waits_for_a_leader_that_stays_goes_at_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        assert wait_for_leaders_end("127.0.0.1", str(leader.getsockname()[1]), limit=0.1) == 1
