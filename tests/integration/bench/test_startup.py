"""`baton bench startup` on a whole stack: an engine comes, serves and goes; its processes say what took how long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.supervisor.processes import marked_processes
from services.bench.startup import drop_from_page_cache, startup_options
from tests.support.cluster.stack import START_DEADLINE, RunningStack, running_stack
from tests.support.paths import REPOSITORY


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Started as by a user: of what libraries read the tests' warm processes have something else."""
    own = {"HF_HUB_DISABLE_TELEMETRY": "1"}
    with running_stack(tmp_path_factory.mktemp("startup"), kvstore="0", environment=own) as stack:
        yield stack


def test_the_stages_of_one_more_engine_add_up_to_its_start(stack: RunningStack) -> None:
    done = stack.baton("bench", "startup", "--repetitions", "1", "--cold", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (startup,) = result["startups"]
    assert {"spawn", "process", "bus", "libraries", "weights", "warm_up", "registration"} <= startup["stages"].keys()
    assert sum(startup["stages"].values()) == pytest.approx(startup["ready"])
    assert startup["first_token"] > startup["stages"]["weights"]
    assert startup["processor"] > 0
    assert result["cold"] is True
    stack.until(lambda state: {member.instance for member in state.members} >= {"engine-1"})
    assert stack.instances("scheduler") == ["engine-1"]
    assert '"event":"startup"' in stack.log("engine-1-rank0")


def test_where_nothing_stands_by_it_says_what_there_is(stack: RunningStack) -> None:
    done = stack.baton("bench", "startup", "--repetitions", "1", "--standby", "--timeout", "2")
    assert done.returncode == 1
    assert "after 2 s the processes are" in done.stderr
    assert "engine-1" in done.stderr


def test_workers_are_forked_again_when_they_die_and_started_where_nothing_forks_them(stack: RunningStack) -> None:
    worker = stack.pid("engine-1-rank0")
    template = psutil.Process(worker).parent()
    services = psutil.Process(stack.pid("coordinator-1")).parent()
    assert template is not None
    assert services is not None
    assert services.ppid() == template.ppid()
    assert services.pid not in (template.pid, stack.supervisor.pid)
    assert template.ppid() == stack.supervisor.pid
    assert '"event":"template warm"' in stack.log("supervisor")
    forked = stack.replaced("engine-1-rank0", stack.kill("engine-1-rank0"))
    assert psutil.Process(forked).ppid() == template.pid
    stack.wait_until_it_serves()
    template.kill()
    template.wait()
    assert stack.pid("engine-1-rank0") == forked
    assert psutil.pid_exists(forked)
    started = stack.replaced("engine-1-rank0", stack.kill("engine-1-rank0"))
    assert psutil.Process(started).ppid() == stack.supervisor.pid
    stack.wait_until_it_serves()


def test_what_the_stack_of_a_bench_says_is_not_in_its_json() -> None:
    up = "--device sim --kvstore-memory 0 --gateways 1"
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", "--up", up, "--num-prompts", "2", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=START_DEADLINE, check=True)
    assert json.loads(done.stdout)["completed"] == 2
    assert "Ready after" in done.stderr


def test_a_bench_that_is_told_to_end_ends_the_stack_that_it_started(tmp_path: Path) -> None:
    up = "--device sim --kvstore-memory 0 --gateways 1 --set worker.sim_step_ms=5"
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", "--up", up, "--num-prompts", "1000000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stderr is not None
        late = threading.Timer(START_DEADLINE, bench.kill)
        late.start()
        try:
            assert any(line.startswith("Ready after") for line in bench.stderr)
            (run_dir,) = tmp_path.iterdir()
            assert list(marked_processes(run_dir))
            bench.terminate()
            bench.wait()
        finally:
            late.cancel()
    assert not list(marked_processes(run_dir))
    assert list(tmp_path.iterdir()) == []


def test_the_page_cache_forgets_files_without_changing_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "folder").mkdir()
    drop_from_page_cache(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_cold_starts_need_to_know_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        startup_options(["--cold"])
    assert ended.value.code == 2
    assert "--model-dir must say where the model's files are" in capsys.readouterr().err
