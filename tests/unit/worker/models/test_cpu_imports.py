"""A worker on a CPU imports no compiler: PyTorch's and Triton take 100 MiB and a second of each start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import deploy.demo

MODEL = Path(deploy.demo.__file__).parent / "model"
PROGRAM = f"""
import sys
from pathlib import Path
from tests.support.worker.tiny_backend import tiny_backend
tiny_backend(Path({str(MODEL)!r}), dtype="bfloat16", kv_memory_bytes=16 << 20)
print(*({{"triton", "torch._dynamo"}} & set(sys.modules)))
"""


def test_loading_a_model_on_a_cpu_imports_no_compiler() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert not said.stdout.split()
