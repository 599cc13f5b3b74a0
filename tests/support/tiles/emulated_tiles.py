"""Has kernels of the level "amx" run anywhere where AVX512-BF16 is: what the processor lacks is emulated."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker.ops.native import tile_check
from services.worker.ops.native.build import best_level, runnable_levels

Count = Callable[[], int]


@contextmanager
def tile_instructions(folder: Path) -> Iterator[Count | None]:
    """In this process, until it ends. Gives the number of products that were emulated so far; None: the processor has
    such instructions, and no product is. `folder` keeps what is compiled."""
    if "avx512-bf16" not in runnable_levels():
        pytest.skip("this processor runs no library with tiles")
    if best_level() == "amx":
        yield None
        return
    emulator = _compiled(folder)
    emulator.install()
    try:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(tile_check, "allow_tiles", lambda loaded: True)
            tile_check.tiles_work.cache_clear()
            yield lambda: int(emulator.products_done())
    finally:
        tile_check.tiles_work.cache_clear()
        emulator.uninstall()


def _compiled(folder: Path) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    made, source = folder / "emulator.so", Path(__file__).with_name("emulator.cpp")
    flags = ("-std=gnu++17", "-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True)
    loaded = ctypes.CDLL(str(made))
    loaded.products_done.restype = ctypes.c_int64
    return loaded
