"""Reads one layer's latent attention from a checkpoint, for some of its heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import TensorSource, read_exactly
from services.worker.models.config import ModelConfig
from services.worker.models.hf_layers.latent import IndexConfig, LatentConfig
from services.worker.models.hf_layers.tensor_names import LEARNED_FREQUENCIES, tensor_names
from services.worker.models.quantization.matrices import Matrix, MatrixLoader, permuted
from services.worker.models.weights import IndexWeights, LatentWeights, PositionScale
from services.worker.ops.interface import Ops, PackedLinear


class LatentLoader(NamedTuple):
    """Of the layer whose tensors begin with `name`, some heads.

    Rotated elements are laid out so that i and i + rope_dim / 2 are rotated together, as operations do it: scores are
    sums over them, whatever their order. The product that makes keys and values of latents is taken apart by heads, and
    never rounded to codes: it stands on the other side of attention here, where its inputs are.
    """

    matrices: MatrixLoader
    ops: Ops
    device: torch.device
    config: ModelConfig
    latent: LatentConfig
    heads: tuple[int, int]
    name: str
    layer: int
    """Its number."""

    def inputs(self) -> PackedLinear:
        """What a row is multiplied with: see `LayerWeights.qkv`."""
        latent, hidden = self.latent, self.config.hidden_size
        if latent.borrows(self.layer):
            return self.matrices.pack_linear(self._queries("q_proj", hidden), None)
        cached = permuted(
            self._read("kv_a_proj_with_mqa", (latent.cached_dim, hidden)), rotated_last(latent, 1, latent.cached_dim)
        )
        cached_bias = self._bias("kv_a_proj_with_mqa", latent.cached_dim)
        if cached_bias is not None:
            cached_bias = cached_bias[rotated_last(latent, 1, latent.cached_dim)]
        if latent.q_rank is None:
            queries, bias = self._queries("q_proj", hidden), None
            if cached_bias is not None:
                bias = cached_bias.new_zeros((self.heads[1] - self.heads[0]) * latent.query_dim)
        else:
            queries = self._read("q_a_proj", (latent.q_rank, hidden))
            bias = self._bias("q_a_proj", latent.q_rank)
        both = None if bias is None or cached_bias is None else torch.cat((bias, cached_bias))
        return self.matrices.pack_linear(self.matrices.join([queries, cached]), both)

    def gate(self) -> PackedLinear | None:
        """What a row's gates are made by; None: there are none."""
        each, (first, last) = self.latent.gates_of_head, self.heads
        if not each:
            return None
        module = f"{self.name}.{tensor_names(self.config.architecture).head_gate}"
        shape = (self.config.num_heads * each, self.config.hidden_size)
        return self.matrices.pack_linear(self.matrices.read(module, shape, rows=(first * each, last * each)), None)

    def weights(self) -> LatentWeights:
        """All that is between those and the output's matrix."""
        latent = self.latent
        each = latent.nope_dim + latent.value_dim
        first, last = self.heads
        up = self.matrices.numbers(
            self.matrices.read(
                f"{self.name}.kv_b_proj",
                (self.config.num_heads * each, latent.kv_rank),
                rows=(first * each, last * each),
            )
        )
        by_head = up.view(last - first, each, latent.kv_rank).to(self.device)
        keys, values = torch.split(by_head, [latent.nope_dim, latent.value_dim], dim=1)
        q_norm = q_up = None
        if latent.q_rank is not None:
            q_norm = self._norm("q_a_layernorm", latent.q_rank)
            q_up = self.matrices.pack_linear(self._queries("q_b_proj", latent.q_rank), None)
        return LatentWeights(
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=torch.ones(latent.kv_rank, device=self.device)
            if latent.borrows(self.layer)
            else self._norm("kv_a_layernorm", latent.kv_rank),
            keys_up=self.ops.latents.pack_heads(keys.transpose(1, 2).contiguous()),
            values_up=self.ops.latents.pack_heads(values.contiguous()),
            index=None if latent.index is None or self.layer in latent.index.shared else self._index(latent.index),
            rotated=self.layer not in latent.unrotated,
            latents="borrowed" if latent.borrows(self.layer) else "lent" if latent.lends(self.layer) else "own",
            by_position=self._by_position(self.name, (first, last)) if latent.by_position else None,
        )

    def _index(self, index: IndexConfig) -> IndexWeights:
        """Never rounded beyond what the checkpoint is: it only chooses, as routers do."""
        hidden, name = self.config.hidden_size, f"{self.name}.indexer"
        order = rotated_first(index.interleaved, self.latent.rope_dim, index.dim)  # none, without rotation
        if index.rotates_last:
            order = torch.arange(index.dim)
        by_head = (torch.arange(index.heads).unsqueeze(1) * index.dim + order).flatten()
        keys = permuted(self.matrices.read(f"{name}.wk", (index.dim, hidden)), order)
        weights = self.matrices.read(f"{name}.weights_proj", (index.heads, hidden))
        numbers = [self.matrices.numbers(each) for each in (keys, weights)]
        pool_bias = None
        if index.pool > 1:
            of_pools = f"{name}.index_kpool_compress_"
            gate = self.matrices.checkpoint.read(f"{of_pools}gate", (index.dim, hidden))
            numbers.insert(1, gate.to(numbers[0].device))
            pool_bias = read_exactly(self.matrices.checkpoint, f"{of_pools}ape", (index.pool, index.dim)).to(
                self.device
            )
        width = hidden if index.reads_rows else self.latent.q_rank
        assert width is not None, "queries are made of a latent"
        queries = self.matrices.read(f"{name}.wq_b", (index.heads * index.dim, width))
        weight, bias = (each[order.to(self.device)] for each in self._layer_norm(f"{name}.k_norm", index.dim))
        return IndexWeights(
            inputs=self.matrices.pack(self.matrices.join([each.to(numbers[0].dtype) for each in numbers]), None),
            key_norm=(weight, bias),
            q_up=self.matrices.pack(permuted(queries, by_head), None),
            pool_bias=pool_bias,
            row_norm=self._layer_norm(f"{name}.q_input_norm", hidden) if index.reads_rows else None,
            by_position=self._by_position(name, (0, index.heads), index.heads) if index.reads_rows else None,
        )

    def _layer_norm(self, name: str, size: int) -> tuple[Tensor, Tensor]:
        read = self.matrices.checkpoint.read
        weight, bias = (read(f"{name}.{part}", (size,)).float().to(self.device) for part in ("weight", "bias"))
        return weight, bias

    def _by_position(self, name: str, heads: tuple[int, int], of: int | None = None) -> PositionScale:
        """Of some heads, `of` so many; None: of those that attend."""
        shape, which = (of or self.config.num_heads,), slice(*heads)
        parts = (f"{name}.softmax_scaling.{part}" for part in ("scale", "bias"))
        weight, bias = (
            read_exactly(self.matrices.checkpoint, part, shape)[which].to(self.device).clone() for part in parts
        )
        return PositionScale(weight, bias)

    def _read(self, part: str, shape: tuple[int, int]) -> Matrix:
        return self.matrices.read(f"{self.name}.{part}", shape)

    def _bias(self, part: str, size: int) -> Tensor | None:
        return self.matrices.checkpoint.read(f"{self.name}.{part}.bias", (size,)) if self.config.qkv_bias else None

    def _norm(self, part: str, size: int) -> Tensor:
        return self.matrices.checkpoint.read(f"{self.name}.{part}.weight", (size,)).float().to(self.device)

    def _queries(self, part: str, inputs: int) -> Matrix:
        """The matrix that makes the queries of these heads."""
        dim, (first, last) = self.latent.query_dim, self.heads
        shape = (self.config.num_heads * dim, inputs)
        read = self.matrices.read(f"{self.name}.{part}", shape, rows=(first * dim, last * dim))
        return permuted(read, rotated_last(self.latent, last - first, dim))


