"""A rank's weights, layer by layer, and what an MLP or a mixture of experts makes of rows. Knows tensors, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from services.worker.distributed.row_exchange import RoutedRows, RowExchange
from services.worker.models.config import ResidualScales, SkipConnections
from services.worker.models.expert_parallel.local_experts import RankExperts, count_picks
from services.worker.models.layer_parts.streams import GatedMixing, GramWeights, StreamMixing
from services.worker.ops.interface import (
    Activation,
    BatchMeta,
    EmbeddingTable,
    Ops,
    PackedHeads,
    PackedLinear,
    Picks,
    Routing,
    StateMixer,
)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One rank's columns of an MLP."""

    gate_up: PackedLinear
    down: PackedLinear
    scales: tuple[Tensor, float] | None = None
    """What gates and ups [2 * I], and the output, are multiplied by."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row goes through beside those that are chosen for it."""

    mlp: DenseMlp
    gate: PackedLinear | None
    """[1, hidden]: the sigmoid of its product is how much of the MLP's output is taken; None: all of it."""
    activation: Activation | None = None
    """Where MLPs have another."""


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """One rank's columns of every expert, or all columns of some, and the whole router: every rank chooses the same
    experts."""

    router: PackedLinear
    experts: RankExperts
    routing: Routing
    shared: SharedExpert | None
    counts: Tensor | None = None
    """int64 [E]: how often each was picked, added to in every step; None: it is not counted."""
    by_token: Tensor | None = None
    """int64 [vocab, chosen]: the experts of each token; None: the router chooses them."""

    activation: Activation | None = None
    """Of the experts, where MLPs have another."""

    def of_tokens(self, ids: Tensor) -> MixtureMlp:
        """The same for rows of these tokens, ids [n]."""
        if self.by_token is None:
            return self
        return replace(self, routing=self.routing._replace(given=self.by_token.index_select(0, ids)))


@dataclass(frozen=True, slots=True)
class LinearMlp:
    """A matrix in the place of an MLP or of attention; of its inputs one rank's."""

    matrix: PackedLinear
    columns: tuple[int, int]
    """From and to."""


Mlp = DenseMlp | MixtureMlp | LinearMlp


KvCaches = list[tuple[Tensor, Tensor]]
"""For each layer, its keys and its values by block; or its windows and its states by slot (`StateCache`)."""


class PositionScale(NamedTuple):
    """What heads' queries are multiplied by at a position p: weight · ln(p + 1) + bias."""

    weight: Tensor
    bias: Tensor
    """float32 [H] each."""

    def of(self, positions: Tensor) -> Tensor:
        """positions [n] → [n, H, 1]."""
        logarithms = (positions + 1).float().log().unsqueeze(1)
        return torch.addcmul(self.bias, logarithms, self.weight).unsqueeze(2)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What latent attention has beside the usual one's weights, for one rank's heads."""

    q_norm: Tensor | None
    q_up: PackedLinear | None
    """The latent of a row's queries is normed, and made its queries; None: they are there already."""
    kv_norm: Tensor
    keys_up: PackedHeads
    """[H, kv_rank, nope_dim]: what a query is multiplied with, in place of its keys' latents with the other side of
    it."""
    values_up: PackedHeads
    """[H, value_dim, kv_rank]: the same for values, behind attention."""
    index: IndexWeights | None = None
    """Where an indexer chooses what is attended to; None: there is none, or the layer before has it for both."""
    rotated: bool = True
    """Else `keys_up` has all elements of a query, and the shared key is zeros."""
    latents: Literal["own", "lent", "borrowed"] = "own"
    """Whether layers behind it, with `rotated` as this has it, attend to its latents, or it to those of such a one."""
    by_position: PositionScale | None = None
    """What its heads' queries are multiplied by; None: nothing."""


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """A layer's indexer, whole on every rank. Of its queries and keys the last rope_dim elements are rotated."""

    inputs: PackedLinear
    """[dim + heads, hidden]: a row's key, and how much each head's score counts."""
    key_norm: tuple[Tensor, Tensor]
    """float32 [dim] each: weight and bias of the layer norm of keys."""
    q_up: PackedLinear
    """[heads * dim, q_rank]: the queries, of the normed latent of a row's queries; or [heads * dim, hidden] of the row
    itself."""
    row_norm: tuple[Tensor, Tensor] | None = None
    """float32 [hidden] each: weight and bias of the layer norm of that row."""
    by_position: PositionScale | None = None
    """See `LatentWeights`; of the indexer's heads."""
    pool_bias: Tensor | None = None
    """float32 [pool, dim] of an indexer of pools, of which `inputs` has [dim] more behind the keys: see `PoolStep`."""


