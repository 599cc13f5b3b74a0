"""Processes forked from a template are what they would be if each had been started by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from deploy.supervisor.processes import ChildProcesses, Exit, marked_processes
from deploy.supervisor.template.blanks import blank_processes, next_blank
from deploy.supervisor.template.identity import MAX_NAME_BYTES
from deploy.supervisor.template.link import TemplateProcess
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are Linux's only")
MODULE = "tests.support.forked"
DEADLINE = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that takes its time on a busy machine is not given up."""
    monkeypatch.setattr("deploy.supervisor.template.link.FORK_TIMEOUT", DEADLINE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


class Host:
    """Child processes, and a template for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.news = 0
        self.children = ChildProcesses(dict(os.environ), folder)
        self.template = TemplateProcess("template", [MODULE], self._notified)

    def _notified(self) -> None:
        self.news += 1

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str, *words: str, **environment: str) -> int:
        """Its pid, which may have ended by now."""
        argv = [sys.executable, "-m", MODULE, *words]
        return self.children.start(name, argv, self.log(name), environment, self.template)

    def sleeping(self, name: str, *words: str, **environment: str) -> psutil.Process:
        """One that does not end by itself."""
        return psutil.Process(self.start(name, "sleep", *words, **environment))

    async def ended(self) -> Exit:
        async with asyncio.timeout(DEADLINE):
            while not (found := self.children.exited()):
                await asyncio.sleep(0.01)
        return found[0]


@asynccontextmanager
async def host(folder: Path, *flags: str) -> AsyncIterator[Host]:
    """With a template that is settled."""
    made = Host(folder)
    made.children.start_template(made.template, flags, made.log("template"), {})
    try:
        await until(lambda: made.template.is_settled)
        yield made
    finally:
        made.children.kill_all()
        made.template.close()


def template_of(folder: Path) -> psutil.Process:
    (found,) = [identity.pid for name, identity in marked_processes(folder) if name == "template"]
    return psutil.Process(found)


async def test_a_forked_process_has_its_own_name_session_environment_and_log(tmp_path: Path) -> None:
    async with host(tmp_path) as made:
        forked = made.sleeping("engine-1-rank0", "--more", SAID="here")
        assert forked.ppid() == template_of(tmp_path).pid
        await until(lambda: made.log("engine-1-rank0").exists() and made.log("engine-1-rank0").read_text() != "")
        said = json.loads(made.log("engine-1-rank0").read_text())
        assert said == {"argv": ["sleep", "--more"], "said": "here", "name": "__main__"}
        assert os.getsid(forked.pid) == os.getpgid(forked.pid) == forked.pid
        assert {name for name, _ in marked_processes(tmp_path)} == {"template", "engine-1-rank0"}
        assert [word for word in forked.cmdline() if word][1:] == ["-m", MODULE, "sleep", "--more"]
        assert forked.num_fds() == 3


async def test_services_are_forked_by_the_names_of_their_modules_and_run_as_programs(tmp_path: Path) -> None:
    async with host(tmp_path) as made:
        template = TemplateProcess("service-template", ["services.coordinator", "services.gateway"], lambda: None)
        made.children.start_template(template, (), made.log("service-template"), {})
        try:
            await until(lambda: template.is_settled)
            argv = [sys.executable, "-m", "services.coordinator", "--help"]
            made.children.start("coordinator-1", argv, made.log("coordinator-1"), {}, template)
            assert await made.ended() == Exit("coordinator-1", 0)
            assert made.log("coordinator-1").read_text().startswith("usage: ")
            assert template.fork([sys.executable, "-m", "services.scheduler"], {}, 1) is None, (
                "it imported no such thing"
            )
            assert template.is_connected
        finally:
            template.close()


async def test_how_a_forked_process_ended_is_known(tmp_path: Path) -> None:
    async with host(tmp_path) as made:
        made.start("one", "exit")
        assert await made.ended() == Exit("one", 3)
        made.start("two", "raise")
        assert await made.ended() == Exit("two", 1)
        assert "RuntimeError: a bug of the program" in made.log("two").read_text()
        for name in ("one", "two"):  # libraries that look for leaks would fill their last words
            assert made.log(name).read_text().endswith("\n0 objects are never freed\n")
        before = made.news
        made.sleeping("three").kill()
        await until(lambda: made.news > before)  # said without being asked
        assert await made.ended() == Exit("three", -signal.SIGKILL)


async def test_forked_processes_outlive_their_template_and_the_next_ones_are_started(tmp_path: Path) -> None:
    async with host(tmp_path) as made:
        forked = made.sleeping("forked")
        template_of(tmp_path).kill()
        await until(lambda: not made.template.is_connected)
        assert not made.children.has_ended("forked")
        started = made.sleeping("started")
        assert started.ppid() == os.getpid()
        forked.kill()
        assert await made.ended() == Exit("forked", None)
        assert not made.template.may_start, "a template that died is not started again at once"


async def test_a_template_that_stands_still_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.supervisor.template.link.FORK_TIMEOUT", 1e6)  # and is not waited for
    async with host(tmp_path) as made:
        template_of(tmp_path).suspend()
        assert made.sleeping("started").ppid() == os.getpid()
        assert not made.template.is_connected


async def test_what_is_forked_too_late_is_ended_and_later_ones_are_forked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host(tmp_path) as made:
        template = template_of(tmp_path)
        monkeypatch.setattr("deploy.supervisor.template.link.FORK_TIMEOUT", -1.0)  # no answer is early enough
        started = made.sleeping("started")
        assert started.ppid() == os.getpid()
        monkeypatch.setattr("deploy.supervisor.template.link.FORK_TIMEOUT", DEADLINE)

        async with asyncio.timeout(DEADLINE):
            number, later = 0, started
            while later.ppid() != template.pid:  # until the answer that is overdue has come
                await asyncio.sleep(0.01)
                number += 1
                later = made.sleeping(f"later-{number}")
        await until(lambda: [child.pid for child in template.children()] == [later.pid])
        assert started.is_running()


async def test_a_template_that_runs_and_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with host(tmp_path) as made:
        monkeypatch.setattr("deploy.supervisor.template.link.FORK_TIMEOUT", -1.0)
        monkeypatch.setattr("deploy.supervisor.template.link.SILENCE_TIMEOUT", -1.0)
        monkeypatch.setattr(made.template, "read", lambda: None)  # whatever it says is not heard
        assert made.sleeping("started").ppid() == os.getpid()
        assert made.template.is_connected
        assert made.sleeping("another").ppid() == os.getpid()
        assert not made.template.is_connected


@pytest.mark.parametrize(
    ("flag", "reason"), [("threads", "the template has 2 threads"), ("missing", "ImportError: no such library")]
)
async def test_where_forking_is_not_possible_processes_are_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flag: str, reason: str
) -> None:
    async with host(tmp_path, flag) as made:
        assert made.sleeping("started").ppid() == os.getpid()
        assert reason in [record.__dict__.get("reason") for record in caplog.records]
        assert not made.template.may_start


async def test_a_process_whose_name_does_not_fit_is_started_and_others_are_forked(tmp_path: Path) -> None:
    async with host(tmp_path) as made:
        program = [sys.executable, "-m", MODULE, "sleep"]
        for bytes_of_name, parent in ((MAX_NAME_BYTES, template_of(tmp_path).pid), (MAX_NAME_BYTES + 1, os.getpid())):
            pid = made.children.start("x" * bytes_of_name, program, tmp_path / "long.log", {}, made.template)
            assert psutil.Process(pid).ppid() == parent
        assert made.template.is_connected
        long_words = "y" * 5000  # more than the kernel has room to show
        made.start("one", "exit", long_words)
        assert await made.ended() == Exit("one", 3)
        assert long_words in made.log("one").read_text()


def test_a_template_that_is_forked_of_its_supervisor_is_as_one_that_was_executed(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.forked.supervisor", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE, check=True, cwd=REPOSITORY)
    assert json.loads(done.stdout) == {
        "marked": ["one", "template"],
        "argv": ["-m", MODULE, "sleep"],
        "descriptors": [3, 7],
        "template is one of them": True,
        "own session": True,
        "exits": {"two": 1, "three": 3},
    }
    assert done.stderr == "", "what those say that were forked is in logs of theirs"
    assert json.loads((tmp_path / "one.log").read_text()) == {"argv": ["sleep"], "said": "here", "name": "__main__"}
    last_words = "RuntimeError: a bug of the program\n0 objects are never freed\n"
    assert (tmp_path / "two.log").read_text().endswith(last_words)


BLANKS = """
import os, subprocess, sys
from deploy.supervisor.template import blanks
with blanks.blank_processes(2):
    too_much = {"BATON_PROCESS_NAME": "x" * blanks.MAX_MESSAGE_BYTES}
    blank = blanks.next_blank()
    print(blank.become([sys.executable, "-m", "json"], too_much, 1, 0), os.path.exists(f"/proc/{blank.pid}"))
    unused = blanks._waiting[0].pid
print(os.path.exists(f"/proc/{unused}"))
"""


def test_a_blank_process_that_is_of_no_use_ends() -> None:
    done = subprocess.run([sys.executable, "-c", BLANKS], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_a_supervisor_that_is_not_to_fork_does_not_ask_the_system_whether_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("other systems have no such folder"))
    with blank_processes(0):
        assert next_blank() is None


def test_a_supervisor_with_threads_forks_nothing_of_itself() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with blank_processes(1):
        assert next_blank() is None
    ended.set()
    thread.join()