def learned_frequencies(checkpoint: TensorSource, latent: LatentConfig | None) -> Tensor | None:
    """Returns the angles that a position turns pairs of elements by, where the model was trained to have its own."""
    if latent is None or not latent.learned_frequencies:
        return None
    return read_exactly(checkpoint, LEARNED_FREQUENCIES, (latent.rope_dim // 2,)).exp()


def rotated_last(latent: LatentConfig, heads: int, dim: int) -> Tensor:
    """Of `heads` of `dim` outputs, in which order they are to lie: the last rope_dim of each are rotated."""
    rotated = torch.arange(latent.rope_dim)
    if latent.interleaved:
        rotated = torch.cat((rotated[0::2], rotated[1::2]))
    own = torch.cat((torch.arange(dim - len(rotated)), dim - len(rotated) + rotated))
    return (torch.arange(heads).unsqueeze(1) * dim + own).flatten()


def rotated_first(interleaved: bool, rope_dim: int, dim: int) -> Tensor:
    """Of `dim` outputs whose first rope_dim are rotated, in which order they are to lie: those are the last ones."""
    rotated = torch.arange(rope_dim)
    if interleaved:
        rotated = torch.cat((rotated[0::2], rotated[1::2]))
    return torch.cat((torch.arange(rope_dim, dim), rotated))
