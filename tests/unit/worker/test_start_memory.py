"""What only its start needed leaves a worker's memory: pages of files that nothing uses any more."""

from __future__ import annotations

import mmap
import re
import sys
import time
from pathlib import Path

import pytest

from services.worker.__main__ import release_start_memory

LENGTH = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_lets_go_of_code_that_its_start_ran_beside_what_it_does(tmp_path: Path) -> None:
    code = tmp_path / "code.so"
    code.write_bytes(b"x" * LENGTH)
    with code.open("rb") as file, mmap.mmap(file.fileno(), LENGTH, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        assert mapped[:] == b"x" * LENGTH
        assert resident_kb(code) == LENGTH >> 10
        release_start_memory()
        deadline = time.monotonic() + 60
        while resident_kb(code) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert resident_kb(code) == 0
        assert mapped[-1:] == b"x", "it comes back from the file"


def resident_kb(file: Path) -> int:
    lines = Path("/proc/self/smaps").read_text()
    return int(re.search(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", lines)[1])  # type: ignore[index]
