"""A worker on a CPU imports no compiler: PyTorch's and Triton take 100 MiB and a second of each start."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import DEMO_MODEL

UNWANTED = {"triton", "torch._dynamo", "torch._inductor", "transformers", "sympy", "aiohttp"}
PROGRAM = f"""
import sys
from pathlib import Path
from services.worker.preload import preload
model = {str(DEMO_MODEL)!r}
preload(["--engine", "engine-1", "--model", model])
from tests.support.worker.tiny_backend import tiny_backend
tiny_backend(Path(model), dtype="bfloat16", kv_memory_bytes=16 << 20)
print(*({UNWANTED!r} & set(sys.modules)))
"""


def test_loading_a_model_on_a_cpu_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
