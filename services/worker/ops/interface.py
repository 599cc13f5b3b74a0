"""What a decoder is made of: the operations that a device offers. Knows no model family and no scheduling.

The decoder is written against :class:`Ops` only, so a model runs on whatever implements it: portable PyTorch
(`torch_ops`), C++ kernels for CPUs (`native.native_ops`), or Triton's for GPUs (`triton.triton_ops`). The native ones
can also do a whole forward pass at once, see `models.native_decoder`.

Words: n is the number of tokens (rows) of a step over all its sequences, S the number of sequences, H and KV
this rank's query and key/value heads, D the head dimension, I this rank's share of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType, Protocol, runtime_checkable

import torch
from torch import Tensor

from services.worker.ops.activation import Activation as Activation
from services.worker.ops.drafts import DraftAttempt, SlotCopies
from services.worker.ops.low_rank import LowRankProducts, LowRankShape
from services.worker.ops.quantized import ExpertBiases, QuantizedWeight, WeightStack
from services.worker.ops.states.mixers import DeltaNet as DeltaNet
from services.worker.ops.states.mixers import RecurrentUnit as RecurrentUnit
from services.worker.ops.states.mixers import SelectiveSpace as SelectiveSpace
from services.worker.ops.states.mixers import ShortConvolution as ShortConvolution
from services.worker.ops.states.mixers import StateCache as StateCache
from services.worker.ops.states.mixers import StateMixer as StateMixer
from services.worker.ops.states.mixers import StateSpace as StateSpace

if TYPE_CHECKING:
    from services.worker.kv.copier import KvCopier

PackedLinear = NewType("PackedLinear", object)
EmbeddingTable = Tensor | PackedLinear
"""[vocab, hidden]: numbers, or what `Ops.pack_quantized` gives."""
"""A weight in whatever layout its `Ops` multiplies fastest. Only the `Ops` that packed it may look inside."""

PackedExperts = NewType("PackedExperts", object)
"""The experts of a mixture, as `PackedLinear`."""

PackedHeads = NewType("PackedHeads", object)
"""A weight of each head, as `PackedLinear`."""

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""What makes scores of a router's logits."""

OpsName = Literal["auto", "torch", "native", "triton"]
CacheDtype = Literal["auto", "fp8", "int8_per_token_head"]
"""auto: the model's own; fp8: float8_e4m3fn, half the memory and a little less exact; int8_per_token_head (vLLM's
name): whole numbers with a scale for each head of each token."""
CACHE_DTYPES: dict[CacheDtype, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}
_SCALE_BYTES = 4


