"""Reads one layer's experts from a checkpoint, some of them or some of their columns: as numbers, or as codes.

Experts are laid out in two ways. Checkpoints on the Hub have tensors for each expert,
`mlp.experts.0.gate_proj.weight` or Mixtral's `block_sparse_moe.experts.0.w1.weight`. transformers 5 computes with all
experts of a layer in one tensor, `mlp.experts.gate_up_proj`, and writes them so on request
(`save_pretrained(save_original_format=False)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import (
    NUMBERS,
    BatchedTensorSource,
    StoredTensorSource,
    TensorPart,
    TensorSource,
    read_exactly,
)
from services.worker.models.config import ModelError
from services.worker.models.hf_layers.mixture import Mixture
from services.worker.models.mixture.biased_experts import read_biased_experts
from services.worker.models.mixture.expert_tensors import ExpertTensors, stacked
from services.worker.models.quantization.matrices import Matrix, MatrixLoader
from services.worker.ops.interface import Routing
from services.worker.ops.quantized import QuantizedWeight, Scheme, WeightStack, quantize


class _Names(NamedTuple):
    """What a layer's tensors are called."""

    block: str
    ups: tuple[str, ...]
    """The gates' first, where there are any."""
    down: str
    router: str = "gate.weight"
    all_gates_and_ups: str = "experts.gate_up_proj"
    """Where there are tensors of all experts."""
    all_downs: str = "experts.down_proj"


_WEIGHT = ".weight"

_QWEN = _Names("mlp", ("gate_proj", "up_proj"), "down_proj")
_MINICPM = _Names("mlp", ("w1", "w3"), "w2")
_MIXTRAL = _Names("block_sparse_moe", ("w1", "w3"), "w2")
_GRANITE = _Names(
    *("block_sparse_moe", ("gate_proj", "up_proj"), "down_proj"),
    router="router.layer.weight",
    all_gates_and_ups="input_linear.weight",
    all_downs="output_linear.weight",
)
"""With a tensor for each expert only where llm-compressor wrote it."""
_LFM2 = _Names("feed_forward", ("w1", "w3"), "w2")
_JAMBA = _Names("feed_forward", ("gate_proj", "up_proj"), "down_proj", router="router.weight")
_UNGATED = _Names("mixer", ("up_proj",), "down_proj", all_gates_and_ups="experts.up_proj")
"""Of Nemotron-H."""
_GRANITE_TOGETHER = _MIXTRAL._replace(router="router.weight")


def read_experts(
    matrices: MatrixLoader,
    layer: str,
    mixture: Mixture,
    hidden: int,
    columns: tuple[int, int],
    experts: Sequence[int] | None = None,
) -> ExpertTensors:
    """`columns` of the `experts` (in rising order; None: all) of `layer` ("model.layers.0"), on the device, rounded to
    what `matrices` are. Raises ModelError."""
    tensors = matrices.checkpoint
    if mixture.biased:
        return read_biased_experts(matrices, f"{layer}.mlp", mixture, hidden, columns, experts)
    others = (_MIXTRAL, _GRANITE, _GRANITE_TOGETHER, _LFM2, _JAMBA)
    names = next((each for each in others if f"{layer}.{each.block}.{each.router}" in tensors), _QWEN)
    if names is _QWEN and matrices.has(f"{layer}.mlp.experts.0.w1"):
        names = _MINICPM
    names = names if mixture.gated else _UNGATED
    block = f"{layer}.{names.block}"
    router = _router(tensors, f"{block}.{names.router}", mixture, hidden).to(matrices.device)
    numbers = tuple(range(mixture.experts) if experts is None else experts)
    reading = _Reading(matrices, block, names, mixture, hidden, columns, numbers)
    return ExpertTensors(router, reading.gates_and_ups(), reading.downs())


def _router(source: TensorSource, name: str, mixture: Mixture, hidden: int) -> Tensor:
    """[experts, hidden], as it is stored where it is to be exact."""
    read = source.read(name, (mixture.experts, hidden))
    if not mixture.exact_router:
        return read
    stored = source.read_stored(name) if isinstance(source, StoredTensorSource) and name in source else read
    return stored.float() if stored.dtype in NUMBERS else read.float()


