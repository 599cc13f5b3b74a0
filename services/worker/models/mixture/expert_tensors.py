"""What is read of a layer's experts, however a checkpoint lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from services.worker.models.quantization.matrices import Matrix, MatrixLoader, joined
from services.worker.ops.quantized import ExpertBiases, QuantizedStack, QuantizedWeight, WeightStack, stack_outputs


class ExpertTensors(NamedTuple):
    """One rank's columns of a layer's experts, or of some of them, and the whole router."""

    router: Tensor
    """[all experts, hidden]; float32 where it is to be exact."""
    gate_up: WeightStack
    """[E, 2 * I, hidden]: gates, then ups."""
    down: WeightStack
    """[E, hidden, I]"""
    router_bias: Tensor | None = None
    """[all experts]"""
    biases: ExpertBiases | None = None


def stacked(matrices: MatrixLoader, parts: Sequence[Matrix]) -> WeightStack:
    """Matrices of one shape on the device: codes where all have the same kind of them."""
    codes = [part for part in parts if isinstance(part, QuantizedWeight)]
    together = stack_outputs(codes) if len(codes) == len(parts) else None
    if together is not None:
        return QuantizedStack(together.to(matrices.device), len(parts))
    numbers = joined([matrices.numbers(part) for part in parts])
    return numbers.view(len(parts), -1, numbers.shape[1]).to(matrices.device)
