"""The `baton` command as it is typed, against a running stack."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.app import main
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions, connect
from tests.support.cluster.ports import free_port
from tests.support.paths import REPOSITORY
from tests.support.tiny_stack.running import DEADLINE, TinyStack
from tests.support.warm.forked_baton import run_baton


def baton(*argv: str, run_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    where = ["--run-dir", str(run_dir)] if run_dir else []
    return run_baton(*argv, *where, timeout=DEADLINE)


def answered(*argv: str, run_dir: Path) -> Any:
    done = baton(*argv, "--json", run_dir=run_dir)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    return one_line(done.stderr)


def one_line(said: str) -> str:
    lines = said.strip().splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("baton: ")
    return lines[0]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    """The one line that a command says which fails. It runs in this process: starting Python takes longer than it."""
    monkeypatch.setattr(sys, "argv", ["baton", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    return one_line(capsys.readouterr().err)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyStack]:
    """One for the tests that leave it as it was."""
    running = TinyStack(tmp_path_factory.mktemp("stack") / "run", counts={"engines": 2}, max_instances=4)
    running.ready()
    yield running
    running.destroy()


def test_ps_names_every_process_with_pid_phase_and_uptime(stack: TinyStack) -> None:
    shown = ps(stack, lambda shown: {row["phase"] for row in shown["processes"]} == {"ready"})
    assert {row["instance"]: row["pid"] for row in shown["processes"]} == {
        name: stack.pid(name) for name in stack.instances()
    }
    assert all(row["uptime"] >= 0 and row["load"] == 0 for row in shown["processes"])
    assert shown["supervisor_pid"] == stack.process.pid


def test_ps_is_a_table_for_people(stack: TinyStack) -> None:
    shown = baton("ps", run_dir=stack.run_dir).stdout
    assert all(name in shown for name in stack.instances())


def test_a_drained_instance_is_draining_until_it_is_undrained(stack: TinyStack) -> None:
    assert answered("drain", "tokenizer-1", "--force", run_dir=stack.run_dir)["asked"] == "drain"
    ps(stack, lambda shown: phase_in(shown, "tokenizer-1") == "draining")
    assert answered("undrain", "tokenizer-1", run_dir=stack.run_dir)["asked"] == "undrain"
    ps(stack, lambda shown: phase_in(shown, "tokenizer-1") == "ready")


def ps(stack: TinyStack, condition: Callable[[Any], bool]) -> Any:
    """What it shows once it is so: control messages are under way for a moment, and a process may be late to speak."""
    deadline = time.monotonic() + DEADLINE
    while not condition(shown := answered("ps", run_dir=stack.run_dir)):
        assert time.monotonic() < deadline, shown
    return shown


def phase_in(shown: Any, instance: str) -> str | None:
    phase: str | None = next(row["phase"] for row in shown["processes"] if row["instance"] == instance)
    return phase


def test_draining_somebody_unknown_names_the_known(stack: TinyStack) -> None:
    assert "tokenizer-1" in one_line_error(baton("drain", "nobody", run_dir=stack.run_dir))


def test_scale_starts_and_stops_processes(stack: TinyStack) -> None:
    assert answered("scale", "detokenizer=2", run_dir=stack.run_dir)["started"] == ["detokenizer-2"]
    stack.until(lambda state: "detokenizer-2" in {m.instance for m in state.members})
    assert answered("scale", "detokenizer=1", run_dir=stack.run_dir)["stopping"] == ["detokenizer-2"]
    stack.until(lambda state: "detokenizer-2" not in {m.instance for m in state.members})


def test_a_pool_is_scaled_by_its_name(stack: TinyStack) -> None:
    assert answered("scale", "decode=1", run_dir=stack.run_dir)["started"] == ["decode-1", "decode-1-rank0"]
    stack.ready()
    assert answered("scale", "decode=0", run_dir=stack.run_dir)["stopping"] == ["decode-1", "decode-1-rank0"]
    stack.until(lambda state: not any(m.instance.startswith("decode") for m in state.members))


@pytest.mark.parametrize(
    "assignment", ["tokenizer", "tokenizer=", "tokenizer=-1", "tokenizer=0", "tokenizer=99999", "worker=2"]
)
def test_scaling_nonsense_is_refused_in_one_line(
    stack: TinyStack, assignment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(capsys, monkeypatch, "scale", assignment, f"--run-dir={stack.run_dir}")


def test_no_more_processes_are_started_than_the_stack_may_have(
    stack: TinyStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capsys, monkeypatch, "scale", "engines=255", f"--run-dir={stack.run_dir}")
    assert "engines=255: from 1 to 4 are possible (--max-instances)" in said


def test_logs_merge_all_services_in_time_order(stack: TinyStack) -> None:
    done = baton("logs", "--json", run_dir=stack.run_dir)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"supervisor", "tokenizer-1", "engine-2-rank0"} <= {line["instance"] for line in lines}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_logs_of_a_service_are_those_of_all_its_instances_past_ones_too(stack: TinyStack) -> None:
    done = baton("logs", "worker", "--json", run_dir=stack.run_dir)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["instance"] for line in lines} >= {"engine-1-rank0", "engine-2-rank0"}
    assert {line["service"] for line in lines} == {"worker"}


def test_logs_of_an_instance_are_its_own(stack: TinyStack) -> None:
    done = baton("logs", "engine-2", "--json", run_dir=stack.run_dir)
    assert {json.loads(line)["instance"] for line in done.stdout.splitlines()} == {"engine-2"}


@pytest.mark.parametrize(("argv", "named"), [(("kitchen",), "'kitchen'"), (("--request", "nobodys"), "'nobodys'")])
def test_logs_that_hold_nothing_of_the_kind_say_so(stack: TinyStack, argv: tuple[str, ...], named: str) -> None:
    said = one_line_error(baton("logs", *argv, run_dir=stack.run_dir))
    assert named in said
    assert "engine-1-rank0" in said


async def test_any_nats_program_can_operate_the_stack_with_what_nats_env_says(stack: TinyStack) -> None:
    known = answered("nats-env", run_dir=stack.run_dir)
    options = NatsOptions(servers=(known["NATS_URL"],), user=known["NATS_USER"], password=known["NATS_PASSWORD"])
    bus = await connect(options)
    try:
        async with asyncio.timeout(DEADLINE):  # whoever was late to speak is not listed for a moment
            while not stack.instances() <= await listed(bus):
                await asyncio.sleep(0.1)
    finally:
        await bus.close()


async def listed(bus: Bus) -> set[str]:
    answer = json.loads(await bus.request_raw("admin.list", b"", DEADLINE))
    return {each["instance"] for each in answer["instances"]}


def test_doctor_finds_the_running_stack_s_bus(stack: TinyStack) -> None:
    done = baton("doctor", "--json", run_dir=stack.run_dir)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["NATS"]["status"] == "ok"
    assert "8 MiB" in findings["NATS"]["detail"]
    assert findings["nats-server"]["status"] == "ok"
    # Its gateway is one that serves no HTTP, and that is what doctor has to notice.
    assert findings["gateway"]["status"] == "fail"
    assert done.returncode == 1
    assert all(finding["remedy"] for finding in findings.values() if finding["status"] != "ok")


def test_chat_with_a_gateway_that_does_not_answer_is_one_line(stack: TinyStack) -> None:
    assert "does not answer" in one_line_error(baton("chat", "hello", run_dir=stack.run_dir))


def test_a_second_stack_under_the_same_name_is_refused(stack: TinyStack) -> None:
    error = one_line_error(baton("up", "--model", str(model(stack.run_dir)), run_dir=stack.run_dir))
    assert "runs already" in error
    assert "runs already" in one_line_error(baton("up", "--detach", run_dir=stack.run_dir))


def model(folder: Path) -> Path:
    """A directory that passes for a model's until a service reads it."""
    there = folder.parent / "model"
    there.mkdir(exist_ok=True)
    (there / "config.json").write_text("{}")
    return there


