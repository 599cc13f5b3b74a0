"""A whole forward pass in one call of the library: for one rank, where nothing is exchanged between operations.

It computes what the decoder computes by single operations, bit for bit where the model has no post norms, and saves
their overhead: about seventy calls and as many allocations and wake-ups for each step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig, ResidualScales
from services.worker.models.rope import query_scales
from services.worker.models.weights import (
    DecoderWeights,
    DenseMlp,
    FollowingWeights,
    KvCaches,
    LayerWeights,
    LinearMlp,
    MixtureMlp,
    Mlp,
    RecurrentWeights,
    SelectiveWeights,
)
from services.worker.ops.interface import BatchMeta, Ops, PackedLinear, RecurrentUnit
from services.worker.ops.low_rank import LowRankProducts
from services.worker.ops.native import library
from services.worker.ops.native.kernels import PackedMatrix, address_of, batch_of, native_activation, zeroed
from services.worker.ops.native.matrix_stacks import MatrixStack, matrices_of, rule_of
from services.worker.ops.native.native_latents import MAX_HEAD_DIM
from services.worker.ops.native.native_low_rank import NativeLowRank
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.native.native_states import described_mixer


class EagleProjection(NamedTuple):
    """What an EAGLE layer has beside a decoder's weights."""

    joined: PackedLinear
    """[hidden, 2 * hidden]: a row begins as this of its token's embedding and of the feature given with it."""
    has_input_norm: bool


class Eagle3Inputs(NamedTuple):
    """What an EAGLE-3 layer has beside a decoder's weights."""

    embedding_norm: Tensor
    given_norm: Tensor
    norms_residual: bool
    """Whether its residual is the normed row that is given, or that row itself."""
    tokens: Tensor | None
    """int32 [words]: the token that each word of its head is; None: they are the same."""


class NativeAdapters:
    """What adapters add to the products of a whole pass."""

    def __init__(self, weights: DecoderWeights, products: Mapping[int, LowRankProducts]) -> None:
        """`products`: by the `id` of the matrix beside which they are."""
        matrices: list[PackedLinear | None] = []
        for layer in weights.layers:
            between = layer.selective
            assert not isinstance(between, RecurrentWeights), "which no call of the library knows"
            steps, made = (layer.steps, None) if between is None else (between.steps, between.made)
            of_layer = [layer.qkv, steps, made, layer.gate, layer.output, *_mlp_matrices(layer.mlp)]
            assert len(of_layer) == library.ADAPTED_OF_LAYER
            matrices += of_layer
            for _, mlp in layer.following:
                output = mlp.matrix if isinstance(mlp, LinearMlp) else None
                matrices += [None, None, None, None, output, *_mlp_matrices(mlp)]
        found = [products.get(id(matrix)) for matrix in (*matrices, weights.head)]
        self._products = found  # which own what the tables point to
        pointer = ctypes.POINTER(library.LowRankTable)
        self._tables = (pointer * len(found))(
            *(ctypes.pointer(each.table) if isinstance(each, NativeLowRank) else pointer() for each in found)
        )

    def of(self, slots: Tensor, logits_slots: Tensor) -> library.Adapters:
        """For a pass whose rows have the adapters of `slots` (int32, -1: none), those whose logits are wanted of
        `logits_slots`."""
        return library.Adapters(self._tables, slots.data_ptr(), logits_slots.data_ptr())


