"""The operations in portable PyTorch: any CPU, any CUDA device, no compiler needed.

On CPUs weights are packed for oneDNN, which multiplies 1 to 64 rows 1.2 to 3 times as fast as `F.linear` does.
Decodes attend together: one gather of whole blocks, then two batched products. (Measured against SDPA over the same
gather, 1.4 times as slow, and against SDPA for each sequence, 2.6 times as slow, for 64 sequences of 256 tokens.)
Prefills attend one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from services.worker.expert_by_expert import mix, pack
from services.worker.kv.copier import KvCopier
from services.worker.kv.cuda_copier import CudaKvCopier
from services.worker.kv.plain_copier import PlainKvCopier
from services.worker.ops import Activation, BatchMeta, PackedExperts, PackedLinear, Tried
from services.worker.standing_drafts import verified
from shared.blocks import BLOCK_SIZE

_MOST_SCORES = 1 << 21
"""Scores that a chunk of a prefill computes at once: 8 MiB."""


_MOST_GATHERED = 1 << 24
"""Elements of keys that decodes gather at once: 32 MiB in half precision."""


class _Linear(Struct, frozen=True):
    weight: Tensor
    bias: Tensor | None
    onednn: bool


class TorchOps:
    """See :class:`services.worker.ops.Ops`. Activations are in the model's dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._onednn = device.type == "cpu" and _onednn_multiplies(dtype)

    @property
    def name(self) -> str:
        return "torch"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if self._onednn:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        return PackedLinear(_Linear(weight, bias, self._onednn))

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, _Linear)
        if packed.onednn:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
            return product
        return F.linear(x, packed.weight, packed.bias)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def empty_rows(self, rows: int, hidden: int) -> Tensor:
        return torch.empty(rows, hidden, dtype=self._dtype, device=self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        return pack(self, gate_up, down)

    def mixture(
        self,
        x: Tensor,
        logits: Tensor,
        experts: PackedExperts,
        *,
        chosen: int,
        renormalised: bool,
        kind: Activation,
    ) -> Tensor:
        mixed = mix(self, x, logits, experts, chosen=chosen, renormalised=renormalised, kind=kind)
        return mixed.to(x.dtype)

    def kv_block_bytes(self, kv_heads: int, head_dim: int) -> int:
        return 2 * kv_heads * BLOCK_SIZE * head_dim * self._dtype.itemsize

    def allocate_kv(self, num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        shape = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
        return _zeros(shape, self._dtype, self._device), _zeros(shape, self._dtype, self._device)

    def kv_copier(self, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> KvCopier:
        return CudaKvCopier(caches) if self._device.type == "cuda" else PlainKvCopier(caches)

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        _, kv_heads, _, head_dim = k_cache.shape
        q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        rows = cos_sin.index_select(0, meta.positions).unsqueeze(1)
        block = torch.div(meta.slots, BLOCK_SIZE, rounding_mode="floor")
        offset = meta.slots - block * BLOCK_SIZE
        k_cache[block, :, offset] = _rotated(k, rows)
        v_cache[block, :, offset] = v
        return _rotated(q, rows)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: BatchMeta,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        attend = _Attention(q, k_cache, v_cache, meta, scale, window, softcap)
        parts = [*attend.decodes(), *attend.prefills()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def verify(self, tried: Tried) -> Tensor:
        return verified(tried)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, as a masked-out NaN would still spoil its row. On a CPU, pages take memory only when written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and this CPU has the instructions for `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [n, heads, D], cos_sin float32 [n, 1, D] → rotated, in x's dtype."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class _Attention(NamedTuple):
    """One layer's attention in one step; every method gives parts of [rows, H * D], in the order of the rows."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: BatchMeta
    scale: float
    window: int | None
    softcap: float | None

    def decodes(self) -> Iterator[Tensor]:
        """As many sequences at once as their keys, gathered, may take memory."""
        most = self.meta.max_context
        _, kv_heads, _, head_dim = self.k_cache.shape
        step = max(1, _MOST_GATHERED // (kv_heads * head_dim * most))
        for first in range(0, self.meta.num_decodes, step):
            rows = slice(first, min(first + step, self.meta.num_decodes))
            keys, values = self._gathered(rows, most)
            seen = self._seen(self.meta.positions[rows].unsqueeze(1), keys.shape[2])
            yield self._attend(self.q[rows].unsqueeze(2), keys, values, seen.unsqueeze(1))

    def prefills(self) -> Iterator[Tensor]:
        """One sequence after the other."""
        start = self.meta.num_decodes
        for sequence, (rows, context) in enumerate(self.meta.prefills, start=start):
            keys, values = self._gathered(slice(sequence, sequence + 1), context)
            queries = self.q[start : start + rows].transpose(0, 1).unsqueeze(0)
            yield from self._chunks(queries, keys, values, context)
            start += rows

    def _chunks(self, q: Tensor, keys: Tensor, values: Tensor, context: int) -> Iterator[Tensor]:
        """q [1, H, rows, D], the last rows of a sequence of `context` tokens.

        Chunks bound the memory that scores take, and leave out the keys that no row of the chunk sees.
        """
        heads, rows = q.shape[1:3]
        step = max(BLOCK_SIZE, _MOST_SCORES // (heads * context))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            position, newest = context - rows + first, context - rows + last
            oldest = 0 if self.window is None else max(0, position - self.window + 1)
            positions = torch.arange(position, newest, dtype=torch.int32, device=q.device).unsqueeze(1)
            seen = self._seen(positions - oldest, newest - oldest).unsqueeze(0)
            part = slice(oldest, newest)
            yield self._attend(q[:, :, first:last], keys[:, :, part], values[:, :, part], seen)

    def _gathered(self, sequences: slice, most: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequences' first `most` tokens (rounded up to blocks): [S, KV, tokens, D]."""
        num_blocks, kv_heads, block_size, head_dim = self.k_cache.shape
        width = -(-most // block_size)
        tables = self.meta.block_tables[sequences, :width]
        heads = torch.arange(kv_heads, dtype=torch.int32, device=tables.device)
        rows = (tables[:, None, :] * kv_heads + heads[None, :, None]).reshape(-1)

        def gathered(cache: Tensor) -> Tensor:
            blocks = cache.view(num_blocks * kv_heads, block_size * head_dim).index_select(0, rows)
            return blocks.view(len(tables), kv_heads, width * block_size, head_dim)

        return gathered(self.k_cache), gathered(self.v_cache)

    def _seen(self, positions: Tensor, tokens: int) -> Tensor:
        """positions [..., rows, 1] → [..., rows, tokens]: whether that row sees that token."""
        token = torch.arange(tokens, dtype=torch.int32, device=positions.device)
        seen = token <= positions
        return seen if self.window is None else seen & (token > positions - self.window)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """q [S, H, rows, D], keys and values [S, KV, tokens, D], seen [S, rows, tokens] → [S * rows, H * D]."""
        sequences, heads, rows, head_dim = q.shape
        kv_heads = keys.shape[1]
        grouped = q.reshape(sequences, kv_heads, heads // kv_heads * rows, head_dim)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float()
        scores *= self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.view(sequences, heads, rows, -1).masked_fill_(~seen.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(values.dtype).view(sequences, kv_heads, -1, keys.shape[2])
        mixed = torch.matmul(weights, values).view(sequences, heads, rows, head_dim)
        return mixed.transpose(1, 2).reshape(sequences * rows, heads * head_dim)
