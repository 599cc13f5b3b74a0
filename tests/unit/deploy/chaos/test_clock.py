"""A clock that is put forward and back under running processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.chaos.clock import FakeClock, faketime_library

LIBRARY = faketime_library()
TELL = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
DEADLINE = 60.0


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not there")
def test_wall_clocks_jump_forward_and_back_and_monotonic_ones_do_not(tmp_path: Path) -> None:
    assert LIBRARY is not None
    clock = FakeClock(LIBRARY, tmp_path / "clock")
    with subprocess.Popen(
        [sys.executable, "-c", TELL],
        env={**os.environ, **clock.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def off() -> tuple[float, float]:
            """Seconds by which its two clocks differ from ours."""
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        for shift in (0, 3600, -3600, 0):
            clock.shift(shift)
            end = time.monotonic() + DEADLINE
            while abs(off()[0] - shift) > 60:
                assert time.monotonic() < end, (shift, off())
                time.sleep(0.05)
            assert abs(off()[1]) < 60
        process.stdin.close()
