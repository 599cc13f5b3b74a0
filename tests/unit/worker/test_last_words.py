"""What a worker writes last where it cannot serve."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import gc
import sys
import triton
from services.worker.__main__ import run_rank
from services.worker.backend import BackendError
from services.worker.config import WorkerConfig

def serve(sleep):
    gc.freeze()  # as a template has done, and a rank does whose model is loaded
    raise {"BackendError": BackendError, "RuntimeError": RuntimeError}[sys.argv[1]]("spoilt weights")

run_rank(WorkerConfig(engine="e", model="/nowhere"), serve)
"""


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [("BackendError", 2, "cannot serve"), ("RuntimeError", 1, "RuntimeError: spoilt weights")],
)
def test_the_reason_stands_last_in_the_log_of_a_worker_that_has_imported_triton(
    error: str, status: int, last: str
) -> None:
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", RANK, error], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (status, last), ended.stderr
