"""The C++ kernels as Python objects: the library with its threads, packed matrices, batches, and their memory."""

from __future__ import annotations

import ctypes
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.ops.activation import ActivationName, limit_of
from services.worker.ops.drafts import SlotCopies
from services.worker.ops.interface import (
    Activation,
    BatchMeta,
    OpsUnavailable,
)
from services.worker.ops.native import library
from services.worker.ops.native.build import BuildError, Level, library_path
from services.worker.ops.native.tile_check import tiles_work
from shared.machine.anonymous_memory import anonymous_memory

_ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu_tanh", "swigluoai", "relu2", "silu_limited", "swiglustep")
"""In the order of `ActivationKind` in linear.h."""


def native_activation(kind: Activation) -> library.NativeActivation:
    """As the library reads it."""
    name, limit = limit_of(kind)
    return library.NativeActivation(_ACTIVATIONS.index(name), limit)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight in the kernels' layout, and what keeps its memory alive."""

    linear: library.Linear
    groups: Tensor
    bias: Tensor | None
    out: int
    inputs: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    """What `linear` points to beside `groups`, where those are codes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has its tensors at other addresses."""
        kinds = (self.linear.number, self.linear.code, self.linear.scaled, self.linear.digits, bool(self.linear.tiled))
        held = (self.groups, self.bias, self.out, self.inputs, self.scales, self.zeros, self.offsets)
        return _matrix_at, (*kinds, *held)


def _matrix_at(
    number: int,
    code: int,
    scaled: int,
    digits: int,
    tiled: bool,
    groups: Tensor,
    bias: Tensor | None,
    out: int,
    inputs: int,
    scales: Tensor | None,
    zeros: Tensor | None,
    offsets: Tensor | None,
) -> PackedMatrix:
    linear = library.Linear(
        *(number, out, inputs, groups.data_ptr(), address_of(bias), code, scaled),
        *(address_of(scales), address_of(zeros), digits, address_of(offsets), tiled),
    )
    return PackedMatrix(linear, groups, bias, out, inputs, scales, zeros, offsets)


class NativeKernels:
    """The loaded library and a pool of threads that lives as long as this object.

    Raises OpsUnavailable where there is no library to load.
    """

    def __init__(self, threads: int, level: Level) -> None:
        try:
            path = library_path(level)
            self.library = library.load(path)
        except (BuildError, OSError, AttributeError) as error:
            raise OpsUnavailable(str(error)) from None
        self.tiles = level == "amx" and tiles_work(path)
        """Whether matrices may be marked as multiplied in tiles."""
        self.pool: int = self.library.baton_pool(threads)
        self.threads = threads
        self.level = level

    @property
    def instructions(self) -> str:
        """What the library was compiled for, or tiles, which it uses where they are asked for."""
        name: bytes = self.library.baton_instructions()
        return "amx" if self.tiles else name.decode()

    @property
    def multiplies_halves(self) -> bool:
        """Whether one instruction sums products of two bf16 numbers."""
        return self.instructions in ("amx", "avx512-bf16")

    @property
    def multiplies_bytes(self) -> bool:
        """Whether one instruction sums four products of bytes (AVX512-VNNI)."""
        return self.multiplies_halves or self.instructions == "avx512-vnni"

    def __del__(self) -> None:
        if getattr(self, "pool", None):
            self.library.baton_pool_free(self.pool)


def batch_of(meta: BatchMeta) -> library.NativeBatch:
    """`meta` for the library, which reads its tensors where they are."""
    return library.NativeBatch(
        len(meta.positions),
        len(meta.context_lens),
        meta.query_starts.data_ptr(),
        meta.context_lens.data_ptr(),
        meta.block_tables.data_ptr(),
        meta.block_tables.shape[1],
        meta.slots.data_ptr(),
        meta.positions.data_ptr(),
        address_of(meta.lasts),
        address_of(meta.rotations),
        library.NativeSlotCopies() if meta.copies is None else copies_of(meta.copies),
    )


def copies_of(copies: SlotCopies) -> library.NativeSlotCopies:
    """`copies` for the library."""
    return library.NativeSlotCopies(len(copies.sources), copies.sources.data_ptr(), copies.targets.data_ptr())


def address_of(tensor: Tensor | None) -> int | None:
    """Where the library finds it; null for None."""
    return None if tensor is None else tensor.data_ptr()


# Memory that the kernels read: aligned, and on huge pages where the system has them.


_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
_MADV_HUGEPAGE = 14


def zeroed(num_bytes: int, *, grows: bool = False) -> Tensor:
    """`num_bytes` zero bytes that start on a huge page's bound, as a uint8 tensor; pages come when first touched.
    `grows`: what is first of it has small pages, so that a pool that has hardly been used takes hardly any memory."""
    room = num_bytes + _HUGE_PAGE
    whole = torch.frombuffer(anonymous_memory(room), dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    aligned = whole[start : start + num_bytes]
    if sys.platform == "linux":
        # Streaming weights from 4 kB pages is a tenth slower. A refusal costs only that.
        first = _HUGE_PAGE if grows else 0
        length = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(aligned.data_ptr() + first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return aligned


class WeightArena:
    """Places many pieces in a few large allocations, which stay until the arena and all pieces are gone."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """A zeroed piece, aligned for the kernels."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._left) < rounded:
            self._left = zeroed(max(_CHUNK_BYTES, rounded))
        piece, self._left = self._left[:rounded], self._left[rounded:]
        return piece[:num_bytes]


class RecyclingArena(WeightArena):
    """A `WeightArena` that gives the memory of pieces that are gone to others of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """See `WeightArena.take`. The memory is free again once the tensor itself is gone, whatever views of it say."""
        free = self._free.setdefault(num_bytes, [])
        memory = free.pop().zero_() if free else super().take(num_bytes)
        piece = memory[:]
        weakref.finalize(piece, free.append, memory).atexit = False
        return piece