class BlockIndexWeights(NamedTuple):
    """A layer's indexer of blocks: of the heads whose key/value heads a rank has, and the whole key."""

    inputs: PackedLinear
    """[(heads + 1) * dim, hidden]: the heads' queries, then the key."""
    q_norm: Tensor
    k_norm: Tensor
    """float32 [dim]"""


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """What makes one kind of entries of a layer's tokens, whole on every rank."""

    bias: Tensor
    """float32 [rate, width]: is added to how much a token counts, by its place in its window."""
    norm: Tensor
    """float32 [dim] of entries."""


@dataclass(frozen=True, slots=True)
class EntryWeights:
    """What a layer that compresses its keys has for its entries."""

    inputs: PackedLinear
    """What entries are made of; see `CompressedConfig.made_of_row`. Behind that, how much each head of the indexer
    counts."""
    keys: CompressorWeights
    index: CompressorWeights | None
    """Of the keys that an indexer chooses by; None: all entries are attended to."""
    index_q_up: PackedLinear | None
    """[heads * dim, q_rank]: the indexer's queries."""


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """What attention over compressed keys has beside the usual one's weights, for one rank's heads."""

    q_norm: Tensor
    q_up: PackedLinear
    """[H * D, q_rank]"""
    key_norm: Tensor
    grouped: PackedHeads
    """[groups, output_rank, heads of a group * D] of this rank's groups: what attention's output goes through before
    the last matrix."""
    entries: EntryWeights | None


@dataclass(frozen=True, slots=True)
class SelectiveWeights:
    """What a Mamba-1 mixer has between its convolution and its states, for one rank's C channels."""

    made: PackedLinear
    """[R + 2 * N, C]: what time steps are made of, B and C; a sum over ranks."""
    steps: PackedLinear
    """[C, R]: time steps, before their bias."""
    sizes: tuple[int, int, int]
    """R, N, N."""
    norms: tuple[Tensor, Tensor, Tensor] | None
    """Of these three parts."""
    eps: float


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """What a recurrent unit has between its convolution and its states, for one rank's C channels."""

    blocks: tuple[PackedLinear, ...]
    """[2 * C / B, C / B] of each of B blocks of channels: how much of an input is taken, and how fast states are
    forgotten."""


@dataclass(frozen=True, slots=True)
class LowRankInputs:
    """What the checkpoint adds to products of a row, for one rank's outputs."""

    down: PackedLinear
    """[parts * rank, inputs]"""
    ups: tuple[PackedLinear, ...]
    """[outputs, rank] of each part."""


@dataclass(frozen=True, slots=True)
class DepthWeights:
    """What a layer has of its own beside a block that several share."""

    output: PackedLinear
    """[hidden, hidden], whole on every rank: what of the block's output is added to what the next layer reads."""
    qkv: LowRankInputs | None
    gate_up: LowRankInputs


@dataclass(frozen=True, slots=True)
class LowRankGates:
    """What a delta net whose keys' elements are forgotten one by one has between a row's projection and its states, for
    one rank's H heads."""

    rates: PackedLinear
    """[H * N, R]: time steps, before their bias, of R numbers of the row."""
    outputs: PackedLinear
    """[H * P, R]: gates, of R others."""
    rank: int
    """R"""


class FollowingWeights(NamedTuple):
    """See `FollowingBlock`."""

    norm: Tensor
    """float32 [hidden]"""
    mlp: DenseMlp | LinearMlp


