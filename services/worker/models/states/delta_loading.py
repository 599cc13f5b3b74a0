"""Reads one layer's gated delta net from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import DeltaConfig, ModelConfig
from services.worker.models.quantization.matrices import Matrix, MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.ops.interface import DeltaNet, PackedLinear


class DeltaLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    delta: DeltaConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by, in the order of `StateOps.mix`: gates, values, keys, queries, time steps, and how
        much is written."""
        parts = self._by_key_head() if self.config.architecture == "Qwen3NextForCausalLM" else self._by_kind()
        return self.matrices.pack_linear(self.matrices.join(parts), None)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by."""
        shape, columns = (self.config.hidden_size, self.delta.inner), self.shard.elements(self.delta.head_dim)
        return self.matrices.pack_inputs(f"{self.name}.out_proj", shape, columns, None)

    def mixer(self) -> DeltaNet:
        """All that is between them."""
        delta, heads = self.delta, slice(*self.shard.heads)
        conv = self._read("conv1d.weight", (delta.conv_dim, 1, delta.kernel)).squeeze(1)
        own = conv[self._channels().to(conv.device)]
        return DeltaNet(
            heads=self.shard.num_heads,
            head_dim=delta.head_dim,
            groups=self.shard.num_groups,
            state_dim=delta.state_dim,
            conv_weight=own.t().contiguous(),
            conv_bias=conv.new_zeros(len(own)),
            decay=self._read("A_log", (delta.heads,))[heads].exp().neg(),
            step_bias=self._read("dt_bias", (delta.heads,))[heads].contiguous(),
            norm=self._read("norm.weight", (delta.head_dim,)),
            eps=self.config.norm_eps,
        )

    def _by_key_head(self) -> list[Matrix]:
        """Qwen3-Next: two matrices, in each what belongs to a head of keys together."""
        delta, hidden = self.delta, self.config.hidden_size
        each, values = delta.heads // delta.groups, delta.inner // delta.groups
        wide = self._matrix("in_proj_qkvz", delta.conv_dim + delta.inner, hidden)
        narrow = self._matrix("in_proj_ba", 2 * delta.heads, hidden)
        groups = slice(*self.shard.groups)
        rows = torch.arange(delta.conv_dim + delta.inner).view(delta.groups, -1)[groups]
        queries, keys, own, gates = torch.split(rows, [delta.state_dim, delta.state_dim, values, values], dim=1)
        written, steps = torch.split(torch.arange(2 * delta.heads).view(delta.groups, -1)[groups], each, dim=1)
        order = torch.cat([part.flatten() for part in (gates, own, keys, queries)])
        return [permuted(wide, order), permuted(narrow, torch.cat((steps.flatten(), written.flatten())))]

    def _by_kind(self) -> list[Matrix]:
        """Qwen3.5: a matrix of each kind."""
        delta, hidden = self.delta, self.config.hidden_size
        mixed = permuted(self._matrix("in_proj_qkv", delta.conv_dim, hidden), self._channels())
        elements, heads = self.shard.elements(delta.head_dim), self.shard.heads
        gates, steps, written = (
            self.matrices.read(f"{self.name}.in_proj_{part}", (size, hidden), rows=rows)
            for part, size, rows in (("z", delta.inner, elements), ("a", delta.heads, heads), ("b", delta.heads, heads))
        )
        return [gates, mixed, steps, written]

    def _channels(self) -> Tensor:
        """This rank's values, keys and queries, of queries, keys and values."""
        delta = self.delta
        queries, keys, values = torch.split(torch.arange(delta.conv_dim), [delta.keys, delta.keys, delta.inner])
        first, end = (group * delta.state_dim for group in self.shard.groups)
        own = slice(*self.shard.elements(delta.head_dim))
        return torch.cat((values[own], keys[first:end], queries[first:end]))

    def _matrix(self, part: str, outputs: int, inputs: int) -> Matrix:
        return self.matrices.read(f"{self.name}.{part}", (outputs, inputs))

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape).to(self.device)