class NativeDecoder:
    """Holds the weights, and the library's workspace, which grows to the largest batch. Used from one thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: NativeOps,
        eagle: EagleProjection | Eagle3Inputs | None = None,
    ) -> None:
        """`weights` must be whole, and packed by `ops`, which also made the caches. `eagle`: the layer is EAGLE's or
        EAGLE-3's, and runs by `predict_features`."""
        self._ops = ops
        self._kernels = kernels = ops.kernels
        self._weights = weights
        self._vocab_size, self._hidden = config.vocab_size, config.hidden_size
        assert weights.embedding is not None, "the model is whole"
        assert weights.head is not None
        # The embedding is codes, or a bfloat16 or float32 table for the library; a float16 one is converted.
        numbers = weights.embedding if isinstance(weights.embedding, Tensor) else None
        self._embedding = None if numbers is None else numbers.to(ops.dtype).contiguous()
        scale = config.embedding_scale if config.scales_inputs else None
        self._input_scale = None if scale is None or numbers is None else float(numbers.new_tensor(scale))
        # Which what is next points to.
        self._mixtures = [_mixture(config, layer) for layer in weights.layers]
        self._mixers = [_states(layer) for layer in weights.layers]
        self._latents = [_latent(config, layer) for layer in weights.layers]
        each_layer = list(map(_layer, weights.layers, self._mixtures, self._mixers, self._latents))
        self._parts = [1 + len(layer.following) for layer in weights.layers]
        """How many layers of the library a layer is."""
        parts = [
            [first, *map(_following, layer.following)] for first, layer in zip(each_layer, weights.layers, strict=True)
        ]
        layers = (library.DecoderLayer * sum(self._parts))(*chain.from_iterable(parts))
        described = self._config_struct(config, numbers)
        described.layers = len(layers)
        if not isinstance(weights.embedding, Tensor):
            described.coded_embedding = _linear(weights.embedding)
        described.final_norm = address_of(weights.final_norm)
        described.head = _linear(weights.head)
        described.words = self._words = config.vocab_size
        if isinstance(eagle, EagleProjection):
            described.joined = _linear(eagle.joined)
        elif eagle is not None:
            described.embedding_norm, described.given_norm = map(address_of, eagle[:2])
            described.norms_residual, described.tokens = eagle.norms_residual, address_of(eagle.tokens)
            described.words = self._words = config.vocab_size if eagle.tokens is None else len(eagle.tokens)
        if eagle is not None and not (isinstance(eagle, EagleProjection) and eagle.has_input_norm):
            layers[0].input_norm = None
        self._eagle = eagle
        self._decoder: int = kernels.library.baton_decoder(kernels.pool, ctypes.byref(described), layers)
        self._caches: tuple[KvCaches, object, object] | None = None
        self._logits = torch.empty(0)
        self._group_of: ctypes.Array[ctypes.c_int] | None = None
        self._taps: ctypes.Array[ctypes.c_int] | None = None

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """See `Decoder.use_taps`."""
        self._taps = (ctypes.c_int * len(layers))(*layers)

    def use_groups(self, group_of: tuple[int, ...]) -> None:
        """See `CausalLm.use_groups`; `group_of`: each layer's group."""
        groups = [group for group, parts in zip(group_of, self._parts, strict=True) for _ in range(parts)]
        self._group_of = (ctypes.c_int * len(groups))(*groups)

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._kernels.library.baton_decoder_free(self._decoder)

    @staticmethod
    def computes(meta: BatchMeta) -> bool:
        """Whether a step is computed in one call: not where sequences with states have drafts, whose states are put
        back behind each layer."""
        return meta.states is None or meta.states.trial is None

    def forward(
        self,
        ids: Tensor,
        meta: BatchMeta,
        caches: KvCaches,
        features: Tensor | None = None,
        *,
        given: Tensor | None = None,
        wants_logits: bool = True,
        adapters: library.Adapters | None = None,
    ) -> Tensor | None:
        """See `Decoder.forward`; the logits are overwritten by the next call. `given` [n, hidden]: the features that an
        EAGLE layer begins with. `adapters`: which the rows have, but for those of the embedding. Raises IndexError
        where a token is outside of the vocabulary."""
        assert self.computes(meta), "drafts of sequences with states are mixed elsewhere"
        rows = len(meta.logits_rows) if wants_logits else 0
        request = self._request(ids, meta, caches, features, given, rows)
        if adapters is not None:
            request.adapters = ctypes.pointer(adapters)
        if meta.inputs is not None:
            given_rows, values = meta.inputs.rows, meta.inputs.values
            levels = values.shape[1] // self._hidden - 1
            if self._input_scale is not None:  # in their own type, as by `InputRows.put_into`; what joins later is not
                begun = values[:, : self._hidden] * self._input_scale
                values = torch.cat((begun, values[:, self._hidden :]), dim=1)
            values = values.float().contiguous()
            inputs = library.Inputs(len(given_rows), given_rows.data_ptr(), values.data_ptr(), levels)
            request.inputs = ctypes.pointer(inputs)
        if not self._kernels.library.baton_decoder_run(self._decoder, ctypes.byref(request)):
            raise IndexError(f"a token id is outside of the vocabulary of {self._vocab_size}")
        return self._logits[:rows] if rows else None

    def predict_features(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `DraftHead.predict` of `services.worker.speculation.drafter`."""
        features, given = torch.empty(given.shape), given.float().contiguous()
        return features, self.forward(ids, meta, caches, features, given=given, wants_logits=wants_logits)

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor | None = None
    ) -> Tensor:
        """A whole chain of greedy drafts: first [P] int32, the drafts that it begins with → [steps + 1, P] those and
        what follows them. `meta` is that of the first step's P rows; each step's positions, slots and context lengths
        lie `stride` numbers behind those of the step before. `given` [P, hidden]: the features that EAGLE begins with.

        Raises IndexError where a token is outside of the vocabulary."""
        ids = torch.empty(steps + 1, len(first), dtype=torch.int32)
        ids[0] = first
        features = None if given is None else given.float().clone()
        request = self._request(first, meta, caches, features, features, len(first))
        if not self._kernels.library.baton_decoder_draft_on(
            self._decoder, ctypes.byref(request), steps, stride, ids.data_ptr()
        ):
            raise IndexError(f"a token id is outside of the vocabulary of {self._vocab_size}")
        return ids

    def decode_call(self, caches: KvCaches) -> library.NativeDecode:
        """What steps of decodes are asked with (`Decode` of decoder.h), without their rows."""
        keys, values = self._addresses(caches)
        call = library.NativeDecode()
        call.keys, call.values = keys, values
        if self._group_of is not None:
            call.group_of = ctypes.addressof(self._group_of)
        return call

    def decode(self, call: library.NativeDecode) -> None:
        """Computes a step of decodes, and draws unless it halts. Raises IndexError as `forward`."""
        if not self._kernels.library.baton_decoder_decode(self._decoder, ctypes.byref(call)):
            raise IndexError(f"a token id is outside of the vocabulary of {self._vocab_size}")

    def finish(self, call: library.NativeDecode) -> None:
        """Draws what is left of a step that halts."""
        self._kernels.library.baton_decoder_finish(self._decoder, ctypes.byref(call))

    def accept(self, call: library.NativeDecode) -> None:
        """Sequences hold what was drawn for them, as `call` has it; behind a `decode` that left rows."""
        self._kernels.library.baton_accept(ctypes.byref(call))

    def room_for_logits(self, rows: int) -> Tensor:
        """[rows or more, words] what passes write to; another one where more rows are asked for."""
        if len(self._logits) < rows:  # kept, for fresh memory costs a page fault for each 4 kB
            self._logits = zeroed(rows * self._words * 4).view(torch.float32).view(rows, self._words)
        return self._logits

    def _addresses(self, caches: KvCaches) -> tuple[object, object]:
        """Where keys and values of each layer are."""
        if self._caches is None or self._caches[0] is not caches:
            # Those behind attention have none; they are given its.
            each = [cache for cache, parts in zip(caches, self._parts, strict=True) for _ in range(parts)]
            array = ctypes.c_void_p * len(each)
            keys, values = (array(*(cache[half].data_ptr() for cache in each)) for half in range(2))
            self._caches = (caches, keys, values)
        return self._caches[1:]

    def _request(
        self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None, given: Tensor | None, rows: int
    ) -> library.Forward:
        """What the library is asked to compute, with logits of so many rows."""
        request = library.Forward(
            *(ids.data_ptr(), batch_of(meta), meta.logits_rows.data_ptr(), rows, *self._addresses(caches)),
            self.room_for_logits(rows).data_ptr(),
            None if features is None else features.data_ptr(),
            *((None, 0) if self._taps is None or features is None else (self._taps, len(self._taps))),
            None if given is None else given.data_ptr(),
        )
        if meta.states is not None:
            request.state_slots = meta.states.slots.data_ptr()
        if self._group_of is not None:
            each = [batch_of(meta), *map(batch_of, meta.others)]
            request.group_of, request.batches = self._group_of, (library.NativeBatch * len(each))(*each)
        return request

    def _config_struct(self, config: ModelConfig, embedding: Tensor | None) -> library.DecoderConfig:
        scale = config.embedding_scale
        rounded = 1.0 if scale is None or embedding is None else float(embedding.new_tensor(scale))
        return library.DecoderConfig(
            number=self._ops.number,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_bits=library.page_bits(self._ops.block_size),
            cache_code=self._ops.cache_code,
            vocab=config.vocab_size,
            activation=native_activation(config.activation),
            eps=config.norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            embedding_scale=rounded,
            residual_scale=1.0 if config.residual_scale is None else config.residual_scale,
            residual_normed=config.residual_normed,
            logits_divisor=1.0 if config.logits_divisor is None else config.logits_divisor,
            embedding=address_of(self._embedding),
            growth=self._growth_struct(config),
        )

    def _growth_struct(self, config: ModelConfig) -> library.QueryGrowth:
        if (steps := config.query_steps) is None:
            return library.QueryGrowth()
        # What they are multiplied by is of their kind, which are floats where attention is latent.
        scales = query_scales(steps.beta, steps.length, self._weights.layers[0].cos_sin)
        self._growth = scales if config.latent is not None else scales.to(self._ops.dtype).float()
        return library.QueryGrowth(scales=self._growth.data_ptr(), length=steps.length)


def native_decoder(
    config: ModelConfig, weights: DecoderWeights, ops: Ops, eagle: EagleProjection | Eagle3Inputs | None = None
) -> NativeDecoder | None:
    """The whole forward pass in C++ where `ops` are the native ones; None elsewhere, and for a share of the experts,
    attention and mixers that the library does not know, recurrent units, sparse attention, gates of elements of latent
    attention, drafters' layers with that, post norms among multipliers, layers that norm what they give alone, layer
    norms, shared blocks, rows that skip layers or go through them again, parts of images' rows that join elsewhere than
    behind the first layers.

    For a rank that computes alone: between the operations of several, tensors are exchanged."""
    if not isinstance(ops, NativeOps):
        return None
    if config.latent is not None and (eagle is not None or config.latent.rope_dim > MAX_HEAD_DIM):
        return None
    if config.latent is not None and (config.latent.index is not None or config.latent.gates == "elements"):
        return None
    mixers = [layer.mixer for layer in weights.layers if layer.mixer is not None]
    if any(isinstance(each, RecurrentUnit) or described_mixer(each) is None for each in mixers):
        return None
    if config.level_layers or (config.multipliers is not None and config.post_norms):
        return None
    if config.layer_norms or config.shared is not None or any(each.norms_outputs for each in config.layers):
        return None
    if any(layer.skips is not None or layer.entry_norm is not None for layer in weights.layers):
        return None
    mixtures = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MixtureMlp)]
    if any(each.experts.local is not None for each in mixtures):
        return None
    return NativeDecoder(config, weights, ops, eagle)


def _mlp_matrices(mlp: Mlp | None) -> tuple[PackedLinear | None, PackedLinear | None, PackedLinear | None]:
    """Gates and ups, and downs, that every row goes through, and the gate of what they make; None: there is none."""
    match mlp:
        case DenseMlp():
            return mlp.gate_up, mlp.down, None
        case MixtureMlp() if mlp.shared is not None:
            shared = mlp.shared
            return shared.mlp.gate_up, shared.mlp.down, shared.gate
        case _:
            return None, None, None


def _mixture(config: ModelConfig, layer: LayerWeights) -> library.DecoderMixture | None:
    """Points to the layer's tensors."""
    mixture = layer.mlp
    if not isinstance(mixture, MixtureMlp):
        return None
    experts = matrices_of(mixture.experts.packed, mixture.activation or config.activation)
    of_shared = None if mixture.shared is None else mixture.shared.activation
    return library.DecoderMixture(
        router=_linear(mixture.router),
        rule=rule_of(mixture.routing, experts.count),
        experts=experts,
        shared_gate=_linear(_mlp_matrices(mixture)[2]),
        shared_activation=native_activation(of_shared or config.activation),
        counts=address_of(mixture.counts),
    )


def _states(layer: LayerWeights) -> library.DecoderStates | None:
    """Points to the layer's tensors."""
    mixer = None if layer.mixer is None else described_mixer(layer.mixer)
    if mixer is None:
        return None
    own = layer.selective
    between = ctypes.pointer(_selective(own)) if isinstance(own, SelectiveWeights) else None
    gates = layer.gates
    made = None if gates is None else library.DecoderGates(_linear(gates.rates), _linear(gates.outputs))
    return library.DecoderStates(
        mixer=mixer,
        steps=_linear(layer.steps),
        selective=between,
        gates=None if made is None else ctypes.pointer(made),
        norm=address_of(layer.split_norm),
        eps=mixer.eps,
    )


def _selective(between: SelectiveWeights) -> library.DecoderSelective:
    """Points to these tensors."""
    norms = between.norms or (None, None, None)
    return library.DecoderSelective(
        made=_linear(between.made),
        steps=_linear(between.steps),
        norms=(ctypes.c_void_p * 3)(*map(address_of, norms)),
        eps=between.eps,
    )


def _latent(config: ModelConfig, layer: LayerWeights) -> library.DecoderLatent | None:
    """Points to the layer's tensors."""
    sizes, latent = config.latent, layer.latent
    if sizes is None or latent is None:
        return None
    keys_up, values_up = latent.keys_up, latent.values_up
    assert isinstance(keys_up, MatrixStack)
    assert isinstance(values_up, MatrixStack)
    return library.DecoderLatent(
        rank=sizes.kv_rank,
        nope_dim=sizes.nope_dim,
        rope_dim=sizes.rope_dim,
        value_dim=sizes.value_dim,
        q_norm=address_of(latent.q_norm),
        q_up=_linear(latent.q_up),
        kv_norm=address_of(latent.kv_norm),
        keys_up=keys_up.linears,
        values_up=values_up.linears,
        eps=sizes.norm_eps,
    )


def _layer(
    layer: LayerWeights,
    mixture: library.DecoderMixture | None,
    states: library.DecoderStates | None,
    latent: library.DecoderLatent | None,
) -> library.DecoderLayer:
    gate_up, down, _ = _mlp_matrices(layer.mlp)
    inputs, output = layer.scales or (None, 1.0)
    before, behind = layer.residual or (ResidualScales(), ResidualScales())
    ups, down_scale = (layer.mlp.scales if isinstance(layer.mlp, DenseMlp) else None) or (None, 1.0)
    return library.DecoderLayer(
        input_norm=address_of(layer.input_norm),
        q_norm=address_of(layer.q_norm),
        k_norm=address_of(layer.k_norm),
        attention_post_norm=address_of(layer.attention_post_norm),
        mlp_norm=address_of(layer.mlp_norm),
        mlp_post_norm=address_of(layer.mlp_post_norm),
        cos_sin=layer.cos_sin.data_ptr(),
        qkv=_linear(layer.qkv),
        gate=_linear(layer.gate),
        output=_linear(layer.output),
        gate_up=_linear(gate_up),
        down=_linear(down),
        window=layer.window or 0,
        sinks=address_of(layer.sinks),
        slopes=address_of(layer.slopes),
        mixture=None if mixture is None else ctypes.pointer(mixture),
        states=None if states is None else ctypes.pointer(states),
        latent=None if latent is None else ctypes.pointer(latent),
        input_scales=address_of(inputs),
        up_scales=address_of(ups),
        output_scale=output * before.added,
        down_scale=down_scale * behind.added,
        beside=layer.beside,
        output_kept=before.kept,
        mlp_kept=behind.kept,
    )


def _following(block: FollowingWeights) -> library.DecoderLayer:
    """An MLP, or a matrix, as a layer that does not attend."""
    norm, mlp = block
    matrix = mlp.matrix if isinstance(mlp, LinearMlp) else None
    gate_up, down, _ = _mlp_matrices(mlp)
    return library.DecoderLayer(
        input_norm=None if matrix is None else address_of(norm),
        mlp_norm=address_of(norm) if matrix is None else None,
        output=_linear(matrix),
        gate_up=_linear(gate_up),
        down=_linear(down),
        output_scale=1.0,
        down_scale=1.0,
        output_kept=1.0,
        mlp_kept=1.0,
    )


def _linear(packed: PackedLinear | None) -> library.Linear:
    """Null for None."""
    if packed is None:
        return library.Linear()
    assert isinstance(packed, PackedMatrix)
    return packed.linear
