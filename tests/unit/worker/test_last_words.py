"""What a worker writes last where it cannot serve."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import gc
import triton
from services.worker.__main__ import run_rank
from services.worker.backend import BackendError
from services.worker.config import WorkerConfig

def serve(sleep):
    gc.freeze()  # as a template has done, and a rank does whose model is loaded
    raise BackendError("spoilt weights")

run_rank(WorkerConfig(engine="e", model="/nowhere"), serve)
"""


def test_the_reason_stands_last_in_the_log_of_a_worker_that_has_imported_triton() -> None:
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", RANK], stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "cannot serve", ended.stderr