def test_a_port_in_use_is_named(stack: TinyStack, tmp_path: Path) -> None:
    state = stack.ready()
    nats_port = state.nats_url[0].rpartition(":")[2]
    error = one_line_error(baton("up", "--model", str(model(tmp_path)), "--port", nats_port, run_dir=tmp_path / "run"))
    assert nats_port in error
    assert "--port" in error


def test_down_ends_the_stack_and_what_it_left_can_be_read(tmp_path: Path) -> None:
    stack = TinyStack(tmp_path / "run")
    try:
        stack.ready()
        done = baton("down", run_dir=stack.run_dir)
        assert done.returncode == 0
        assert stack.ended() == 0
        stack.until_nobody_is_left()
        assert "no stack runs" in one_line_error(baton("ps", run_dir=stack.run_dir))
        assert "stop requested" in baton("logs", "supervisor", run_dir=stack.run_dir).stdout
    finally:
        stack.destroy()


def test_down_now_does_not_wait_for_requests(tmp_path: Path) -> None:
    stack = TinyStack(tmp_path / "run", settings={"gateway": {"busy": "true"}}, drain_timeout=100.0)
    try:
        stack.ready()
        assert baton("down", "--now", run_dir=stack.run_dir).returncode == 0
        stack.until_nobody_is_left()
    finally:
        stack.destroy()


