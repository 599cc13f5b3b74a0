"""Reads experts as gpt-oss has them: inputs before outputs, gates and ups by turns, biases, and maybe blocks of MXFP4.

`mlp.experts.gate_up_proj` [E, hidden, 2 * I] with `gate_up_proj_bias` [E, 2 * I], `down_proj` [E, I, hidden] with
`down_proj_bias` [E, hidden]. Of four bits (OCP Microscaling Formats 1.0, MXFP4): `_blocks` uint8 [E, out, in / 32, 16],
the first of two inputs in the low bits, and `_scales` uint8 [E, out, in / 32], exponents of two plus 127. Twice a
number of four bits is a whole one, up to 12: so blocks are read as int8 with a scale for 32 inputs, and nothing is
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.hf_layers.mixture import Mixture
from services.worker.models.mixture.expert_tensors import ExpertTensors, stacked
from services.worker.models.quantization.matrices import Matrix, MatrixLoader, joined
from services.worker.models.quantization.packing import powers_of_two, unpack_e2m1
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.ops.quantized import ExpertBiases, QuantizedWeight, quantize

BLOCK = 32
"""Inputs that share a scale."""


def read_biased_experts(
    matrices: MatrixLoader,
    block: str,
    mixture: Mixture,
    hidden: int,
    columns: tuple[int, int],
    experts: Sequence[int] | None = None,
) -> ExpertTensors:
    """See `loading.read_experts`; `block`: "model.layers.0.mlp". The rank with the first columns adds the biases of
    experts' outputs."""
    size, count, tensors = mixture.intermediate_size, mixture.experts, matrices.checkpoint
    reading = _BiasedReading(matrices, f"{block}.experts", count, range(count) if experts is None else experts)
    gates_and_ups = reading.each("gate_up_proj", 2 * size, hidden)
    downs = reading.each("down_proj", hidden, size)
    added = reading.biases("down_proj_bias", hidden) if columns[0] == 0 else None
    code, router_bias = matrices.quantization, tensors.read(f"{block}.router.bias", (count,))
    gates_and_ups = [_by_kind(each, columns) for each in gates_and_ups]
    if code is not None:
        gates_and_ups = [quantize(matrices.numbers(each), code) for each in gates_and_ups]
        # Rounded as a whole, so that every number of ranks has the same weights.
        downs = [quantize(matrices.numbers(each), code) for each in downs]
    return ExpertTensors(
        router=tensors.read(f"{block}.router.weight", (count, hidden)).to(matrices.device),
        gate_up=stacked(matrices, gates_and_ups),
        down=stacked(matrices, [_inputs(each, columns, router_bias.dtype) for each in downs]),
        router_bias=router_bias,
        biases=ExpertBiases(_kinds(reading.biases("gate_up_proj_bias", 2 * size), columns, 1), added),
    )


class _BiasedReading(NamedTuple):
    matrices: MatrixLoader
    block: str
    all_experts: int
    experts: Sequence[int]

    def each(self, name: str, out: int, inputs: int) -> list[Matrix]:
        """[out, in] of these experts."""
        name = f"{self.block}.{name}"
        if isinstance(self.matrices.checkpoint, QuantizedCheckpoint):
            return [self._blocks(self.matrices.checkpoint, name, expert, out, inputs) for expert in self.experts]
        return [
            self.matrices.checkpoint.read(name, (self.all_experts, inputs, out), rows=(expert, expert + 1))[0].T
            for expert in self.experts
        ]

    def biases(self, name: str, size: int) -> Tensor:
        """float32 [experts, size] of these."""
        read = self.matrices.checkpoint.read(f"{self.block}.{name}", (self.all_experts, size))
        return joined([read[expert : expert + 1] for expert in self.experts]).float().to(self.matrices.device)

    def _blocks(self, tensors: QuantizedCheckpoint, name: str, expert: int, out: int, inputs: int) -> QuantizedWeight:
        if inputs % BLOCK:
            raise ModelError(f"tensor {name}_blocks: {inputs} inputs are no multiple of {BLOCK}, as blocks need them")
        shape = (self.all_experts, out, inputs // BLOCK)
        blocks = tensors.read_codes(f"{name}_blocks", (*shape, BLOCK // 2), expert)
        scales = tensors.read_codes(f"{name}_scales", shape, expert)
        return QuantizedWeight("int8", unpack_e2m1(blocks).view(out, inputs), powers_of_two(scales) / 2)


def _by_kind(matrix: Matrix, columns: tuple[int, int]) -> Matrix:
    """Its gates, then its ups, of these columns."""
    if isinstance(matrix, Tensor):
        return _kinds(matrix, columns, 0)
    return matrix._replace(codes=_kinds(matrix.codes, columns, 0), scales=_kinds(matrix.scales, columns, 0))


def _kinds(by_turns: Tensor, columns: tuple[int, int], dim: int) -> Tensor:
    """The dimension `dim`, gates and ups by turns → the gates of these columns, then their ups."""
    shape = by_turns.shape
    pairs = by_turns.reshape(*shape[:dim], -1, 2, *shape[dim + 1 :]).narrow(dim, columns[0], columns[1] - columns[0])
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1).contiguous()


def _inputs(matrix: Matrix, columns: tuple[int, int], dtype: torch.dtype) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[:, slice(*columns)].contiguous()
    return matrix.part(slice(None), columns, dtype)
