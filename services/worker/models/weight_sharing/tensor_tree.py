"""A tree of weights as bytes, without its large tensors: these lie in memory that each process which reads the tree has
at another address."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.worker.models.weight_sharing.shared_arena import SharedArena

_MIN_SHARED_BYTES = 64 << 10
"""Smaller tensors outside of the memory, as norms are, each process has for itself."""


class _SharedTensor(NamedTuple):
    """A tensor in the memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _OwnTensor(NamedTuple):
    """A tensor by its values."""

    content: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


class _TreePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: SharedArena) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arena = arena
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        """By its id, a tensor of the tree, which several layers may have, and its copy in the arena."""

    def persistent_id(self, value: Any) -> _SharedTensor | _OwnTensor | None:
        self._arena.check()
        if not isinstance(value, Tensor):
            return None
        offset, shape = self._arena.offset_of(value), tuple(value.shape)
        if offset is not None:
            return _SharedTensor(offset, value.dtype, shape, value.stride())
        content = value.contiguous().reshape(-1).view(torch.uint8)
        if len(content) < _MIN_SHARED_BYTES:
            return _OwnTensor(content.numpy().tobytes(), value.dtype, shape)
        if id(value) not in self._moved:
            copy = self._arena.take(len(content)).copy_(content).view(value.dtype).view(shape)
            self._moved[id(value)] = value, copy
        return self.persistent_id(self._moved[id(value)][1])


class _TreeUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, described: Any) -> Tensor:
        match described:
            case _SharedTensor(offset, dtype, shape, stride):
                last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                held = self._memory[offset : offset + (last + 1) * dtype.itemsize].view(dtype)
                return held.as_strided(shape, stride, held.storage_offset())
            case _OwnTensor(content, dtype, shape):
                return torch.tensor(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)
        raise pickle.UnpicklingError(f"{described!r} describes no tensor")


def dump_tree(tree: object, arena: SharedArena) -> bytes:
    """`tree`, whose tensors lie in the arena or, where they are large, are copied there. Raises NotShared, and what
    pickling raises."""
    file = io.BytesIO()
    _TreePickler(file, arena).dump(tree)
    return file.getvalue()


def load_tree(content: bytes, memory: Tensor) -> Any:
    """The tree, with its large tensors in `memory`, that of the arena as it is mapped here."""
    return _TreeUnpickler(io.BytesIO(content), memory).load()
