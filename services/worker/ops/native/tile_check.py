"""Whether tiles (AMX) can be used, and give what other instructions of the same library give. Knows no models."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from services.worker.ops.native import library

_log = logging.getLogger(__name__)

_ROWS, _OUT, _INPUTS = 37, 64, 1128
"""Three tiles of rows, the last two of which overlap; three passes, the last with steps left over."""
_GROUPED, _GROUP = 1024, 32
"""Inputs in groups of half a tile."""
_TOLERANCE = 1e-3
"""Between two orders of sums of `_INPUTS` products of numbers of about 1."""


@cache
def tiles_work(path: Path) -> bool:
    """Asks the system for tiles, for this process and those that it forks, and tries those of the library at `path`;
    warns where they fail."""
    loaded = library.load(path)
    if not allow_tiles(loaded):
        _log.warning("AMX is not used: the system keeps no tiles for this process (Linux does from 5.16 on)")
        return False
    wrong = [name for name, right in _tried(loaded).items() if not right]
    if wrong:
        _log.warning("AMX is not used, please report this: other results than by AVX-512 in %s", ", ".join(wrong))
    return not wrong


def allow_tiles(loaded: ctypes.CDLL) -> bool:
    """Whether this process may use them from now on."""
    return bool(loaded.baton_allow_tiles())


def _tried(loaded: ctypes.CDLL) -> dict[str, bool]:
    """Of each kind of product, whether it is right."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS, _INPUTS, generator=numbers).bfloat16()
    weight = torch.randn(_OUT, _INPUTS, generator=numbers).bfloat16()
    codes = torch.randint(0, 256, (_OUT, _INPUTS), generator=numbers, dtype=torch.uint8)
    trial = _Trial(loaded)
    try:
        halves, whole, grouped = trial.halves(weight), trial.codes(codes), trial.groups(codes[:, :_GROUPED] % 16)
        tiled = trial.multiply(x, halves, tiled=True)
        alone = torch.cat([trial.multiply(x[row : row + 1], halves, tiled=True) for row in (0, _ROWS - 1)])
        return {
            "bfloat16": torch.allclose(tiled, trial.multiply(x, halves, tiled=False), rtol=0, atol=_TOLERANCE),
            "a row alone": torch.equal(alone, tiled[[0, -1]]),
            "int8": torch.equal(*(trial.multiply(x, whole, tiled=each) for each in (True, False))),
            "int4": torch.equal(*(trial.multiply(x, grouped, tiled=each) for each in (True, False))),
        }
    finally:
        trial.close()


class _Trial:
    """Small products on this thread alone. Owns the memory of what it packs."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._library = loaded
        self._pool: int = loaded.baton_pool(1)
        self._scales = torch.full((_GROUPED // _GROUP * _OUT,), 1 / 128)
        self._packed: list[Tensor] = []

    def halves(self, weight: Tensor) -> library.Linear:
        """`weight` bf16 [_OUT, _INPUTS]."""
        groups = self._memory(self._library.baton_packed_bytes(library.HALF, *weight.shape))
        self._library.baton_pack(self._pool, library.HALF, weight.data_ptr(), *weight.shape, groups)
        return library.Linear(library.HALF, *weight.shape, groups)

    def codes(self, codes: Tensor) -> library.Linear:
        """int8 [_OUT, _INPUTS] as uint8."""
        return self._coded(library.QUAD, codes)

    def groups(self, codes: Tensor) -> library.Linear:
        """int4 [_OUT, _GROUPED] as uint8, in groups of `_GROUP`."""
        linear = self._coded(library.NIBBLE, codes.contiguous())
        linear.scaled = _GROUP
        return linear

    def _coded(self, code: int, codes: Tensor) -> library.Linear:
        groups = self._memory(self._library.baton_coded_bytes(code, *codes.shape))
        self._library.baton_pack_codes(self._pool, code, codes.data_ptr(), *codes.shape, groups)
        scales = self._scales.data_ptr()
        return library.Linear(library.HALF, *codes.shape, groups, code=code, scales=scales, digits=2)

    def multiply(self, x: Tensor, linear: library.Linear, *, tiled: bool) -> Tensor:
        """float32 [rows, _OUT]."""
        linear.tiled = tiled
        to = torch.empty(len(x), _OUT)
        self._library.baton_multiply(
            *(self._pool, ctypes.byref(linear), x.data_ptr(), library.HALF, *x.shape),
            *(library.OUT_FLOAT, 0, to.data_ptr(), _OUT),
        )
        return to

    def close(self) -> None:
        """Ends the threads."""
        self._library.baton_pool_free(self._pool)

    def _memory(self, num_bytes: int) -> int:
        """Where so many bytes are, aligned for the kernels."""
        memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
        self._packed.append(memory)
        return memory.data_ptr() + -memory.data_ptr() % 64
