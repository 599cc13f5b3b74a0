"""Reads tensors, or just the rows or columns that a rank needs, from a directory of safetensors files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.memory import gib
from services.worker.model.config import ModelError
from services.worker.model.tensor_file import StoredPart, StoredTensor, TensorFileError, TensorFiles

CPU = torch.device("cpu")

_log = logging.getLogger(__name__)

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


class Part(NamedTuple):
    """The arguments of `Tensors.read`."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


@runtime_checkable
class ReadsTogether(Protocol):
    """`Tensors` that read many at once faster than one after the other."""

    def read_together(self, parts: Sequence[Part]) -> Tensor:
        """The elements of all parts, one behind the other. Raises what `Tensors.read` does."""


class Checkpoint:
    """The tensors of an open checkpoint. Reads only what is asked for, to where it is to lie."""

    def __init__(
        self, model_dir: Path, files: TensorFiles, tensors: dict[str, StoredTensor], dtype: torch.dtype
    ) -> None:
        self._model_dir = model_dir
        self._files = files
        self._tensors = tensors
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read_whole(self, name: str) -> Tensor:
        """Tensor `name` as it is there, in the dtype of the run."""
        return self.read(name, self._tensors[name].shape)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tensor `name` in the dtype of the run, or the given range of its first or second dimension.

        `shape` is that of the whole tensor. Raises ModelError where the tensor is missing or has another shape.
        """
        part = self._stored(Part(name, shape, rows, columns))
        try:
            return self._files.read(*part).to(self._dtype)
        except (TensorFileError, OSError) as error:
            raise ModelError(f"tensor {name}: {error}") from None

    def read_together(self, parts: Sequence[Part]) -> Tensor:
        """See `ReadsTogether`."""
        stored = [self._stored(part) for part in parts]
        if len({part.tensor.dtype for part in stored}) > 1:
            return torch.cat(
                [self.read(each.name, each.shape, rows=each.rows, columns=each.columns).view(-1) for each in parts]
            )
        try:
            return self._files.read_together(stored).to(self._dtype)
        except (TensorFileError, OSError) as error:
            raise ModelError(f"tensor {parts[0].name} and others: {error}") from None

    def _stored(self, part: Part) -> StoredPart:
        found = self._tensors.get(part.name)
        check_found(self._model_dir, part.name, None if found is None else found.shape, part.shape)
        assert found is not None, "it was found"
        return StoredPart(found, part.rows, part.columns)


def check_found(model_dir: Path, name: str, found: Sequence[int] | None, wanted: tuple[int, ...]) -> None:
    """Raises ModelError where the tensor `name` of the checkpoint in `model_dir` is missing, or not of the shape
    `wanted`."""
    if found is None:
        raise ModelError(f"{model_dir}: the checkpoint has no tensor {name}")
    if tuple(found) != wanted:
        raise ModelError(f"{model_dir}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")


@contextmanager
def open_checkpoint(
    model_dir: Path, dtype: torch.dtype, *, device: torch.device = CPU, single: str | None = None
) -> Iterator[Checkpoint]:
    """The checkpoint in `model_dir`, single-file or sharded; or its file `single` alone. What is read is on `device`.

    Raises ModelError where there is none or it is broken.
    """
    paths = [model_dir / single] if single is not None else checkpoint_files(model_dir)
    with TensorFiles(device) as files:
        tensors: dict[str, StoredTensor] = {}
        try:
            for path in paths:
                tensors |= files.open(path)
        except TensorFileError as error:
            raise ModelError(str(error)) from None
        begun = time.perf_counter()
        yield Checkpoint(model_dir, files, tensors, dtype)
        _log.info(
            "read %s of tensors at %.2f GB/s; with packing them it took %.1f s",
            gib(files.bytes_read),
            files.bytes_read / max(files.seconds_reading, 1e-9) / 1e9,
            time.perf_counter() - begun,
            extra={"model": str(model_dir)},
        )


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
