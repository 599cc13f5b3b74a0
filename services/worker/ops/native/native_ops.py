"""The operations in C++ for CPUs; see :class:`services.worker.ops.interface.Ops` for what each promises.

Weights are bf16 or float32 (float16 models run in float32, their weights converted). Between operations the residual
and what linears give are float32; what goes into a linear, and the keys and values, are in the weights' type.

**Batch invariance.** A row's result depends on that row and its own context alone, to the last bit: not on the other
rows of the batch, nor on the cutting of a prompt into steps, nor on the number of threads. Sums over a linear's inputs
run in ascending order in one accumulator, whatever the number of rows; softmax runs over chunks of the context whose
bounds are fixed. So 64 concurrent streams equal their 64 sequential runs, and a stream dispatched again goes on as it
would have. (It does depend on the machine's instructions: AVX512-BF16 rounds otherwise than AVX2 does, and AMX adds up
32 inputs at a time.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.drafts import DraftAttempt, SlotCopies
from services.worker.ops.interface import (
    Activation,
    BatchMeta,
    EmbeddingTable,
    OpsUnavailable,
    PackedExperts,
    PackedLinear,
    Picks,
    Routing,
    cached_head_dim,
)
from services.worker.ops.low_rank import LowRankShape
from services.worker.ops.native import library
from services.worker.ops.native.build import Level, best_level
from services.worker.ops.native.kernels import (
    NativeKernels,
    PackedMatrix,
    RecyclingArena,
    WeightArena,
    address_of,
    batch_of,
    copies_of,
    native_activation,
    zeroed,
)
from services.worker.ops.native.matrix_stacks import NativeExperts, choose_experts, matrices_of, pack_stack, stack_of
from services.worker.ops.native.native_kv import NativeKvCopier
from services.worker.ops.native.native_latents import MAX_HEAD_DIM, NativeLatents
from services.worker.ops.native.native_low_rank import NativeLowRank
from services.worker.ops.native.native_states import NativeStates
from services.worker.ops.quantized import GROUP_SIZES, ExpertBiases, QuantizedWeight, WeightStack
from services.worker.ops.torch_ops import verify_drafts
from shared.blocks import DEFAULT_BLOCK_SIZE

_LANES = 16
_GROUP_OUTPUTS = 64
"""`kGroupOutputs` of linear.h."""
MAX_EXACT_INPUTS = 1 << 16
"""Products of so many bytes, summed, fit into 32 bits."""
_CACHE_CODES = {torch.float8_e4m3fn: library.CODES["fp8"], torch.int8: library.CODES["int8"]}
_WHOLE_CODES = {"int8": library.QUAD, "int4": library.NIBBLE}
"""How what is multiplied in whole numbers is kept."""

_ONE_OF_ONE = Routing(chosen=1, renormalised=False, scoring="sigmoid")
"""Its chances are the sigmoids of logits."""

_Found = tuple[Tensor, Tensor, Tensor, Tensor]


class NativeOps:
    """See the module and :class:`services.worker.ops.interface.Ops`."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        threads: int | None = None,
        level: Level | None = None,
        kernels: NativeKernels | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`threads`: as many as PyTorch uses, by default; `level`: the best that the machine has. `kernels`: another's,
        whose threads are shared then. `cache_dtype`: torch.float8_e4m3fn or torch.int8; None: keys and values are as
        weights are."""
        if device.type != "cpu":
            raise OpsUnavailable(f"the native operations run on CPUs, not on {device}")
        if dtype not in (torch.bfloat16, torch.float32, torch.float16):
            raise OpsUnavailable(f"the native operations know no {dtype}")
        self.block_size = block_size
        self.kernels = kernels or NativeKernels(threads or torch.get_num_threads(), level or best_level())
        if level is not None and self.kernels.instructions != level:
            raise OpsUnavailable(f"instructions = {level}: they cannot be used here; a warning before this says why")
        self.number = library.HALF if dtype == torch.bfloat16 else library.SINGLE
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self._cache_dtype = cache_dtype
        self._library = self.kernels.library
        self._pool = self.kernels.pool
        self._arena = WeightArena()
        self._batch: tuple[BatchMeta, library.NativeBatch] | None = None

    @property
    def name(self) -> str:
        """With the instructions that were compiled for, and the number of threads."""
        return f"native ({self.kernels.instructions}, {self.kernels.threads} threads)"

    def for_drafts(self) -> NativeOps:
        """Operations that drafters are fastest with: in bfloat16 where this machine multiplies it, on the same threads;
        else these."""
        if self.number == library.HALF or not self.kernels.multiplies_halves:
            return self
        return NativeOps(
            torch.device("cpu"),
            torch.bfloat16,
            kernels=self.kernels,
            block_size=self.block_size,
            cache_dtype=self._cache_dtype,
        )

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._cache_dtype or self.dtype

    @property
    def cache_code(self) -> int:
        """How the library reads keys and values."""
        return _CACHE_CODES.get(self.cache_dtype, library.PLAIN)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """A copy of both in the library's layout, in the weights' type."""
        return PackedLinear(self.pack_matrix(weight, bias))

    def pack_exactly(self, weight: Tensor, *, normed: bool = False) -> PackedLinear:
        """A copy in the library's layout, whose products are of single precision, or of halves where these are as
        exact: of normed rows, and of numbers that are halves."""
        halves = normed and self.number == library.HALF and torch.equal(weight.bfloat16().float(), weight)
        return PackedLinear(self.pack_matrix(weight, None, library.HALF if halves else library.SINGLE))

    def pack_matrix(self, weight: Tensor, bias: Tensor | None, number: int | None = None) -> PackedMatrix:
        """See `pack_linear`. `number`: of the library's two; None: the weights'."""
        number = self.number if number is None else number
        out, inputs = weight.shape
        weight = weight.to(torch.float32 if number == library.SINGLE else self.dtype).contiguous()
        floats = None if bias is None else bias.float().contiguous()
        groups = self._arena.take(self._library.baton_packed_bytes(number, out, inputs))
        self._library.baton_pack(self._pool, number, weight.data_ptr(), out, inputs, groups.data_ptr())
        linear = library.Linear(*(number, out, inputs, groups.data_ptr(), address_of(floats)), tiled=self.kernels.tiles)
        return PackedMatrix(linear, groups, floats, out, inputs)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
        """The codes in the library's layout; they become floats in registers, or, for many rows, in the cache."""
        return PackedLinear(self.pack_codes(weight, bias))

    def pack_codes(self, weight: QuantizedWeight, bias: Tensor | None) -> PackedMatrix:
        """See `pack_quantized`."""
        out, inputs = weight.codes.shape
        digits = self._digits_of(weight)
        code, codes = (_WHOLE_CODES if digits else library.CODES)[weight.code], weight.codes.contiguous()
        floats = None if bias is None else bias.float().contiguous()
        groups = self._arena.take(self._library.baton_coded_bytes(code, out, inputs))
        self._library.baton_pack_codes(self._pool, code, codes.data_ptr(), out, inputs, groups.data_ptr())
        scales = _by_groups(weight.scales)
        zeros = None if weight.zeros is None else _by_groups(weight.zeros)
        offsets = None if weight.offsets is None else _by_groups(weight.offsets)
        one_scale = weight.scales.shape[1] == 1 and code != library.NIBBLE and offsets is None
        scaled = 0 if one_scale else weight.group_size
        linear = library.Linear(
            *(self.number, out, inputs, groups.data_ptr(), address_of(floats)),
            *(code, scaled, scales.data_ptr(), address_of(zeros), digits, address_of(offsets), self.kernels.tiles),
        )
        return PackedMatrix(linear, groups, floats, out, inputs, scales, zeros, offsets)

    def _digits_of(self, weight: QuantizedWeight) -> int:
        """To how many digits of eight bits the rows are rounded that this is multiplied with in whole numbers; 0: they
        are not. Two hold rows of bfloat16 better than it does itself (digits.h). No kernel rounds rows to fp8."""
        if weight.rounded_activations and weight.code == "int8":
            return 1
        if self.number != library.HALF or not self.kernels.multiplies_bytes:
            return 0
        match weight.code:
            case "int8":
                return 2 if weight.scales.shape[1] > 1 or weight.codes.shape[1] <= MAX_EXACT_INPUTS else 0
            case "int4":
                return 2 if weight.group_size in GROUP_SIZES else 0
            case "fp8":
                return 0

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """float32 [n, out]; a row's result does not depend on the others."""
        assert isinstance(packed, PackedMatrix)
        to = torch.empty(len(x), packed.out)
        x, number = self.known(x)
        self._library.baton_multiply(
            self._pool,
            ctypes.byref(packed.linear),
            *(x.data_ptr(), number, len(x), packed.inputs),
            *(library.OUT_FLOAT, 0, to.data_ptr(), packed.out),
        )
        return to

    def gated_linear(self, x: Tensor, packed: PackedLinear, kind: Activation) -> Tensor:
        """One after the other."""
        return self.gated_act(self.linear(x, packed), kind)

    def low_rank_products(self, shape: LowRankShape) -> NativeLowRank:
        """All adapters in one call; a row's result does not depend on the others."""
        return NativeLowRank(self, shape)

    @property
    def embeds_codes(self) -> bool:
        """What was packed to be multiplied is read by rows, too."""
        return True

    def embed(self, ids: Tensor, table: EmbeddingTable) -> Tensor:
        """float32 [n, hidden]. Raises IndexError for an id outside of the table."""
        if isinstance(table, PackedMatrix):
            rows = torch.empty(len(ids), table.inputs)
            known = self._library.baton_embed_codes(
                self._pool, ids.data_ptr(), len(ids), ctypes.byref(table.linear), rows.data_ptr()
            )
            if not known:
                raise IndexError(f"a token id is outside of the vocabulary of {table.out}")
            return rows
        assert isinstance(table, Tensor)
        if table.dtype != self.dtype:
            return F.embedding(ids, table).float()
        vocab, hidden = table.shape
        to = torch.empty(len(ids), hidden)
        if not self._library.baton_embed(
            self._pool, ids.data_ptr(), len(ids), self.number, table.data_ptr(), vocab, hidden, to.data_ptr()
        ):
            raise IndexError(f"a token id is outside of the vocabulary of {vocab}")
        return to

    def empty_rows(self, rows: int, hidden: int) -> Tensor:
        """float32, as `embed` gives."""
        return torch.empty(rows, hidden)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In the weights' type."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The normed rows in the weights' type, the sum in float32."""
        residual = residual.float()
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        to = torch.empty(x.shape, dtype=self.dtype)
        x, number = self.known(x)
        rows, hidden = x.shape
        self._library.baton_norm(
            *(self._pool, x.data_ptr(), number, rows, hidden, address_of(residual), weight.data_ptr(), eps),
            *(self.number, to.data_ptr()),
        )
        return to

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """In the weights' type."""
        gate_up = gate_up.float()
        rows, outputs = gate_up.shape
        width = outputs if kind == "relu2" else outputs // 2
        to = torch.empty(rows, width, dtype=self.dtype)
        self._library.baton_gate(
            *(self._pool, gate_up.data_ptr(), rows, width, native_activation(kind), self.number, to.data_ptr())
        )
        return to

    def pack_experts(
        self, gate_up: WeightStack, down: WeightStack, biases: ExpertBiases | None = None
    ) -> PackedExperts:
        """Each expert's matrices in the library's layout."""
        added = (None, None) if biases is None else biases
        return PackedExperts(NativeExperts(pack_stack(self, gate_up, added[0]), pack_stack(self, down, added[1])))

    @contextmanager
    def packing_into(self, arena: WeightArena) -> Iterator[None]:
        """What is packed within the context lies in `arena`."""
        own, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = own

    def expert_packer(self) -> NativeOps:
        """On a thread of its own, as that of steps is used by one job at a time."""
        packer = copy(self)
        packer.kernels = NativeKernels(1, self.kernels.level)
        packer._pool, packer._arena = packer.kernels.pool, RecyclingArena()
        return packer

    def arrange_experts(self, parts: Sequence[tuple[PackedExperts, int]]) -> PackedExperts:
        """See `ExpertPacker.arrange_experts`."""
        gate_up: list[PackedMatrix] = []
        down: list[PackedMatrix] = []
        for experts, number in parts:
            assert isinstance(experts, NativeExperts)
            gate_up.append(experts.gate_up.packed[number])
            down.append(experts.down.packed[number])
        return PackedExperts(NativeExperts(stack_of(gate_up), stack_of(down)))

    def choose_experts(self, logits: Tensor, routing: Routing) -> Picks:
        """Of equal experts, and of equal groups, that of the lower number. By PyTorch where the library knows no such
        router."""
        return choose_experts(self.kernels, logits, routing)

    def mixture(self, x: Tensor, picks: Picks, experts: PackedExperts, *, kind: Activation) -> Tensor:
        """float32 [n, hidden]; a row's sum goes over its experts by their numbers."""
        assert isinstance(experts, NativeExperts)
        x, number = self.known(x)
        chances, numbers = picks.chances.float().contiguous(), picks.experts.long().contiguous()
        mixed = torch.empty(len(x), experts.down.out)
        described = library.NativePicks(chances.data_ptr(), numbers.data_ptr(), numbers.shape[1])
        self._library.baton_mix(
            *(self._pool, x.data_ptr(), number, *x.shape),
            *(ctypes.byref(described), ctypes.byref(matrices_of(experts, kind))),
            *(mixed.data_ptr(), mixed.shape[1]),
        )
        return mixed

    def sigmoid_gated(self, x: Tensor, logits: Tensor) -> Tensor:
        """As in the library's whole pass: one logit's by the sigmoid of routers."""
        if logits.shape[1] == 1:
            return x.mul_(self.choose_experts(logits, _ONE_OF_ONE).chances)
        logits, (x, number) = logits.float().contiguous(), self.known(x.contiguous())
        self._library.baton_gate_by(self._pool, logits.data_ptr(), *x.shape, number, x.data_ptr())
        return x

    def kv_block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Heads are padded to 16 elements."""
        return 2 * kv_heads * self.block_size * self._padded_head_dim(head_dim) * self.cache_dtype.itemsize

    def allocate_kv(self, num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Blocks are laid out inside as attention.h says; the last dimension is padded to 16. Raises OpsUnavailable for
        heads whose codes do not fill words."""
        if self.cache_code != library.PLAIN and head_dim % 4:
            raise OpsUnavailable(f"kv_cache_dtype: heads of {head_dim} elements are no multiple of 4; auto keeps them")
        shape = (num_blocks, kv_heads, self.block_size, self._padded_head_dim(head_dim))
        each = num_blocks * self.kv_block_bytes(kv_heads, head_dim) // 2
        keys, values = (zeroed(each, grows=True).view(self.cache_dtype).view(shape) for _ in range(2))
        return keys, values

    def kv_copier(self, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> NativeKvCopier:
        """Copies by the library, on the thread that asks."""
        return NativeKvCopier(self._library, caches, head_dim)

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
        """Queries in the weights' type. Raises ValueError for heads that the library does not know."""
        qkv = qkv.float()
        rows, width = qkv.shape
        head_dim = cos_sin.shape[1]
        queries = torch.empty(rows, heads, head_dim, dtype=self.dtype)
        what = library.RopeAndStore(
            *(qkv.data_ptr(), width, heads, cos_sin.data_ptr(), address_of(q_norm), address_of(k_norm), eps),
            *(queries.data_ptr(), heads * head_dim),
        )
        cache = self._cache_of(k_cache, v_cache, head_dim)
        self._library.baton_rope_and_store(
            self._pool, ctypes.byref(what), ctypes.byref(self.batch_of(meta)), ctypes.byref(cache)
        )
        return queries

    def copy_slots(self, k_cache: Tensor, v_cache: Tensor, copies: SlotCopies) -> None:
        """Shared by the threads. What heads are padded with is copied, too."""
        stored = k_cache.shape[3]
        cache = self._cache_of(k_cache, v_cache, stored - cached_head_dim(k_cache.dtype, 0))
        self._library.baton_copy_slots(self._pool, ctypes.byref(cache), ctypes.byref(copies_of(copies)))

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
        """In the weights' type. Raises ValueError for heads that the library does not know."""
        q = q.to(self.dtype)
        rows, heads, head_dim = q.shape
        to = torch.empty(rows, heads * head_dim, dtype=self.dtype)
        what = library.Attention(
            *(q.data_ptr(), heads * head_dim, heads, scale, window or 0, softcap or 0.0),
            *(to.data_ptr(), heads * head_dim, address_of(sinks), address_of(alibi_slopes)),
            *(address_of(distance_biases), 0 if distance_biases is None else distance_biases.shape[1]),
        )
        cache = self._cache_of(k_cache, v_cache, head_dim)
        self._library.baton_attend(
            self._pool, ctypes.byref(what), ctypes.byref(self.batch_of(meta)), ctypes.byref(cache)
        )
        return to

    @property
    def latents(self) -> NativeLatents:
        """On the same threads, in the weights' type."""
        if self.cache_code != library.PLAIN:
            raise OpsUnavailable("kv_cache_dtype: latents are kept in the model's type; auto is")
        return NativeLatents(self)

    @property
    def states(self) -> NativeStates:
        """On the same threads."""
        return NativeStates(self)

    def verify(self, attempt: DraftAttempt) -> Tensor:
        """By NumPy, see `torch_ops.verify_drafts`."""
        return verify_drafts(attempt)

    def draw(
        self, logits: Tensor, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """See `sampling.races.Draw`. A row's token depends on that row alone, and is the same with any instructions
        that multiply and add in one."""
        logits, rows = logits.float().contiguous(), len(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        how = (keys.contiguous(), temperature, top_k, top_p, min_p, tokens)
        self._library.baton_draw(
            self._pool, logits.data_ptr(), logits.shape[1], rows, *(each.data_ptr() for each in how)
        )
        return tokens

    def find_likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `sampling.sampler.FindLikeliest`."""
        logits, rows = logits.float().contiguous(), len(logits)
        tokens, undefined = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        self._library.baton_find_likeliest(
            self._pool, logits.data_ptr(), logits.shape[1], rows, tokens.data_ptr(), undefined.data_ptr()
        )
        return tokens, undefined

    def find_logprobs(self, logits: Tensor, rows: Tensor, tokens: Tensor, likeliest: int) -> _Found:
        """See `sampling.logprobs.FindLogprobs`. What is found of a row depends on that row alone."""
        logits, rows, tokens = logits.float().contiguous(), rows.contiguous(), tokens.contiguous()
        count, likeliest = len(rows), min(likeliest, library.MAX_LIKELIEST)
        totals, ranks = torch.empty(count), torch.empty(count, dtype=torch.int64)
        others, values = torch.empty(count, likeliest, dtype=torch.int64), torch.empty(count, likeliest)
        asked = (rows.data_ptr(), tokens.data_ptr(), count, likeliest)
        what = library.NativeLogprobs(logits.data_ptr(), logits.shape[1], *asked)
        found = (totals, ranks, others, values)
        self._library.baton_find_logprobs(self._pool, ctypes.byref(what), *map(address_of, found))
        return found

    def _padded_head_dim(self, head_dim: int) -> int:
        return -(-cached_head_dim(self.cache_dtype, head_dim) // _LANES) * _LANES

    def _cache_of(self, keys: Tensor, values: Tensor, head_dim: int) -> library.Cache:
        """One layer's caches, for the library."""
        if head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"heads of {head_dim} elements are not supported")
        return library.Cache(
            *(self.number, keys.data_ptr(), values.data_ptr(), keys.shape[1], head_dim),
            *(library.page_bits(keys.shape[2]), self.cache_code),
        )

    def batch_of(self, meta: BatchMeta) -> library.NativeBatch:
        """`meta` for the library; made once for all layers of a step."""
        if self._batch is None or self._batch[0] is not meta:
            self._batch = (meta, batch_of(meta))
        return self._batch[1]

    def known(self, x: Tensor) -> tuple[Tensor, int]:
        """x in a type that the kernels read, and its number."""
        if x.dtype == torch.bfloat16:
            return x, library.HALF
        return x.float(), library.SINGLE


def _by_groups(of_outputs: Tensor) -> Tensor:
    """[out, n] → [groups of 64 outputs, n, 64], where the last one is filled up with zeros."""
    out, count = of_outputs.shape
    padded = of_outputs.new_zeros(-(-out // _GROUP_OUTPUTS) * _GROUP_OUTPUTS, count)
    padded[:out] = of_outputs
    return padded.view(-1, _GROUP_OUTPUTS, count).transpose(1, 2).contiguous()