class LayerMixer(NamedTuple):
    """What a layer has in front of its MLP; see `LayerWeights`."""

    inputs: PackedLinear
    output: PackedLinear
    cos_sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    latent: LatentWeights | None = None
    mixer: StateMixer | None = None
    steps: PackedLinear | None = None
    selective: SelectiveWeights | RecurrentWeights | None = None
    gates: LowRankGates | None = None
    gate: PackedLinear | None = None
    split_norm: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    row_norms: tuple[Tensor, Tensor] | None = None
    compressed: CompressedWeights | None = None
    block_index: BlockIndexWeights | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One rank's weights of one layer. Norm weights are float32; of layer norms [2, hidden], weight and bias."""

    input_norm: Tensor | None
    """None: the layer reads rows as they are."""
    qkv: PackedLinear
    """What a row is multiplied with: queries, keys and values. Latent: queries, or their latent, then the latent and
    the shared key that are cached. A mixer with states: see `StateOps.mix`."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | None
    """None: the layer has none."""
    mlp_post_norm: Tensor | None
    cos_sin: Tensor
    window: int | None
    latent: LatentWeights | None = None
    mixer: StateMixer | None = None
    """Layers with states: it is in the place of attention."""
    steps: PackedLinear | None = None
    """The last of what a mixer's rows are projected to, where it is kept in another way; None: it is part of `qkv`."""
    selective: SelectiveWeights | RecurrentWeights | None = None
    """Of a Mamba-1 mixer, or of a recurrent unit."""
    gates: LowRankGates | None = None
    """Of Kimi Delta Attention, whose rows are projected to what its convolution sees, what rates and gates are made of,
    and how much is written."""
    gate: PackedLinear | None = None
    """Gated attention, and lightning attention: the sigmoid of a row times this [H * D, hidden] is how much of
    attention's output is taken. Latent attention with gates: [H * G, hidden], G of each head."""
    split_norm: Tensor | None = None
    """[H * P] this rank's part of a mixer's norm that goes over all ranks' heads; None: the mixer has its norm, if
    any."""
    sinks: Tensor | None = None
    """float32 [H]: see `Ops.paged_attention`."""
    slopes: Tensor | None = None
    """float32 [H]: its `alibi_slopes`."""
    beside: bool = False
    """See `LayerConfig`."""
    row_norms: tuple[Tensor, Tensor] | None = None
    """This rank's parts of the norms of all heads' queries, and of all heads' keys."""
    scales: tuple[Tensor, float] | None = None
    """What each output of `qkv`, and those of `output`, are multiplied by."""
    depth: DepthWeights | None = None
    """The layer is a shared block at one depth; what it reads is twice as wide. None: it has weights of its own."""
    residual: tuple[ResidualScales, ResidualScales] | None = None
    """See `LayerConfig`."""
    compressed: CompressedWeights | None = None
    block_index: BlockIndexWeights | None = None
    """None: the layer attends to all that it sees."""
    streams: tuple[StreamMixing | GatedMixing, StreamMixing | GatedMixing] | None = None
    """Hyper-connections: those around attention, and those around the MLP."""
    grams: GramWeights | None = None
    """What is added to the streams first."""
    skips: SkipConnections | None = None
    """See `LayerConfig`."""
    entry_norm: Tensor | None = None
    """What the rows are normed by before the layer reads them and adds to them."""
    following: tuple[FollowingWeights, ...] = ()
    """What comes behind attention, and the MLP if there is one."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One rank's weights of its stage's layers. Embedding and head are shares of words, padded alike on all ranks."""

    embedding: EmbeddingTable | None
    """On the first stage."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor | None
    """The last norm; None on every stage but the last."""
    head: PackedLinear | None
    first_layer: int = 0
    """Which of the model's layers the first of `layers` is."""
    streams: StreamMixing | GatedMixing | None = None
    """What makes one row of the streams behind the last layer; None on every stage but the last."""


Rows = tuple[int, int] | Tensor
"""Outputs of a module that a rank has: from and to, or the index of each, in its order."""


class NamedProduct(NamedTuple):
    """A matrix that adapters may change, of a model whose modules are known by their names."""

    packed: PackedLinear
    outputs: int
    inputs: int
    """Of the whole module."""
    rows: Rows
    """Its outputs that this rank has."""
    columns: tuple[int, int]
    """Its inputs that this rank has, from and to."""


class NamedModules(NamedTuple):
    """The modules that adapters may change, by their names."""

    products: Mapping[str, NamedProduct]
    elsewhere: tuple[str, ...] = ()
    """Beginnings of the names of modules that other stages have."""
    beside: frozenset[str] = frozenset()
    """Modules that are given rows beside prompts (`BatchMeta.encoded`) in place of a step's own."""
    rename: Callable[[str], str] | None = None
    """Adapters' names of them to these; None: they are the same."""

    def own_name(self, name: str) -> str:
        """Of a module or tensor of an adapter."""
        return name if self.rename is None else self.rename(name)

    def is_elsewhere(self, name: str) -> bool:
        """Whether another stage has the module, or tensor, of this name."""
        return f"{name}.".startswith(self.elsewhere)


