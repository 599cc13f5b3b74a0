"""After some errors a GPU is of no use to its process any more: whatever comes next would fail, too, and prove nothing.

Each test is made to show its own errors, and side by side (pytest-xdist) a process that has met one ends, so that
another takes its place. The test that met it counts as failed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

_LASTING = ("CUDA error", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDA driver error", "Triton Error [CUDA]")
_PASSING = ("out of memory", "out of resource", "no kernel image")


def lasts(error: str) -> bool:
    """Whether the device is of no use behind it."""
    return any(name in error for name in _LASTING) and not any(name in error for name in _PASSING)


def show_errors() -> None:
    """Those of launches that were not waited for. Raises what PyTorch raises."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def end_if_broken(report: pytest.TestReport, error: BaseException | None) -> None:
    if report.failed and error is not None and lasts(str(error)) and "PYTEST_XDIST_WORKER" in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)
        os._exit(1)