def read_experts_of_tokens(matrices: MatrixLoader, layer: str, vocab_size: int, mixture: Mixture) -> Tensor:
    """int64 [vocab_size, chosen]: the experts of each token, where a table has them. Without a checkpoint they go
    round. Raises ModelError."""
    name, shape, source = f"{layer}.mlp.gate.tid2eid", (vocab_size, mixture.chosen), matrices.checkpoint
    if not isinstance(source, StoredTensorSource):
        return torch.arange(math.prod(shape), device=matrices.device).view(shape) % mixture.experts
    table = source.read_stored(name)
    if tuple(table.shape) != shape or table.is_floating_point():
        found = f"{table.dtype} {list(table.shape)}"
        raise ModelError(f"tensor {name} has {found}, the config asks for whole numbers {list(shape)}")
    if not table.is_meta and not 0 <= int(table.min()) <= int(table.max()) < mixture.experts:
        raise ModelError(f"tensor {name} names others than the {mixture.experts} experts that there are")
    return table.long().to(matrices.device)


class _Reading(NamedTuple):
    matrices: MatrixLoader
    block: str
    names: _Names
    mixture: Mixture
    hidden: int
    columns: tuple[int, int]
    experts: tuple[int, ...]

    @property
    def _together(self) -> bool:
        """Whether there are tensors of all experts."""
        return f"{self.block}.{self.names.all_gates_and_ups}" in self.matrices.checkpoint

    @property
    def _outputs(self) -> int:
        """Of a whole expert's gates and ups."""
        return len(self.names.ups) * self.mixture.intermediate_size

    @property
    def _own_outputs(self) -> list[tuple[int, int]]:
        """Which of them are these columns': gates, then ups."""
        first, end = self.columns
        return [(start + first, start + end) for start in range(0, self._outputs, self.mixture.intermediate_size)]

    def _may_be_codes(self, tensor: str) -> bool:
        """`tensor`: that of all experts, which is codes where it has scales, with a dimension more as well."""
        has_scales = f"{self.block}.{tensor}_scale" in self.matrices.checkpoint
        return self.matrices.has_codes and (has_scales or not self._together)

    def gates_and_ups(self) -> WeightStack:
        """[E, 2 * I, hidden]; without gates [E, I, hidden]"""
        if self._may_be_codes(self.names.all_gates_and_ups):
            return stacked(self.matrices, [self._gate_and_up_of(expert) for expert in self.experts])
        read = self._gates_and_ups_together() if self._together else self._gates_and_ups_of_each()
        read = read.to(self.matrices.device)
        code = self.matrices.quantization
        return read if code is None else stacked(self.matrices, _rounded(read, code))

    def downs(self) -> WeightStack:
        """[E, hidden, I]"""
        code, size = self.matrices.quantization, self.mixture.intermediate_size
        if self._may_be_codes(self.names.all_downs):
            return stacked(self.matrices, [self._down_of(expert) for expert in self.experts])
        if code is None:
            return self._down_numbers(self.columns).to(self.matrices.device)
        # Rounded as a whole, so that every number of ranks has the same weights.
        whole = self._down_numbers((0, size)).to(self.matrices.device)
        return stacked(
            self.matrices, [each.part(slice(None), self.columns, whole.dtype) for each in _rounded(whole, code)]
        )

    def _gate_and_up_of(self, expert: int) -> Matrix:
        shape = (self.mixture.intermediate_size, self.hidden)
        if self._together:
            module = f"{self.block}.{self.names.all_gates_and_ups}".removesuffix(_WEIGHT)
            whole = (self._outputs, self.hidden)
            own = [self.matrices.read(module, whole, rows=part, number=expert) for part in self._own_outputs]
            return self.matrices.join(own)
        names = (f"{self.block}.experts.{expert}.{part}" for part in self.names.ups)
        return self.matrices.join([self.matrices.read(name, shape, rows=self.columns) for name in names])

    def _down_of(self, expert: int) -> Matrix:
        shape = (self.hidden, self.mixture.intermediate_size)
        if self._together:
            module = f"{self.block}.{self.names.all_downs}".removesuffix(_WEIGHT)
            return self.matrices.read(module, shape, columns=self.columns, number=expert)
        return self.matrices.read(f"{self.block}.experts.{expert}.{self.names.down}", shape, columns=self.columns)

    def _gates_and_ups_together(self) -> Tensor:
        name = f"{self.block}.{self.names.all_gates_and_ups}"
        if self.mixture.transposed:
            whole = self._read_either_way(name, self._outputs, self.hidden)
            return torch.cat([whole[:, slice(*part)] for part in self._own_outputs], dim=1)
        shape = (self.mixture.experts, self._outputs, self.hidden)
        return torch.cat([self._read_numbers(name, shape, part) for part in self._own_outputs], dim=1)

    def _read_numbers(self, name: str, shape: tuple[int, int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Of these experts, from a tensor of all; `columns`: a range of its second dimension."""
        runs = [self.matrices.checkpoint.read(name, shape, rows=run, columns=columns) for run in _runs_of(self.experts)]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _read_either_way(self, name: str, outputs: int, inputs: int) -> Tensor:
        """[E, outputs, inputs] of these experts, from a tensor that has them so, as transformers 5 writes it, or inputs
        first, as published files do."""
        try:
            return self._read_numbers(name, (self.mixture.experts, outputs, inputs))
        except ModelError:
            return self._read_numbers(name, (self.mixture.experts, inputs, outputs)).transpose(1, 2)

    def _gates_and_ups_of_each(self) -> Tensor:
        size, own = self.mixture.intermediate_size, self.columns[1] - self.columns[0]
        parts = [
            TensorPart(f"{self.block}.experts.{expert}.{part}.weight", (size, self.hidden), rows=self.columns)
            for expert in self.experts
            for part in self.names.ups
        ]
        return self._read_together(parts).view(len(self.experts), len(self.names.ups) * own, self.hidden)

    def _down_numbers(self, columns: tuple[int, int]) -> Tensor:
        count, size, own = self.mixture.experts, self.mixture.intermediate_size, columns[1] - columns[0]
        if self._together and self.mixture.transposed:
            name = f"{self.block}.{self.names.all_downs}"
            return self._read_either_way(name, self.hidden, size)[:, :, slice(*columns)].contiguous()
        if self._together:
            down = self._read_numbers(f"{self.block}.{self.names.all_downs}", (count, self.hidden, size))
            return down[:, :, slice(*columns)].contiguous()
        names = [f"{self.block}.experts.{expert}.{self.names.down}.weight" for expert in self.experts]
        parts = [TensorPart(name, (self.hidden, size), columns=columns) for name in names]
        return self._read_together(parts).view(len(self.experts), self.hidden, own)

    def _read_together(self, parts: list[TensorPart]) -> Tensor:
        """Flat: one behind the other."""
        tensors = self.matrices.checkpoint
        if isinstance(tensors, BatchedTensorSource):
            return tensors.read_together(parts)
        return torch.cat(
            [tensors.read(part.name, part.shape, rows=part.rows, columns=part.columns).view(-1) for part in parts]
        )


def _runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as half-open ranges of neighbours."""
    firsts = [at for at, number in enumerate(numbers) if not at or number != numbers[at - 1] + 1]
    return [(numbers[a], numbers[b - 1] + 1) for a, b in zip(firsts, [*firsts[1:], len(numbers)], strict=True)]


def _rounded(stack: Tensor, code: Scheme) -> list[QuantizedWeight]:
    """Each matrix by itself: float32 of all would take several times the memory of the layer."""
    return [quantize(matrix, code) for matrix in stack]


def read_routing(source: TensorSource, correction: str | None, mixture: Mixture, device: torch.device) -> Routing:
    """`correction`: what is added to experts' scores where they are chosen, if there is any; None: they are not chosen
    by scores. Raises ModelError."""
    corrected = mixture.corrected and correction is not None
    return Routing(
        chosen=mixture.chosen,
        renormalised=mixture.renormalised,
        scoring=mixture.scoring,
        groups=mixture.groups,
        chosen_groups=mixture.chosen_groups,
        bias=read_exactly(source, correction, (mixture.experts,)).to(device) if corrected and correction else None,
        scale=mixture.scale,
    )
