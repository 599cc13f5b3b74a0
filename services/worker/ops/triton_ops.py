"""The operations on a GPU: PyTorch's matrix products (cuBLAS), and Triton kernels for all that is bound by memory.

None of them waits for the host, and what is captured once for some rows may be replayed for fewer: a row whose slot is
negative stores nothing, one whose context is 0 reads nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs

from services.worker.kv.copier import KvCopier
from services.worker.ops.drafts import DraftAttempt
from services.worker.ops.gpu import sm_count, why_no_triton
from services.worker.ops.interface import (
    Activation,
    AttentionName,
    BatchMeta,
    LatentCache,
    OpsUnavailable,
    PackedExperts,
    PackedLinear,
    Picks,
    Routing,
)
from services.worker.ops.low_rank import LowRankProducts, LowRankShape
from services.worker.ops.quantized import ExpertBiases, QuantizedStack, QuantizedWeight, WeightStack
from services.worker.ops.torch_latent import LatentAttentionStep
from services.worker.ops.torch_ops import PlainLinear, QuantizedLinear, TorchLatents, TorchOps, rotate_last
from services.worker.ops.torch_routing import rows_by_expert
from services.worker.ops.triton import few_rows, rounded_linear
from services.worker.ops.triton.attention.indexer import choose_slots
from services.worker.ops.triton.attention.latent_decode import latent_decode, latent_tile
from services.worker.ops.triton.attention.paged_attention import create_attention
from services.worker.ops.triton.attention.tiles import decode_splits
from services.worker.ops.triton.codes import CodedStack, code_stack, numbers, numbers_of
from services.worker.ops.triton.low_rank import GatheredLowRank, RowTiling
from services.worker.ops.triton.moe.coded_experts import mix_coded_rows
from services.worker.ops.triton.moe.grouped_products import NO_BIASES, mix_tiles
from services.worker.ops.triton.moe.mixture import choose_experts, compile_all, first_row, mixture
from services.worker.ops.triton.moe.routing import one_by_one, reads_codes
from services.worker.ops.triton.quantized_linear import (
    compile_tiles,
    multiplies,
    quantized_linear,
    readable,
    tiles_hold_groups,
)
from services.worker.ops.triton.rotary import rope_and_store
from services.worker.ops.triton.row_ops import add_rms_norm, gated_act, rms_norm
from services.worker.ops.triton.states.mixing import TritonStates
from services.worker.ops.triton.verification import verify
from shared.blocks import DEFAULT_BLOCK_SIZE


class _Experts(NamedTuple):
    gate_up: Tensor | CodedStack
    down: Tensor | CodedStack
    biases: ExpertBiases = NO_BIASES


class TritonOps(TorchOps):
    """See :class:`services.worker.ops.interface.Ops`. Activations are in the model's dtype."""

    capturable = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        attention: AttentionName = "auto",
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        """`cache_dtype`: of keys and values; None: `dtype`. On a CPU the kernels run in Triton's interpreter, for
        tests. Raises OpsUnavailable.
        """
        super().__init__(device, dtype, block_size=block_size)
        _check_device(device)
        self._cache_dtype = cache_dtype or dtype
        self._compiled: set[tuple[object, ...]] = set()
        """Shapes of mixtures, quantised weights and low-rank products whose kernels are there in all sizes."""
        self._tiling = RowTiling()
        self._attend = create_attention(attention, device, dtype, self._cache_dtype)

    @property
    def name(self) -> str:
        """The name of this implementation: "triton"."""
        return "triton"

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
        """The codes, or numbers where groups are smaller than tiles. Compiles the kernels of all sizes of tiles when a
        shape of weight is first seen on a GPU."""
        if not tiles_hold_groups(weight):
            return self.pack_linear(weight.dequantized(self._dtype), bias)
        if not readable(weight.code, self._device):
            weight = weight._replace(rounded_activations=False)
        packed = super().pack_quantized(weight, bias)
        assert isinstance(packed, QuantizedLinear)
        outputs, inputs = weight.codes.shape
        left_out = (weight.zeros is None, weight.offsets is None, bias is None)
        shape = (weight.code, outputs, inputs, weight.group_size, weight.rounded_activations, *left_out)
        if shape not in self._compiled and self._device.type == "cuda":
            self._compiled.add(shape)
            row = torch.zeros(1, inputs, dtype=self._dtype, device=self._device)
            if weight.rounded_activations:
                rounded_linear.compile_tiles(row, packed.weight, bias)
            elif multiplies(row, packed.weight):
                compile_tiles(row, packed.weight, bias)
                numbers(packed.weight, self._dtype)
        return packed

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Few rows in one launch; else by cuBLAS, codes as numbers that are made first. Where rows are rounded, too, in
        two launches, however many there are, the second of which is PyTorch's product of fp8 where it has one."""
        if isinstance(packed, QuantizedLinear):
            if packed.weight.rounded_activations:
                return rounded_linear.rounded_linear(x, packed.weight, packed.bias)
            if multiplies(x, packed.weight):
                return quantized_linear(x, packed.weight, packed.bias)
            if readable(packed.weight.code, x.device):
                return F.linear(x, numbers(packed.weight, x.dtype), packed.bias)
        elif isinstance(packed, PlainLinear) and few_rows.multiplies(x, packed.weight):
            return few_rows.few_rows_linear(x, packed.weight, packed.bias)
        return super().linear(x, packed)

    def gated_linear(self, x: Tensor, packed: PackedLinear, kind: Activation) -> Tensor:
        """Few rows in one launch."""
        if kind != "relu2" and isinstance(packed, PlainLinear) and few_rows.multiplies(x, packed.weight):
            return few_rows.few_rows_linear(x, packed.weight, packed.bias, kind)
        return super().gated_linear(x, packed, kind)

    def low_rank_products(self, shape: LowRankShape) -> LowRankProducts:
        """All adapters in two launches, which are compiled when a shape is first seen on a GPU."""
        products = GatheredLowRank(shape, self._device, self._dtype, self._tiling)
        if shape not in self._compiled and self._device.type == "cuda":
            self._compiled.add(shape)
            products.compile()
        return products

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One launch; in x's dtype."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """One launch; the sum is formed in `residual`."""
        return add_rms_norm(x, residual, weight, eps)

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """One launch; in the dtype of `gate_up`."""
        return super().gated_act(gate_up, kind) if kind == "relu2" else gated_act(gate_up, kind)

    def pack_experts(
        self, gate_up: WeightStack, down: WeightStack, biases: ExpertBiases | None = None
    ) -> PackedExperts:
        """The stacks themselves, in the model's dtype or in codes; numbers where no kernel reads those."""
        return PackedExperts(_Experts(self._readable(gate_up), self._readable(down), biases or NO_BIASES))

    def _readable(self, stack: WeightStack) -> Tensor | CodedStack:
        if isinstance(stack, QuantizedStack) and not (
            readable(stack.weight.code, self._device) and tiles_hold_groups(stack.weight)
        ):
            return torch.stack([weight.dequantized(self._dtype) for weight in stack.matrices])
        return code_stack(stack)

    def choose_experts(self, logits: Tensor, routing: Routing) -> Picks:
        """In int32; by one launch where the greatest of a softmax choose."""
        return choose_experts(logits, routing)

    def mixture(self, x: Tensor, picks: Picks, experts: PackedExperts, *, kind: Activation) -> Tensor:
        """Compiles the kernels of all sizes of tiles when a shape of mixture is first seen on a GPU."""
        assert isinstance(experts, _Experts)
        gate_up, down = experts.gate_up, experts.down
        if kind == "relu2":
            return self._ungated_mixture(x, picks, experts)
        if isinstance(gate_up, CodedStack) and isinstance(down, CodedStack):
            return self._coded_mixture(x, picks, gate_up, down, experts.biases, kind)
        return self._plain_mixture(x, picks, experts, kind)

    def _ungated_mixture(self, x: Tensor, picks: Picks, experts: _Experts) -> Tensor:
        """One expert after the other. Waits for the device."""
        ups, downs = numbers_of(experts.gate_up, x.dtype), numbers_of(experts.down, x.dtype)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, chances in rows_by_expert(picks, len(downs)):
            up = self.gated_act(F.linear(x.index_select(0, rows), ups[expert]), "relu2")
            mixed.index_add_(0, rows, F.linear(up, downs[expert]).float() * chances)
        return mixed.to(x.dtype)

    def _coded_mixture(
        self, x: Tensor, picks: Picks, gate_up: CodedStack, down: CodedStack, biases: ExpertBiases, kind: Activation
    ) -> Tensor:
        """Few rows read the codes of their own experts, more are sorted by them; where rows are rounded, all are."""
        chosen, rounded = picks.experts.shape[1], gate_up.weight.rounded_activations
        shape = (chosen, kind, gate_up.weight.code, down.weight.code, rounded, *down.shape)
        if shape not in self._compiled and self._device.type == "cuda":
            self._compiled.add(shape)
            compile_all(x, picks, gate_up, down, biases, kind=kind)
            if not rounded:
                first = _Experts(gate_up, down, biases)
                mix_coded_rows(x[:1], first_row(picks), gate_up, down, biases, kind=kind)
                self._plain_mixture(x[:1], first_row(picks), first, kind)
        if rounded or not one_by_one(len(x), chosen, down.shape[0]):
            if rounded or reads_codes(len(x) * chosen, down.shape[0]):
                return mix_tiles(x, picks, gate_up, down, biases, kind=kind)
            return self._plain_mixture(x, picks, _Experts(gate_up, down, biases), kind)
        return mix_coded_rows(x, picks, gate_up, down, biases, kind=kind)

    def _plain_mixture(self, x: Tensor, picks: Picks, experts: _Experts, kind: Activation) -> Tensor:
        """Of numbers, which are made of codes first."""
        gate_up, down = numbers_of(experts.gate_up, x.dtype), numbers_of(experts.down, x.dtype)
        shape = (picks.experts.shape[1], kind, *down.shape)
        if shape not in self._compiled and self._device.type == "cuda":
            self._compiled.add(shape)
            compile_all(x, picks, gate_up, down, experts.biases, kind=kind)
        return mixture(x, picks, gate_up, down, experts.biases, kind=kind)

    def kv_block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Keys and values are kept in the caches' dtype."""
        return 2 * kv_heads * self.block_size * head_dim * self._cache_dtype.itemsize

    def allocate_kv(self, num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Zeros in the caches' dtype, which may be float8_e4m3fn."""
        shape = (num_blocks, kv_heads, self.block_size, head_dim)
        keys, values = (torch.zeros(shape, dtype=self._cache_dtype, device=self._device) for _ in range(2))
        return keys, values

    def kv_copier(self, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> KvCopier:
        """Copies bytes: of float8 caches too."""
        if self._cache_dtype.itemsize == 1:
            # What is only copied need not be numbers that PyTorch can index.
            caches = [(keys.view(torch.uint8), values.view(torch.uint8)) for keys, values in caches]
        return super().kv_copier(caches, head_dim)

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
        """One launch; a row whose slot is negative stores nothing."""
        positions = meta.positions
        if meta.rotations is not None:  # a table of this step's own, with a row for each
            cos_sin, positions = meta.rotations, torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
        return rope_and_store(
            *(qkv, meta.slots, positions, cos_sin, k_cache, v_cache),
            heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )

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
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        distance_biases: Tensor | None = None,
    ) -> Tensor:
        """Without waiting for the device; a decode whose context is 0 gives zeros. Raises ValueError for biases of
        distances, which models on CPUs alone have."""
        if distance_biases is not None:
            raise ValueError("biases of distances are not added on a GPU")
        return self._attend(
            *(q, k_cache, v_cache, meta),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )

    @property
    def latents(self) -> TritonLatents:
        """Decodes and what an indexer chooses by kernels, the rest by PyTorch."""
        return TritonLatents(self, self._device, self._dtype)

    @property
    def states(self) -> TritonStates:
        """By kernels, but for what chunks of prompts are made of in state spaces and delta nets."""
        return TritonStates()

    def verify(self, attempt: DraftAttempt) -> Tensor:
        """Verifies drafts in one kernel launch; see `Ops.verify`."""
        return verify(attempt)


_MAX_ROWS = 1 << 15
"""Of one launch, whose grid has 65,535 at the most."""


class TritonLatents(TorchLatents):
    """See :class:`services.worker.ops.interface.LatentOps`."""

    def attention(
        self, q: Tensor, cache: LatentCache, meta: BatchMeta, *, scale: float, chosen: Tensor | None = None
    ) -> Tensor:
        """Decodes, or all rows that have `chosen`, by one launch or two, without waiting for the device; then prefills,
        one after the other."""
        if chosen is not None:
            return self._attend_to(q, cache, meta, chosen, scale)
        decodes = meta.num_decodes
        parts = []
        if decodes:
            splits = self._splits(decodes, q.shape[1], meta.max_context, cache)
            tables, lengths = meta.block_tables[:decodes], meta.context_lens[:decodes]
            parts.append(latent_decode(q[:decodes], cache, tables, lengths, scale=scale, splits=splits))
        parts += LatentAttentionStep(q, cache, meta, scale).prefills()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def choose(
        self, q: Tensor, weights: Tensor, meta: BatchMeta, cos_sin: Tensor, cache: LatentCache, count: int
    ) -> Tensor:
        """Decodes together, prefills one after the other, in three launches each, without waiting for the device."""
        assert cache.index_keys is not None, "there are an indexer's keys"
        rows = cos_sin.index_select(0, meta.positions).unsqueeze(1)
        return choose_slots(rotate_last(q, rows), weights, cache.index_keys, meta, count)

    def _attend_to(self, q: Tensor, cache: LatentCache, meta: BatchMeta, chosen: Tensor, scale: float) -> Tensor:
        """Each row is a decode of its own."""
        lengths, parts = (meta.positions + 1).clamp_(max=chosen.shape[1]), []
        for first in range(0, len(q), _MAX_ROWS):
            rows = slice(first, first + _MAX_ROWS)
            splits = self._splits(len(q[rows]), q.shape[1], chosen.shape[1], cache)
            parts.append(
                latent_decode(q[rows], cache, chosen[rows], lengths[rows], scale=scale, splits=splits, chosen=True)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _splits(self, rows: int, heads: int, tokens: int, cache: LatentCache) -> int:
        tile = latent_tile(cache.latents.element_size())
        return decode_splits(rows, heads, 1, tokens, tile, sm_count(self._device))


def _check_device(device: torch.device) -> None:
    if device.type == "cuda":
        reason = why_no_triton(device)
        if reason is not None:
            raise OpsUnavailable(reason)
    elif not knobs.runtime.interpret:
        raise OpsUnavailable(f"Triton's kernels run on GPUs, not on {device}; TRITON_INTERPRET=1 interprets them")