class ForwardPass(Protocol):
    """What runs a whole decoder: `Decoder.forward`, or decodes that are replayed from graphs."""

    def __call__(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """What `Decoder.forward` promises."""


def apply_mlp(ops: Ops, mlp: Mlp, x: Tensor, activation: Activation) -> Tensor:
    """x [n, hidden] → [n, hidden], to be summed over the ranks."""
    match mlp:
        case DenseMlp(scales=(ups, down)):
            gated = ops.gated_act(ops.linear(x, mlp.gate_up).mul_(ups), activation)
            return ops.linear(gated, mlp.down).mul_(down)
        case DenseMlp():
            return ops.linear(ops.gated_linear(x, mlp.gate_up, activation), mlp.down)
        case MixtureMlp():
            return _apply_mixture(ops, mlp, x, activation)
        case LinearMlp(columns=(first, end)):
            return ops.linear(x[:, first:end].contiguous(), mlp.matrix)
        case _:
            assert_never(mlp)


def _apply_mixture(ops: Ops, mixture: MixtureMlp, x: Tensor, activation: Activation) -> Tensor:
    mixed = mixed_rows(ops, mixture, x, activation)
    return mixed if mixture.shared is None else mixed.add_(shared_expert_rows(ops, mixture.shared, x, activation))


def mixed_rows(ops: Ops, mixture: MixtureMlp, x: Tensor, activation: Activation) -> Tensor:
    """x [n, hidden] → what this rank's experts make of the rows that pick them, [n, hidden]."""
    logits, picks = route(ops, mixture, x)
    experts = mixture.experts
    if experts.local is not None:
        picks = experts.local.own_picks(picks, logits)
    return ops.mixture(x, picks, experts.packed, kind=mixture.activation or activation)


def route(ops: Ops, mixture: MixtureMlp, x: Tensor) -> tuple[Tensor, Picks]:
    """x [n, hidden] → the router's logits [n, E] and what it picks, which is counted where picks are."""
    logits, picks = _choices(ops, mixture, x)
    if mixture.counts is not None:
        count_picks(mixture.counts, picks.experts)
    return logits, picks


def _choices(ops: Ops, mixture: MixtureMlp, x: Tensor) -> tuple[Tensor, Picks]:
    logits = ops.linear(x, mixture.router)
    return logits, ops.choose_experts(logits, mixture.routing)


def dispatch_rows(
    ops: Ops, mixture: MixtureMlp, x: Tensor, exchange: RowExchange, counts: Sequence[int], *, counted: bool = True
) -> None:
    """x [n, hidden], this rank's or engine's rows, on their way to whole experts; `counts` as `RowExchange.start` takes
    them. What they pick is counted unless not `counted`."""
    logits, picks = (route if counted else _choices)(ops, mixture, x)
    local = mixture.experts.local
    assert local is not None, "experts are spread over ranks"
    places = local.places(picks, logits)
    exchange.start(RoutedRows(x, places, picks.chances), local.holders_of(places), counts)


def mixed_arrivals(
    ops: Ops, mixture: MixtureMlp, exchange: RowExchange, activation: Activation
) -> tuple[RoutedRows, Tensor]:
    """The rows that have come, and what this rank's experts make of them: for `RowExchange.combine`."""
    met, local = exchange.arrived(), mixture.experts.local
    assert local is not None, "experts are spread over ranks"
    here = Picks(met.chances, local.own_numbers(met.picks.long()).to(met.picks.dtype))
    return met, ops.mixture(met.rows, here, mixture.experts.packed, kind=mixture.activation or activation)


def mix_shared_rows(
    ops: Ops,
    mixture: MixtureMlp,
    x: Tensor,
    exchange: RowExchange,
    counts: Sequence[int],
    activation: Activation,
) -> Tensor:
    """x [n, hidden], this rank's rows of a step that all ranks of a stage share → what the mixture makes of them.
    `exchange` brings all rows to all, and `counts` are each rank's. What all rows pick is counted."""
    dispatch_rows(ops, mixture, x, exchange, counts, counted=False)
    met, mixed = mixed_arrivals(ops, mixture, exchange, activation)
    if mixture.counts is not None and mixture.experts.local is not None:
        count_picks(mixture.counts, mixture.experts.local.experts_of(met.picks))
    if mixture.shared is not None:
        mixed.add_(shared_expert_rows(ops, mixture.shared, met.rows, activation))
    return exchange.combine(mixed)


def shared_expert_rows(ops: Ops, shared: SharedExpert, x: Tensor, activation: Activation) -> Tensor:
    """x [n, hidden] → this rank's part of what the expert of all rows makes of them, [n, hidden]."""
    output = apply_mlp(ops, shared.mlp, x, shared.activation or activation)
    if shared.gate is not None:
        output = ops.sigmoid_gated(output, ops.linear(x, shared.gate))
    return output
