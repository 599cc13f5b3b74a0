"""PyTorch's threads do not spin for milliseconds behind an operation: OpenMP's library is told before it is loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SPINNING = """
import ctypes, importlib, sys
importlib.import_module(sys.argv[2])
assert "torch" not in sys.modules
ctypes.CDLL(sys.argv[1])  # writes its settings to standard error
"""


def _libgomp() -> Path:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    found = sorted(Path(torch.origin).parent.glob("lib/libgomp*"))
    if not found:
        pytest.skip("this PyTorch has no GNU OpenMP of its own")
    return found[0]


@pytest.mark.parametrize(
    ("service", "set_by_operator", "spins"),
    [
        ("worker", {}, "GOMP_SPINCOUNT = '3000'"),
        ("worker", {"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT = '7'"),
        ("worker", {"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT = '0'"),
        ("encoder", {}, "GOMP_SPINCOUNT = '3000'"),
    ],
    ids=["default", "count", "policy", "encoder"],
)
def test_threads_of_pytorch_wait_as_they_are_told(service: str, set_by_operator: dict[str, str], spins: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", _SPINNING, str(_libgomp()), f"services.{service}"],
        env={**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **set_by_operator},
        capture_output=True,
        text=True,
        check=True,
    )
    assert spins in done.stderr
