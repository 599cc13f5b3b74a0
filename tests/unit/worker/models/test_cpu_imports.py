"""A worker on a CPU imports no compiler: PyTorch's and Triton take 100 MiB and a second of each start."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import DEMO_MODEL

UNWANTED = {"triton", "torch._dynamo", "torch._inductor", "torch._refs", "transformers", "sympy", "aiohttp"}
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
COMPILES = """
from services.worker.platforms.meta_kernels import defer_meta_kernels
defer_meta_kernels()
import importlib.util, sys, torch
row = torch.empty(2, dtype=torch.int64, device="meta")
try:
    torch.empty(4, 6, device="meta").index_select(0, row)
except NotImplementedError:
    print("left", "out")
importlib.util.find_spec("torch._dynamo")
print(*torch.empty(4, 6, device="meta").index_select(0, row).shape, "torch._dynamo" in sys.modules)
"""


DRAWS = """
from services.worker.platforms.meta_kernels import defer_meta_kernels, import_meta_kernels
defer_meta_kernels()
import torch
print(torch.Generator().manual_seed(7).initial_seed())
import_meta_kernels()
print(torch.Generator().manual_seed(8).initial_seed())
"""


def said_by(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


def test_loading_a_model_on_a_cpu_imports_no_compiler() -> None:
    assert said_by(PROGRAM) == []


def test_whoever_compiles_has_what_was_left_out_for_that() -> None:
    assert said_by(COMPILES) == ["left", "out", "2", "6", "False"]


def test_generators_of_random_numbers_can_be_made() -> None:
    assert said_by(DRAWS) == ["7", "8"]
