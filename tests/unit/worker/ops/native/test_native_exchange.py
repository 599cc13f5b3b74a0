"""What ranks of one host exchange through memory, against the same sums made alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.ops.native.build import BuildError, best_level, library_path


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        library_path(best_level())
    except BuildError as error:
        pytest.skip(f"no native library here: {error}")


def ranks(tmp_path: Path, count: int, what: str) -> list[list[str]]:
    """The lines of each rank."""
    command = [sys.executable, "-m", "tests.support.worker.exchange_process"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), f"file://{tmp_path}/ranks", what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count
    return said


def test_every_rank_gets_the_same_bits_until_one_dies(tmp_path: Path) -> None:
    first, second, dying = ranks(tmp_path, 3, "dies")
    assert dying == first[:1] == second[:1]
    assert first[1:] == second[1:] == ["rank 2 of this stage has ended"]


def test_who_waits_for_a_rank_that_does_not_come_is_told(tmp_path: Path) -> None:
    waiting, _ = ranks(tmp_path, 2, "silent")
    assert waiting[1:] == ["rank 1 of this stage has not come for 3 s"]


def test_where_one_rank_cannot_share_memory_none_does(tmp_path: Path) -> None:
    assert ranks(tmp_path, 2, "sockets") == [["[2.0, 2.0, 2.0] False"]] * 2
