"""Reads the checkpoints of Medusa heads and EAGLE layers as they are published: safetensors or PyTorch's own files.

They are small, so all tensors are read at once. PyTorch's files are read with `weights_only`: they run no code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from services.worker.model.checkpoint import check_found, open_checkpoint
from services.worker.model.config import ModelError

_SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
_INDEX = "model.safetensors.index.json"

_T = TypeVar("_T")


class DrafterCheckpoint:
    """The tensors of a drafter, by name; as `model.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self._folder = folder
        self._tensors = tensors

    @property
    def folder(self) -> Path:
        return self._folder

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def renamed(self, prefix: str, to: str) -> DrafterCheckpoint:
        """With `to` for `prefix` in the names that begin so."""
        changed = {
            to + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
            for name, tensor in self._tensors.items()
        }
        return DrafterCheckpoint(self._folder, changed)

    def with_default(self, name: str, tensor: Tensor) -> DrafterCheckpoint:
        """With `tensor` where `name` is missing."""
        return DrafterCheckpoint(self._folder, {name: tensor} | self._tensors)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `model.checkpoint.Checkpoint.read`."""
        whole = self._tensors.get(name)
        check_found(self._folder, name, None if whole is None else whole.shape, shape)
        assert whole is not None, "it was found"
        part = whole if rows is None else whole[slice(*rows)]
        return (part if columns is None else part[:, slice(*columns)]).contiguous()


def read_drafter(folder: Path, dtype: torch.dtype) -> DrafterCheckpoint:
    """All tensors in `folder`, in `dtype`. Raises ModelError."""
    for name in _SAFETENSORS:
        if (folder / name).exists():
            return DrafterCheckpoint(folder, _safetensors(folder, name, dtype))
    if (folder / _INDEX).exists():
        return DrafterCheckpoint(folder, _safetensors(folder, None, dtype))
    for name in _PICKLED:
        if (folder / name).exists():
            return DrafterCheckpoint(folder, _pickled(folder / name, dtype))
    raise ModelError(f"{folder} has no weights: {', '.join((*_SAFETENSORS, _INDEX, *_PICKLED))} is expected")


def read_settings(folder: Path, kind: type[_T]) -> _T:
    """`config.json`, strictly as far as `kind` goes. Raises ModelError."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None


def _safetensors(folder: Path, name: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
    with open_checkpoint(folder, dtype, single=name) as checkpoint:
        return {key: checkpoint.read_whole(key) for key in checkpoint.names}


def _pickled(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes the unpickler raise
        raise ModelError(f"{path} cannot be read: {error}") from None
    return {name: tensor.to(dtype) for name, tensor in state.items() if isinstance(tensor, Tensor)}
