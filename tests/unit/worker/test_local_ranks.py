"""The ranks of a container: which settings each has, and that they end together."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker.config import WorkerConfig
from services.worker.local_ranks import end_all, rank_flags
from shared.config import ConfigError, load_config

DEADLINE = 60.0
SETTINGS = ["--engine=e-0", "--model=/model"]


def configs(tmp_path: Path, *flags: str) -> list[WorkerConfig]:
    """Of the ranks that a process with these flags starts."""
    argv = [*SETTINGS, *flags]
    config = load_config("worker", WorkerConfig, argv, {})
    return [load_config("worker", WorkerConfig, [*argv, *own], {}) for own in rank_flags(config, tmp_path)]


def test_ranks_of_a_pod_meet_in_a_folder_of_theirs(tmp_path: Path) -> None:
    first, second = configs(
        tmp_path, "--local-ranks=2", "--world-size=2", "--instance=e-0-rank0", "--metrics-port=9091"
    )
    assert [(each.rank, each.local_rank, each.local_ranks) for each in (first, second)] == [(0, 0, 1), (1, 1, 1)]
    assert first.rendezvous == second.rendezvous == f"file://{tmp_path}/meeting"
    assert (first.instance, second.instance) == ("e-0-rank0", "e-0-rank1")
    assert (first.metrics_port, second.metrics_port) == (9091, 0)


def test_ranks_of_one_pod_of_several_meet_the_others(tmp_path: Path) -> None:
    """The second of two pods with two devices each."""
    where = "tcp://leader:29500"
    found = configs(tmp_path, "--local-ranks=2", "--world-size=4", "--rank=2", f"--rendezvous={where}")
    assert [(each.rank, each.local_rank, each.rendezvous) for each in found] == [(2, 0, where), (3, 1, where)]
    assert [each.instance_id()[-6:] for each in found] == ["-rank2", "-rank3"]
    assert len({each.instance_id()[:-6] for each in found}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--local-ranks=2"], "rank = 1: must be below world_size, which is 1"),
        (["--local-ranks=2", "--world-size=4"], "rendezvous: must be set where there are several ranks"),
        (["--rank=2", "--world-size=2"], "rank = 2: must be below world_size, which is 2"),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("worker", WorkerConfig, [*SETTINGS, *flags], {})


RANK = """
    import os, signal, sys, time
    if "--rank={failing}" in sys.argv:
        {failure}
    signal.signal(signal.SIGTERM, {handler})
    os.write(1, b"up\\n")  # at once: two ranks write
    time.sleep(600)
"""
PARENT = """
    import sys
    from services.worker import local_ranks
    from services.worker.config import WorkerConfig
    from shared.config import load_config
    sys.executable = {program!r}
    local_ranks.GOODBYE_SECONDS = {seconds}
    argv = ["--engine=e-0", "--model=/model", "--local-ranks=2", "--world-size=2", "--drain-timeout=0"]
    sys.exit(local_ranks.run_local_ranks(load_config("worker", WorkerConfig, argv, {{}}), argv))
"""


@contextmanager
def started(folder: Path, failing: int, failure: str, *, deaf: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A container's process with two ranks, that are this program; `deaf`: they do not hear that they are to end."""
    handler, seconds = ("signal.SIG_IGN", 0.5) if deaf else ("lambda *_: sys.exit(0)", DEADLINE)
    rank, program = folder / "rank.py", folder / "python"
    rank.write_text(textwrap.dedent(RANK).format(failing=failing, failure=failure, handler=handler))
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {rank} "$@"\n')
    program.chmod(0o755)
    parent = textwrap.dedent(PARENT).format(program=str(program), seconds=seconds)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("failure", "deaf", "status"),
    [("sys.exit(70)", False, 70), ("os.kill(os.getpid(), signal.SIGKILL)", True, 128 + signal.SIGKILL)],
)
def test_where_one_rank_ends_all_end_with_its_status(tmp_path: Path, failure: str, deaf: bool, status: int) -> None:
    with started(tmp_path, 1, failure, deaf=deaf) as process:
        assert process.wait(DEADLINE) == status
        assert process.stderr is not None
        assert '"event":"a rank ended","rank":1,' in process.stderr.read()


def test_all_are_told_to_end_and_waited_for(tmp_path: Path) -> None:
    with started(tmp_path, 2, "pass") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        process.terminate()
        assert process.wait(DEADLINE) == 0
        assert process.stdout.read() == "", "its ranks have ended, as their end of the pipe has"


class HangingRank(subprocess.Popen[bytes]):
    """That no signal but SIGKILL ends, as one that waits for a peer that is gone."""

    def __init__(self, waits: list[float]) -> None:
        self.waits, self.killed = waits, False

    def __del__(self) -> None:
        """There is no process."""

    def terminate(self) -> None:
        """Changes nothing."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            self.waits.append(timeout)
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("rank", timeout)
        assert self.killed, "who waits for it without a deadline waits for ever"
        return -signal.SIGKILL

    def kill(self) -> None:
        self.killed = True


def test_ranks_that_hang_share_one_deadline() -> None:
    """Each with a deadline of its own, an engine of eight would have been gone for minutes."""
    waits: list[float] = []
    ranks = [HangingRank(waits) for _ in range(7)]
    end_all(ranks, 0.05)
    assert all(rank.killed for rank in ranks)
    assert sum(waits) <= 0.05
