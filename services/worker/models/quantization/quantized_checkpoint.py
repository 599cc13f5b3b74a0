"""A checkpoint whose linear layers are codes: their tensors as if they were numbers, or the codes themselves."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import Checkpoint
from services.worker.models.config import ModelError
from services.worker.models.quantization.method import QuantizationMethod, read_method
from services.worker.models.quantization.modules import CODES, Module, ReadWeight, module_of, read_module
from services.worker.ops.quantized import QuantizedWeight

_WEIGHT = ".weight"

Range = tuple[int, int] | None


class _OneOfAll(NamedTuple):
    """Tensors of one of the experts that have a module together."""

    checkpoint: Checkpoint
    number: int

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.checkpoint

    def read_stored(self, name: str) -> Tensor:
        """See `Checkpoint.read_stored`."""
        return self.checkpoint.read_stored(name, (self.number, self.number + 1))[0]


def as_configured(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> Checkpoint | QuantizedCheckpoint:
    """The open `checkpoint` of `folder`, quantised where its `quantization_config` says so. Raises ModelError for what
    cannot be read."""
    method = read_method(folder)
    return checkpoint if method is None else QuantizedCheckpoint(checkpoint, method, dtype)


class QuantizedCheckpoint:
    """A `checkpoint.TensorSource` of an open checkpoint that a `method` quantised. Which modules it left alone is seen
    by their tensors. Reads the whole of a quantised module, whatever part of it is asked for."""

    def __init__(self, checkpoint: Checkpoint, method: QuantizationMethod, dtype: torch.dtype) -> None:
        """`dtype`: of the numbers that are read."""
        self._checkpoint = checkpoint
        self._method = method
        self.dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def headers(self) -> QuantizedCheckpoint:
        """The same tensors without their elements."""
        return QuantizedCheckpoint(self._checkpoint.headers(), self._method, self.dtype)

    def has_codes(self, module: str, shape: tuple[int, int]) -> bool:
        """Whether `module`, [out, in] of `shape`, is quantised. Raises ModelError where its tensors do not fit."""
        return read_module(Module(self._checkpoint, module, shape), self._method) is not None

    def codes_of_others(self, modules: Container[str]) -> list[str]:
        """Tensors of codes that none of these modules has."""
        names = [name for name in self._checkpoint.names if module_of(name) not in modules]
        return [each for each in names if each.endswith(CODES) or self._checkpoint.is_matrix_of_codes(each)]

    def read_stored(self, name: str) -> Tensor:
        """See `Checkpoint.read_stored`."""
        return self._checkpoint.read_stored(name)

    def read_codes(self, name: str, shape: tuple[int, ...], number: int) -> Tensor:
        """See `Checkpoint.read_codes`."""
        return self._checkpoint.read_codes(name, shape, number)

    def read(self, name: str, shape: tuple[int, ...], *, rows: Range = None, columns: Range = None) -> Tensor:
        """See `Checkpoint.read`; the weight of a quantised module is dequantised."""
        module = name.removesuffix(_WEIGHT)
        if module == name or len(shape) != 2:
            return self._checkpoint.read(name, shape, rows=rows, columns=columns)
        read = self.read_linear(module, (shape[0], shape[1]), rows=rows, columns=columns)
        return read.dequantized(self.dtype) if isinstance(read, QuantizedWeight) else read

    def read_linear(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        rows: Range = None,
        columns: Range = None,
        number: int | None = None,
    ) -> Tensor | QuantizedWeight:
        """The weight of `module`, [out, in] of `shape`, or the given range of its outputs or inputs: codes where it is
        quantised and the range does not cut its groups too small; else numbers. `number`: that of an expert, where all
        have one module of codes, whose tensors have a dimension more in front. Raises ModelError."""
        tensors = self._checkpoint if number is None else _OneOfAll(self._checkpoint, number)
        read = read_module(Module(tensors, module, shape), self._method)
        if read is None and number is not None:
            raise ModelError(f"the codes of {module} are not those of {self._method.name}")
        if read is None:
            return self._checkpoint.read(f"{module}{_WEIGHT}", shape, rows=rows, columns=columns)
        return self._part(read, rows or (0, shape[0]), columns or (0, shape[1]))

    def _part(self, read: ReadWeight, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor | QuantizedWeight:
        if read.codes is not None:
            return read.codes.part(slice(*rows), columns, self.dtype)
        assert read.numbers is not None, "one of both"
        return read.numbers[slice(*rows), slice(*columns)].to(self.dtype)
