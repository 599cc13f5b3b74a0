"""Reads tensors, or just the rows or columns that a rank needs, from a directory of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.model.config import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Index(Struct):
    weight_map: dict[str, str]


class Tensors(Protocol):
    """Where weights are read from."""

    def __contains__(self, name: str) -> bool: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `Checkpoint.read`."""


class Checkpoint:
    """The tensors of an open checkpoint. Reads only what is asked for."""

    def __init__(self, model_dir: Path, files: dict[str, Any], dtype: torch.dtype) -> None:
        self._model_dir = model_dir
        self._files = files
        """Tensor name → the open file that holds it."""
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def read_whole(self, name: str) -> Tensor:
        """Tensor `name` as it is there, in the dtype of the run."""
        return self.read(name, tuple(self._files[name].get_slice(name).get_shape()))

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tensor `name` in the dtype of the run, or the given range of its rows or columns.

        `shape` is that of the whole tensor. Raises ModelError where the tensor is missing or has another shape.
        """
        whole = self._files[name].get_slice(name) if name in self._files else None
        check_found(self._model_dir, name, None if whole is None else whole.get_shape(), shape)
        tensor = range_of(whole, rows, columns)
        # A copy, always: a tensor that lies in the mapped file would keep all of the file's pages in memory.
        copy: Tensor = tensor.to(self._dtype, memory_format=torch.contiguous_format, copy=True)
        return copy


def check_found(model_dir: Path, name: str, found: Sequence[int] | None, wanted: tuple[int, ...]) -> None:
    """Raises ModelError where the tensor `name` of the checkpoint in `model_dir` is missing, or not of the shape
    `wanted`."""
    if found is None:
        raise ModelError(f"{model_dir}: the checkpoint has no tensor {name}")
    if tuple(found) != wanted:
        raise ModelError(f"{model_dir}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")


def range_of(whole: Any, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Tensor:
    """The given rows or columns of a tensor, or of the slice of a file that holds one."""
    if columns is not None:
        tensor: Tensor = whole[:, slice(*columns)]
        return tensor
    tensor = whole[:] if rows is None else whole[slice(*rows)]
    return tensor


@contextmanager
def open_checkpoint(model_dir: Path, dtype: torch.dtype, single: str | None = None) -> Iterator[Checkpoint]:
    """The checkpoint in `model_dir`, single-file or sharded; or its file `single` alone.

    Raises ModelError where there is none or it is broken.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in [model_dir / single] if single is not None else checkpoint_files(model_dir):
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except (FileNotFoundError, SafetensorError) as error:
                raise ModelError(f"{path}: {error}") from None
            files |= dict.fromkeys(file.keys(), file)
        yield Checkpoint(model_dir, files, dtype)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """Its safetensors files, one or many. Raises ModelError where there is none."""
    index = model_dir / _INDEX
    if index.exists():
        try:
            names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        except msgspec.MsgspecError as error:
            raise ModelError(f"{index}: {error}") from None
        return [model_dir / name for name in sorted(set(names))]
    if (model_dir / _SINGLE).exists():
        return [model_dir / _SINGLE]
    raise ModelError(
        f"{model_dir} has neither {_SINGLE} nor {_INDEX}: only safetensors checkpoints can be read; "
        "load_format dummy makes weights up"
    )
