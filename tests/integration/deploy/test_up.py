"""`baton up` with real services: in the background and in front, ended in order and by force."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.supervisor.state_file import SHARED_MEMORY, StackState, directory_of, is_held, read_state
from shared.addresses import is_loopback
from shared.ids import EngineId
from tests.support.cluster.ports import free_port
from tests.support.cluster.stack import CHANGE_DEADLINE, LOOK_EVERY, START_DEADLINE, RunningStack, running_stack
from tests.support.paths import REPOSITORY

QUESTION = "What is the capital of France?"
KEY = "a-key-of-this-test"
KSM_STATE = Path("/proc/self/ksm_stat")
MERGES_PAGES = KSM_STATE.exists() and "ksm_merge_any" in KSM_STATE.read_text()
"""Whether the kernel can keep equal pages once, and says of which processes (Linux 6.16)."""


def baton(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *argv],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=START_DEADLINE,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def present(run_dir: Path) -> StackState:
    state = read_state(run_dir)
    assert state is not None
    return state


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a stack that was started with --detach, with a key, two gateways, and its pages offered to
    the kernel where that can take them."""
    run_dir = tmp_path_factory.mktemp("detached") / "run"
    more = ("--port=0", "--device=cpu", "--gateways=2", f"--api-key={KEY}", f"--run-dir={run_dir}")
    more += ("--ksm",) if MERGES_PAGES else ()
    started = baton("up", "--detach", *more)
    assert started.returncode == 0, started.stdout + started.stderr
    assert f"curl {present(run_dir).url}/v1/chat/completions" in started.stdout
    assert f"API {present(run_dir).url}/docs  console {present(run_dir).url}/console" in started.stdout
    assert f"baton down --run-dir {run_dir}" in started.stdout
    yield run_dir
    state = present(run_dir)
    assert baton("down", f"--run-dir={run_dir}").returncode == 0
    assert not is_held(run_dir)
    assert not any(psutil.pid_exists(member.pid) for member in state.members if member.pid is not None)


def test_a_question_is_answered_with_the_stacks_own_key(detached: Path) -> None:
    assert KEY not in " ".join(psutil.Process(present(detached).members[0].pid or 0).cmdline())
    done = baton("chat", QUESTION, "--temperature=0", f"--run-dir={detached}")
    assert "Paris" in done.stdout, done.stderr


def test_nothing_of_the_command_line_is_in_the_supervisor(detached: Path) -> None:
    supervisor = psutil.Process(present(detached).pid)
    assert KEY not in " ".join(supervisor.cmdline())
    assert not [found.path for found in supervisor.memory_maps() if "pydantic" in found.path]


def test_a_supervisor_that_is_ready_lets_go_of_code_that_only_a_start_runs(detached: Path) -> None:
    supervisor = psutil.Process(present(detached).pid)

    def resident() -> int:
        mapped = [found.rss for found in supervisor.memory_maps() if "libcrypto" in found.path]
        assert mapped, "what was let go of is mapped all the same"
        return sum(mapped)

    deadline = time.monotonic() + CHANGE_DEADLINE  # it does so once it has said that it is ready
    while resident() > 1 << 20:
        assert time.monotonic() < deadline, f"{resident()} bytes of the library that TLS needs"
        time.sleep(LOOK_EVERY)


@pytest.mark.skipif(not MERGES_PAGES, reason="this kernel does not say")
def test_pages_of_all_processes_are_offered_to_the_kernel(detached: Path) -> None:
    state = present(detached)
    offered = {
        pid: Path(f"/proc/{pid}/ksm_stat").read_text() for pid in (state.pid, *(each.pid for each in state.members))
    }
    assert len(offered) > 8
    assert [pid for pid, said in offered.items() if "ksm_merge_any: yes" not in said] == []