def cached_head_dim(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of a token's head as they are cached and stored: int8 have the float32 that they are multiplied by
    behind them."""
    return head_dim + (_SCALE_BYTES if dtype == torch.int8 else 0)


AttentionName = Literal["auto", "triton", "flash-attn"]
"""The attention kernels on a GPU; auto: triton."""


class OpsUnavailable(RuntimeError):
    """This machine cannot run these operations; raised by their constructor, says why."""


class StateRows(NamedTuple):
    """Which states the S sequences of a step go on with."""

    slots: Tensor
    """int64 [S], on the device: whose row of each layer's states a sequence's are."""
    begins: Tensor | None
    """bool [num_decodes], on the device: whether a decode is the first token of its sequence, whose states are zeros
    then, whatever its slot holds. None: none is."""
    trial: StateTrial | None = None
    """Mixes in the place of `StateOps`, where sequences have drafts."""


class StateTrial(Protocol):
    """Mixes a step some of whose sequences have drafts, each with rows that follow each other."""

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache) -> Tensor:
        """See `StateOps.mix`; but the states of sequences with drafts are left as they were before."""


class InputRows(NamedTuple):
    """Rows of a step that begin as the client gave them, and not as their tokens' embeddings."""

    rows: Tensor
    """[k] int32 in rising order."""
    values: Tensor
    """[k, hidden * (1 + levels)]: what a row begins as, and what is added to it between layers."""

    def on(self, device: torch.device, dtype: torch.dtype) -> InputRows:
        """The same for a model on `device` whose embeddings are of `dtype`."""
        return InputRows(self.rows.to(device), self.values.to(device).to(dtype))

    def put_into(self, x: Tensor, scale: float | None = None) -> Tensor:
        """x [n, hidden], of which these rows, times `scale`, are overwritten."""
        values = self.values[:, : x.shape[1]]
        return x.index_copy_(0, self.rows.long(), (values if scale is None else values * scale).to(x.dtype))

    def add_level(self, x: Tensor, number: int | None) -> Tensor:
        """x [n, hidden] between two layers, with the part of that `number` added; None: as it is."""
        if number is None:
            return x
        level = self.values[:, (number + 1) * x.shape[1] : (number + 2) * x.shape[1]]
        return x.index_add_(0, self.rows.long(), level.to(x.dtype)) if level.shape[1] else x


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """How a step's n rows fall into S sequences, and where their keys and values lie.

    Every tensor is int32, contiguous and on the device. Sequence s owns the rows query_starts[s] to
    query_starts[s + 1], which hold its positions context_lens[s] - count up to context_lens[s] - 1.
    """

    query_starts: Tensor
    """[S + 1]"""
    context_lens: Tensor
    """[S] tokens of each sequence whose keys are cached once this step's rows are stored."""
    block_tables: Tensor
    """[S, width] block ids in order, padded with 0 behind the last one needed."""
    slots: Tensor
    """[n] block id * block_size + offset: where each row's key and value go."""
    positions: Tensor
    """[n] position of each row in its sequence, from 0."""
    logits_rows: Tensor
    """[R] the rows whose logits are wanted."""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one row each; those behind them have any number."""
    prefills: tuple[tuple[int, int], ...]
    """(rows, context length) of each sequence behind the decodes, on the host."""
    max_query: int
    """The most rows that one sequence has."""
    max_context: int
    """The greatest of `context_lens`."""
    block_size: int
    """Tokens of a block."""
    every_row: bool = False
    """Whether it is known that `logits_rows` are all rows in their order."""
    others: tuple[BatchMeta, ...] = ()
    """The same step for each group of layers behind the first: block tables and slots differ, nothing else does. Empty
    where all layers have one table. What lies behind a window may be block 0 in a table: its contents are finite."""

    states: StateRows | None = None
    """Where the states of its sequences lie; None where no layer has any."""
    rotations: Tensor | None = None
    """float32 [n, D] cosines and sines of each row, where positions have three axes. None: those of `positions`."""
    lasts: Tensor | None = None
    """[n] the last position that each row sees, rising within a sequence; None: its own for all. On CPUs only."""
    inputs: InputRows | None = None
    """On every rank. None: every row begins as its token's embedding."""
    encoded: EncodedInputs | None = None
    """For layers that attend to rows beside prompts; None: there are none."""
    copies: SlotCopies | None = None
    """Made in each layer once the rows are stored, before any is read: branches of trees of drafts. On CPUs only."""

    def of_group(self, group: int) -> BatchMeta:
        """The step for the layers of this group, counted from 0."""
        return self.others[group - 1] if group else self


class EncodedInputs(NamedTuple):
    """Rows of an encoder's that the rows of a step attend to (cross-attention), on the device."""

    reads: BatchMeta
    """The step for that attention: each of its rows is a decode of its own, behind all rows that it sees."""
    heard: Tensor | None
    """bool [n] which rows see any; None: all do."""
    writes: BatchMeta
    """Where keys and values of `values` go."""
    values: Tensor | None
    """[k, hidden] rows whose keys and values the step computes and stores before it reads; None: there are none."""


class LatentCache(NamedTuple):
    """One layer's cache of latent attention; see `LatentOps.allocate`."""

    latents: Tensor
    rotated: Tensor
    """[..., rope_dim]: these may be the first elements of longer rows."""
    index_keys: Tensor | None = None
    """[..., dim] keys of an indexer, which are the others of those rows."""

    @staticmethod
    def of(cache: tuple[Tensor, Tensor], rope_dim: int) -> LatentCache:
        """What lies in a layer's cache."""
        latents, beside = cache
        rotated, index = beside[..., :rope_dim], beside[..., rope_dim:]
        return LatentCache(latents, rotated, index if index.shape[-1] else None)


class Routing(NamedTuple):
    """How a mixture's router chooses experts."""

    chosen: int
    """Experts of each row."""
    renormalised: bool
    """The chances of those are scaled to add up to 1."""
    scoring: Scoring = "softmax"
    """What makes scores of logits, which are the chances."""
    groups: int = 1
    """The experts are so many groups of neighbours."""
    chosen_groups: int = 1
    """Only experts of the best so many groups are chosen: of those whose best expert is the best; where there is a
    `bias`, whose best two are together."""
    bias: Tensor | None = None
    """float32 [E], added to the scores that choose, not to the chances."""
    scale: float = 1.0
    """What the chances are multiplied by in the end."""
    given: Tensor | None = None
    """int64 [n, chosen]: the experts of each row of a step; None: the best are."""

    @property
    def plain(self) -> bool:
        """Whether the greatest of a softmax choose."""
        chosen = self.scoring == "softmax" and self.groups == 1 and self.given is None
        return chosen and self.bias is None and self.scale == 1.0


class Picks(NamedTuple):
    """The experts that a router chose for n rows. A *pick* is one of a row's chosen experts."""

    chances: Tensor
    """float32 [n, chosen]"""
    experts: Tensor
    """Integers [n, chosen]: which of the packed experts each is; -1: none of them, as another rank has it."""


class LatentOps(Protocol):
    """The operations of multi-head latent attention; what `Ops` promises of tensors holds here."""

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """`weight` [H, out, in] made ready for `linear_of_heads`."""

    def linear_of_heads(self, x: Tensor, packed: PackedHeads) -> Tensor:
        """x [n, H, in] → each head's row times its own weight [n, H, out]."""

    def block_bytes(self, rank: int, beside: int) -> int:
        """Bytes that one block of latents takes in one layer."""

    def allocate(self, num_blocks: int, rank: int, beside: int) -> tuple[Tensor, Tensor]:
        """One layer's cache of multi-head latent attention: latents [num_blocks, 1, block_size, rank], and rotated keys
        with what lies behind them [num_blocks, 1, block_size, beside]; contents finite, else undefined."""

    def copier(self, caches: list[tuple[Tensor, Tensor]]) -> KvCopier:
        """Copies blocks of these caches, one pair for each layer, beside the other operations."""

    def rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        cache: LatentCache,
        *,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """q [n, H, nope + rope_dim] → the same with each head's last rope_dim elements rotated.

        latents [n, rank + rope_dim]: the first `rank` are RMS-normed by `norm` (float32 [rank]) and stored, the others
        are rotated and stored, both at `meta.slots`. Rotation and `cos_sin` [positions, rope_dim] are those of
        `Ops.rope_and_store`. Where the cache has an indexer's keys, a row's lies behind these [dim], and is stored once
        its last rope_dim elements are rotated. Both inputs may be overwritten.
        """

    def choose(
        self, q: Tensor, weights: Tensor, meta: BatchMeta, cos_sin: Tensor, cache: LatentCache, count: int
    ) -> Tensor:
        """The tokens that an indexer chooses: int64 [n, count] where they lie (as `meta.slots`), in rising order of
        positions. A row at position p sees min(p + 1, count) of them, which are the first; what is behind is defined
        in no way, but is a slot.

        q [n, heads, dim], whose last rope_dim elements are rotated here (and may be overwritten), weights [n, heads]:
        a token's score is the sum of max(0, q · its key) * weight over the heads, in float32. Of equal scores the
        earlier token's is better.
        """

    def attention(
        self, q: Tensor, cache: LatentCache, meta: BatchMeta, *, scale: float, chosen: Tensor | None = None
    ) -> Tensor:
        """Causal attention of q [n, H, rank + rope_dim] over the cached latents of each row's own sequence, or of those
        of them that `choose` has `chosen`.

        A token's key is its latent and its rotated key, its value is its latent: → [n, H, rank]. Scores are scaled.
        """


class StateOps(Protocol):
    """The operations of layers with states; what `Ops` promises of tensors holds here."""

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """Computes a layer between its projections, row by row → [n, H * P]. Sequences go on with `meta.states`, which
        are left as they are behind their last row. A sequence is one run of rows at most.

        A state space: projected [n, H * P + C + H]: gates, the convolution's inputs, time steps. With x, B and C the
        convolution's outputs through a SiLU and dt = softplus(its input + bias): state ← exp(dt * decay) * state +
        dt * x ⊗ B; a head's output is state · C + skip * x. Outputs times SiLU(gate) are RMS-normed in groups.

        A gated delta net: projected [n, H * P + C + 2 * H]: gates, the convolution's inputs, time steps, and how much
        is written. With v, k and q the convolution's outputs through a SiLU, k and q of length 1 and q divided by the
        square root of N, dt as above and b the sigmoid of its input: state ← exp(dt * decay) * state;
        state ← state + b * (v - state · k) ⊗ k; a head's output is state · q, RMS-normed, times SiLU(gate).

        A short convolution: projected [n, 3 * C]: a gate of its input, a gate of its output, its input. Not gated:
        [n, C], its input; its output is what its SiLU gives.

        A selective space, behind its convolution: projected [n, 3 * C + 2 * N]: gates, inputs x, B, C, time steps. With
        dt = softplus(time step + bias) of each channel: state ← exp(dt * decay) * state + dt * x * B; what it gives is
        state · C + skip * x, times SiLU(gate). `cache.windows` is not looked at.

        A recurrent unit, behind its convolution and its products: projected [n, 3 * C]: how much of an input is taken,
        how fast states are forgotten, inputs x. With i and r the sigmoids of the first two and a = exp(r * decay):
        state ← a * state + sqrt(1 - a²) * i * x, which is what it gives; of a sequence's first token i * x.
        `cache.windows` is not looked at.
        """


class ExpertPacker(Protocol):
    """Packs experts that come and go while steps are computed."""

    def pack_experts(
        self, gate_up: WeightStack, down: WeightStack, biases: ExpertBiases | None = None
    ) -> PackedExperts:
        """See `Ops.pack_experts`; on any one thread, beside steps. Their memory is taken for others once they go."""

    def arrange_experts(self, parts: Sequence[tuple[PackedExperts, int]]) -> PackedExperts:
        """Those of these numbers in what this packed, which is left as it is; nothing is copied."""


@runtime_checkable
class SupportsExpertMoves(Protocol):
    """Operations whose experts may be replaced between two steps."""

    def expert_packer(self) -> ExpertPacker:
        """What packs them for `Ops.mixture`."""


class Ops(Protocol):
    """The operations of one device at one dtype. Used from one thread; keep no reference to an activation.

    Weights are in the dtype the model runs in; norm weights are float32, and Gemma's (1 + w) is already added
    to them. The dtype of activations is the implementation's own choice, made by `embed`; whatever an operation
    gives may be handed to any other one. Every tensor is contiguous and n is never 0.
    """

    @property
    def name(self) -> str:
        """For logs and reports: "torch", "native"."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """`weight` [out, in] and `bias` [out] made ready for `linear`. May keep or copy them."""

    def pack_exactly(self, weight: Tensor, *, normed: bool = False) -> PackedLinear:
        """`weight` [out, in], float32, made ready for `linear` of float32 rows, or of rows as norms give them where
        they are `normed`: nothing is rounded, nor are products."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
        """`weight` made ready for `linear` in as many bits as it has, `bias` [out] beside it."""

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [n, in] → x @ weight.T + bias [n, out]."""

    def gated_linear(self, x: Tensor, packed: PackedLinear, kind: Activation) -> Tensor:
        """gated_act(linear(x, packed), kind) → [n, I]."""

    def low_rank_products(self, shape: LowRankShape) -> LowRankProducts:
        """Room for adapters of one matrix, all slots empty."""

    @property
    def embeds_codes(self) -> bool:
        """Whether `embed` reads packed int8 and int4."""

    def embed(self, ids: Tensor, table: EmbeddingTable) -> Tensor:
        """ids [n] int32 → [n, hidden]."""

    def empty_rows(self, rows: int, hidden: int) -> Tensor:
        """[rows, hidden] in the dtype that `embed` gives, to be filled by another rank's."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [n, hidden] / sqrt(mean(x²) + eps) * weight, computed in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). `x` and `residual` may be overwritten."""

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """gate_up [n, 2 * I] (gate, then up) → act(gate) * up [n, I]; see `Activation`."""

    def pack_experts(
        self, gate_up: WeightStack, down: WeightStack, biases: ExpertBiases | None = None
    ) -> PackedExperts:
        """`gate_up` [E, 2 * I, hidden] (gates, then ups) and `down` [E, hidden, I] made ready for `mixture`, each in as
        many bits as it has."""

    def choose_experts(self, logits: Tensor, routing: Routing) -> Picks:
        """A router's `logits` [n, E] → each row's experts by their numbers. Chances are made in float32."""

    def mixture(self, x: Tensor, picks: Picks, experts: PackedExperts, *, kind: Activation) -> Tensor:
        """x [n, hidden] → the sum of the outputs of its picks, each times its chance [n, hidden]; zeros of a row none
        of whose picks are here. An expert is down(act(gate) * up).
        """

    def sigmoid_gated(self, x: Tensor, logits: Tensor) -> Tensor:
        """x [n, width] times the sigmoid of logits [n, 1] or [n, width]; `x` may be overwritten."""

    @property
    def block_size(self) -> int:
        """Tokens of a block of keys and values."""

    def kv_block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes that one block of keys and values takes in one layer."""

    def allocate_kv(self, num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """One layer's key and value caches, [num_blocks, KV, block_size, D]; contents finite, else undefined.

        An implementation may lay a block out differently inside, as long as the first dimension is the block.
        """

    def kv_copier(self, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> KvCopier:
        """Copies blocks of these caches, one pair for each layer, beside the other operations."""

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
        """qkv [n, (H + 2 * KV) * D] → rotated queries [n, H, D]; keys and values go to `meta.slots`, and from there to
        those of `meta.copies`.

        Where `q_norm` and `k_norm` (float32 [D]) are given, each head is RMS-normed before it is rotated.
        Rotation pairs element i with i + D/2 (NeoX style). cos_sin: float32 [positions, D], D/2 cosines, then
        D/2 sines. `qkv` may be overwritten.
        """

    def copy_slots(self, k_cache: Tensor, v_cache: Tensor, copies: SlotCopies) -> None:
        """Makes `copies` of keys and values. On CPUs only."""

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
        """Causal attention of q [n, H, D] over the cached keys of each row's own sequence → [n, H * D].

        A row at position p sees the positions max(0, p - window + 1) to p, or to its `BatchMeta.lasts`. Scores are
        scaled, then, with `softcap`, capped to softcap * tanh(score / softcap). Head h reads key head h // (H / KV).

        `sinks` (float32 [H]): a score of each head that takes part in the softmax and has no value (attention sinks,
        arXiv:2309.17453, learned as gpt-oss has them). `alibi_slopes` (float32 [H]): -slope * (p - token) is added to
        a score once it is scaled and capped (ALiBi, arXiv:2108.12409). `distance_biases` (float32 [H, distances]): so
        is what a head has learned of the distance p - token, or of the greatest that there is (T5, arXiv:1910.10683).
        On CPUs only.
        """

    @property
    def latents(self) -> LatentOps:
        """The operations of multi-head latent attention."""

    @property
    def states(self) -> StateOps:
        """The operations of layers with states."""

    def verify(self, attempt: DraftAttempt) -> Tensor:
        """Which drafts are accepted: int32 [Q + R], how many tokens each sequence gains, its accepted drafts and one
        more; and behind those what was drawn for each row. See `speculation.verification`.
        """
