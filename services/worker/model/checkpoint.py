"""Reads tensors, or just the rows or columns that a rank needs, from a directory of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
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

    def __init__(self, files: dict[str, Any], dtype: torch.dtype) -> None:
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
        if name not in self._files:
            raise ModelError(f"the checkpoint has no tensor {name}")
        part = self._files[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(f"tensor {name} has shape {part.get_shape()}, the config asks for {list(shape)}")
        if rows is not None:
            tensor = part[rows[0] : rows[1]]
        elif columns is not None:
            tensor = part[:, columns[0] : columns[1]]
        else:
            tensor = part[:]
        # A copy, always: a tensor that lies in the mapped file would keep all of the file's pages in memory.
        copy: Tensor = tensor.to(self._dtype, memory_format=torch.contiguous_format, copy=True)
        return copy


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
        yield Checkpoint(files, dtype)


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
    raise ModelError(f"{model_dir} has neither {_SINGLE} nor {_INDEX}: only safetensors checkpoints can be read")