def test_a_wrong_key_is_refused_in_one_line(detached: Path) -> None:
    done = baton("chat", QUESTION, "--api-key=wrong", f"--run-dir={detached}")
    assert done.returncode == 1
    assert done.stderr.startswith("baton: the gateway answered 401")
    assert "--api-key" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_request_is_followed_through_all_services_by_its_id(detached: Path) -> None:
    baton("chat", QUESTION, "--temperature=0", f"--run-dir={detached}")
    every = [json.loads(line) for line in baton("logs", "--json", f"--run-dir={detached}").stdout.splitlines()]
    request = next(line["request"] for line in every if line["event"] == "answered")
    followed = baton("logs", "--json", f"--request={request}", f"--run-dir={detached}").stdout.splitlines()
    assert {json.loads(line)["service"] for line in followed} >= {"gateway", "tokenizer", "coordinator", "detokenizer"}


def test_nobody_else_may_read_what_a_stack_writes(detached: Path) -> None:
    written = [path for path in detached.rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"up.log", "state.json", "gateway-1.log"}
    assert [path.name for path in written if path.stat().st_mode & 0o077] == []


def test_nobody_says_or_hears_what_the_bus_does_not_permit(detached: Path) -> None:
    baton("chat", QUESTION, f"--run-dir={detached}")
    assert "violation" not in (detached / "logs" / "nats-server.log").read_text().lower()


def test_bench_finds_the_stack_by_itself(detached: Path) -> None:
    few = ("--num-prompts=2", "--random-input-len=8", "--random-output-len=4", "--warmup=0", "--no-progress")
    done = baton("bench", "serve", "--json", *few, f"--run-dir={detached}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flag", "status", "said"),
    [
        (
            "--max-model-len=100000",
            1,
            "engine-1-rank0 cannot serve: max_model_len 100000: the model has 2048 positions",
        ),
        ("--set=detokenizer.metrics_port=frobnicate", 2, "--set detokenizer.metrics_port=frobnicate: "),
    ],
)
def test_what_cannot_be_served_is_said_once_and_in_words(tmp_path: Path, flag: str, status: int, said: str) -> None:
    done = baton("up", "--device=sim", "--port=0", f"--run-dir={tmp_path}", flag)
    assert done.returncode == status
    assert done.stderr.count(said) == 1
    assert '{"' not in done.stderr
    assert len(done.stderr.splitlines()) < 10
    assert not is_held(tmp_path)


