"""The matrices of linear layers on their way from a checkpoint to operations: as numbers, or as codes."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.checkpoint import TensorSource
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.ops.interface import Ops, PackedLinear
from services.worker.ops.quantized import QuantizedWeight, Scheme, quantize, stack_outputs
from services.worker.ops.quantized import joined as joined

Matrix = Tensor | QuantizedWeight
"""[out, in]"""


def permuted(matrix: Matrix, outputs: Tensor) -> Matrix:
    """`matrix` with its outputs in this order."""
    return matrix[outputs.to(matrix.device)] if isinstance(matrix, Tensor) else matrix.outputs(outputs)


def padded(matrix: Matrix, outputs: int) -> Matrix:
    """`matrix` with so many outputs, of which those that it has not are zeros."""

    def filled(tensor: Tensor) -> Tensor:
        missing = outputs - len(tensor)
        return joined([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor

    if isinstance(matrix, Tensor):
        return filled(matrix)
    return matrix._replace(codes=filled(matrix.codes)).with_groups(filled)


_STORED = ("weight", "qweight", "weight_packed")
"""Of a module, as numbers or as codes, one of these is there."""


class MatrixLoader:
    """Reads matrices, and packs them for operations."""

    def __init__(
        self, checkpoint: TensorSource, ops: Ops, device: torch.device, quantization: Scheme | None = None
    ) -> None:
        """`quantization`: what `pack_linear` rounds to; None: nothing."""
        self.checkpoint = checkpoint
        self.quantization = quantization
        self.device = device
        self._ops = ops

    @property
    def has_codes(self) -> bool:
        """Whether `read` may give codes."""
        return isinstance(self.checkpoint, QuantizedCheckpoint)

    def has(self, module: str) -> bool:
        """Whether the checkpoint has a matrix of `module`."""
        return any(f"{module}.{each}" in self.checkpoint for each in _STORED)

    def read(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        number: int | None = None,
    ) -> Matrix:
        """A linear layer's weight, or the given range of its outputs or inputs: codes where the checkpoint has them.
        `number`: of an expert, where all have one module, in codes. Raises ModelError where it is missing or
        misshapen."""
        if isinstance(self.checkpoint, QuantizedCheckpoint):
            return self.checkpoint.read_linear(name, shape, rows=rows, columns=columns, number=number)
        assert number is None, "there are codes"
        return self.checkpoint.read(f"{name}.weight", shape, rows=rows, columns=columns)

    def join(self, parts: list[Matrix]) -> Matrix:
        """One matrix with all outputs, in codes where all parts have the same kind of them."""
        codes = [part for part in parts if isinstance(part, QuantizedWeight)]
        stacked = stack_outputs(codes) if len(codes) == len(parts) else None
        return joined([self.numbers(part) for part in parts]) if stacked is None else stacked

    def numbers(self, matrix: Matrix) -> Tensor:
        """The matrix in the dtype of the run."""
        if isinstance(matrix, Tensor):
            return matrix
        assert isinstance(self.checkpoint, QuantizedCheckpoint), "nothing else has codes"
        return matrix.dequantized(self.checkpoint.dtype)

    def pack_linear(self, matrix: Matrix, bias: Tensor | None) -> PackedLinear:
        """Rounded to what linear layers are."""
        return self.pack(matrix, bias, self.quantization)

    def pack_inputs(
        self, name: str, shape: tuple[int, int], inputs: tuple[int, int], bias: Tensor | None
    ) -> PackedLinear:
        """A range of a linear layer's inputs, as `read` and `pack_linear` give them. Raises ModelError."""
        if self.quantization is None or inputs == (0, shape[1]):
            return self.pack_linear(self.read(name, shape, columns=inputs), bias)
        # Rounded as a whole, so that every number of ranks has the same weights.
        whole = self.checkpoint.read(f"{name}.weight", shape).to(self.device)
        return self.pack(quantize(whole, self.quantization).part(slice(None), inputs, whole.dtype), bias)

    def pack(self, matrix: Matrix, bias: Tensor | None, code: Scheme | None = None) -> PackedLinear:
        """`code`: what the matrix is rounded to; None: it stays as it is."""
        matrix, bias = matrix.to(self.device), None if bias is None else bias.to(self.device)
        if isinstance(matrix, QuantizedWeight):
            return self._ops.pack_quantized(matrix, bias)
        if code is None:
            return self._ops.pack_linear(matrix, bias)
        return self._ops.pack_quantized(quantize(matrix, code), bias)