@pytest.mark.parametrize(
    "argv",
    [
        ("down",),
        ("ps",),
        ("logs",),
        ("drain", "engine-1"),
        ("undrain", "engine-1"),
        ("scale", "tokenizer=2"),
        ("chat", "hello"),
    ],
)
def test_without_a_stack_every_command_says_so_in_one_line(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(capsys, monkeypatch, *argv, f"--run-dir={tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("up", "--model", "/no/such/folder"), "/no/such/folder"),
        (("up", "--model", ""), "--model"),
        (("up", "--pp-layers", "3,2"), "--pp"),
        (("up", "--namespace", "a b"), "--namespace 'a b'"),
        (("up", "--load-format", "dummy", "--model", "llama"), "llama-3.1-8b"),
        (("up", "--set", "nonsense"), "nonsense"),
        (("up", "--engines", "2", "--set", "scheduler.journal=no-such-folder"), "no-such-folder"),
        (("up", "--set", "kitchen.sink=1"), "kitchen"),
        (("up", "--set", "scheduler.polcy=priority"), "scheduler.policy is near"),
        (("up", "--model", "model.gguf"), "no such file; expected: a folder"),
        (("up", "--kvstore-memory", "9999TiB"), "--shm-size"),
        (("up", "--lora", "a=/nope"), "--lora a=/nope: there is no /nope/adapter_config.json"),
        (("up", "--run-dir", "/dev/null/x"), "--run-dir /dev/null/x: Not a directory"),
        (("up", "-d", "--run-dir", "/dev/null"), "--run-dir /dev/null: File exists"),
        (("chat", "--url", "ftp://x", "hello"), "ftp://x"),
        (("chat", "--url", f"http://127.0.0.1:{free_port()}", "hello"), "is a stack running there?"),
        (("ps", "--name", "../../etc"), "../../etc"),
    ],
)
def test_what_was_typed_wrong_is_named_in_one_line(
    argv: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named in refused(capsys, monkeypatch, *argv)


INTERRUPTED = """
import os, signal, sys
sys.argv = ["baton", "up", "--device=sim", "--port=0", f"--run-dir={sys.argv[1]}"]

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

import deploy.cli
sys.meta_path.insert(0, Interrupting())
deploy.cli.main()
"""


@pytest.mark.parametrize("module", ["deploy.cli.app", "deploy.cli.up.command", "deploy.cli.up.run"])
def test_ctrl_c_while_modules_are_imported_ends_the_command_at_once(module: str, tmp_path: Path) -> None:
    code = INTERRUPTED.replace("MODULE", repr(module))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_unknown_option_is_a_usage_error_without_traceback() -> None:
    done = baton("up", "--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_version_is_shown_and_machine_readable() -> None:
    assert json.loads(baton("version", "--json").stdout)["baton"]
    assert baton("version").stdout.startswith("baton ")