def test_nothing_of_the_folder_where_it_is_typed_is_run(tmp_path: Path) -> None:
    """However users call what they wrote."""
    folder = tmp_path / "theirs"
    for module in ("deploy", "services", "shared", "queue", "tokenize"):
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text("raise SystemExit('of the user')")
    command = [sys.executable, "-P", "-m", "deploy.cli"]  # as the installed one, which looks there for nothing
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    options = ("--device=sim", "--port=0", "--kvstore-memory=0", f"--run-dir={tmp_path / 'run'}")
    for argv in (("up", "--detach", *options), ("down", f"--run-dir={tmp_path / 'run'}")):
        done = subprocess.run(
            [*command, *argv],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_DEADLINE,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert (done.returncode, "of the user" in done.stdout) == (0, False), done.stdout + done.stderr


def of_the_stack(run_dir: Path) -> list[psutil.Process]:
    """Processes whose command lines name its folder."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in word for word in each.info["cmdline"] or ())
    ]


def test_an_interrupt_before_a_stack_in_the_background_is_ready_leaves_nothing(tmp_path: Path) -> None:
    """Its supervisor is told as soon as there is a server that it has to end."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "deploy.cli", "up", "--detach", "--device=sim", "--port=0", f"--run-dir={run_dir}"]
    typed = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + START_DEADLINE
    while not any("nats.conf" in each.info["cmdline"][-1] for each in of_the_stack(run_dir)):
        assert time.monotonic() < until
        time.sleep(LOOK_EVERY)
    typed.send_signal(signal.SIGINT)
    assert typed.wait(START_DEADLINE) == 130
    assert psutil.wait_procs(of_the_stack(run_dir), timeout=30)[1] == []  # their keeper would end them much later


TOLD_IN_THE_MIDDLE = """
import os, signal, subprocess

class Told(subprocess.Popen):
    def __init__(self, argv, **more):
        super().__init__(argv, **more)
        if "deploy.supervisor.keeper" in argv:
            os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Told
from deploy.cli import main
main()
"""


def test_told_to_end_between_the_start_of_a_process_and_the_note_of_it_a_stack_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("up", "--device=sim", "--port=0", "--kvstore-memory=0", f"--run-dir={run_dir}")
    done = subprocess.run(
        [sys.executable, "-c", TOLD_IN_THE_MIDDLE, *options],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=START_DEADLINE,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "keeper" in (run_dir / "logs" / "supervisor.log").read_text()  # it had been started
    assert psutil.wait_procs(of_the_stack(run_dir), timeout=30)[1] == []


@pytest.mark.faults
def test_a_stack_whose_words_nobody_can_keep_starts_and_ends_as_any_other(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        argv = ("up", "--device=sim", "--port=0", "--kvstore-memory=0", f"--run-dir={tmp_path}")
        up = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *argv], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=full
        )
    end = time.monotonic() + START_DEADLINE
    while (state := read_state(tmp_path)) is None or state.phase != "ready":
        assert up.poll() is None
        assert time.monotonic() < end
        time.sleep(LOOK_EVERY)
    up.terminate()
    assert up.wait(START_DEADLINE) == 0


@pytest.mark.faults
def test_without_a_successor_real_ranks_outlive_a_killed_supervisor_for_a_while_and_end_in_order(
    tmp_path: Path,
) -> None:
    port = free_port()
    with running_stack(tmp_path, tp=2, more=("--orphan-timeout=8", f"--port={port}")) as stack:
        state = stack.state
        arenas = directory_of(stack.run_dir)
        assert "Paris" in answer(state)
        assert open_to_the_network(stack) == []
        meeting = Path(state.rendezvous[EngineId("engine-1")].removeprefix("file://"))
        assert stat.S_IMODE(meeting.parent.stat().st_mode) == 0o700
        mapped = mapped_shared_memory(state)
        assert any(file.is_relative_to(arenas) for file in mapped)
        stack.kill_supervisor()
        assert "Paris" in answer(state)
        assert gone(stack)
        assert not [file for file in mapped if file.exists()]
        assert not arenas.exists()
        ended = [line for line in map(json.loads, stack.log("supervisor").splitlines()) if line["event"] == "ended"]
        assert [ended[0]["child"], ended[-1]["child"]] == ["gateway-1", "kvstore-1"]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def answer(state: StackState) -> str:
    """To the question, from a client that is running already: starting one may take longer than orphans live."""
    body = {"model": state.model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    request = urllib.request.Request(
        f"{state.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=CHANGE_DEADLINE) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def open_to_the_network(stack: RunningStack) -> list[str]:
    """Where an engine's ranks take connections from other machines."""
    ranks = [psutil.Process(stack.pid(f"engine-1-rank{rank}")) for rank in range(2)]
    listening = [each for rank in ranks for each in rank.net_connections() if each.status == "LISTEN"]
    assert listening, "they exchange tensors somewhere"
    return [str(each.laddr) for each in listening if not is_loopback(each.laddr.ip)]


def gone(stack: RunningStack) -> bool:
    """Whether all have ended, after a while."""
    deadline = time.monotonic() + START_DEADLINE
    while stack.leftovers() and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
    return not stack.leftovers()


def mapped_shared_memory(state: StackState) -> set[Path]:
    """Files of shared memory that the stack's processes map. Only these: other tests have theirs beside them."""
    processes = [psutil.Process(member.pid) for member in state.members if member.pid is not None]
    files = {Path(mapping.path) for process in processes for mapping in process.memory_maps()}
    return {file for file in files if file.is_relative_to(SHARED_MEMORY)}
