from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os
from shared.machine.equal_pages import offer_equal_pages
PR_GET_MEMORY_MERGE = 68
prctl = ctypes.CDLL(None).prctl
before = prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0)
try:
    offer_equal_pages()
except OSError:
    print("no")
else:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    else:
        print(before, prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's only")
def test_the_pages_of_forked_processes_are_offered_too() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    if said.stdout == "no\n":
        pytest.skip("this kernel merges no pages")
    assert said.stdout == "0 1\n"
