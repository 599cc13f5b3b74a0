"""EAGLE: one decoder layer that predicts the model's next hidden state from this one and the next token.

Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", arXiv:2401.15077. A row at position i
takes the feature of i and the embedding of the token at i + 1, and gives the feature of i + 1, from which the model's
own head draws the token at i + 2. The layer's keys and values lie under the same block ids as the model's; blocks that
came from the KV store have none, which costs acceptance only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.batch.rows import Indices, Int32s
from services.worker.models.config import LayerConfig, ModelConfig
from services.worker.models.loading import load_layer
from services.worker.models.native_decoder import EagleProjection, NativeDecoder, native_decoder
from services.worker.models.weights import DecoderWeights, KvCaches, apply_mlp
from services.worker.ops.interface import BatchMeta, Ops, PackedLinear
from services.worker.ops.transfer import on_this_device, to_device
from services.worker.sampling.races import race_of
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.chain import DraftSampler, draft_chain
from services.worker.speculation.drafter import TargetModel, read_drafter, read_settings
from services.worker.speculation.proposer import ComputedStep, DraftRequest, SequenceHistories
from services.worker.speculation.settings import SpeculationSettings


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """An EAGLE layer's weights, owned by its drafter."""

    weights: DecoderWeights
    """One layer, and the model's own embedding and head; no final norm."""
    has_input_norm: bool
    """The first EAGLE has none."""
    joined: PackedLinear
    """[token's embedding, feature] → what the layer begins with."""


class EaglePass(Protocol):
    """Runs a whole EAGLE layer."""

    def predict_features(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """ids [n] int32, each behind one of the features `given` [n, hidden] → (the features predicted for them
        [n, hidden], the head's logits [R, vocab] of `meta.logits_rows` where wanted, until the next call).
        """


def eagle_pass(config: ModelConfig, weights: EagleWeights, ops: Ops) -> EaglePass:
    """The fastest pass there is: the C++ library's, or one operation by operation."""
    projection = EagleProjection(weights.joined, weights.has_input_norm)
    return native_decoder(config, weights.weights, ops, projection) or _OpByOpPass(config, weights, ops)


class _OpByOpPass:
    """By single operations, on any device."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops

    def predict_features(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        predicted = self._predicted(ids, given, meta, caches[0])
        if not wants_logits:
            return predicted, None
        rows = predicted if meta.every_row else predicted.index_select(0, meta.logits_rows)
        return predicted, head_logits(rows, self._weights.weights, self._config, self._ops)

    def _predicted(self, ids: Tensor, given: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        ops, layer, eps = self._ops, self._weights.weights.layers[0], self._config.norm_eps
        embedding = self._weights.weights.embedding
        assert embedding is not None, "it is the model's"
        assert layer.mlp is not None, "it is a layer of the Llama kind"
        assert layer.mlp_norm is not None
        embedded = ops.embed(ids, embedding)
        if self._config.embedding_scale is not None:
            embedded = embedded * self._config.embedding_scale
        residual = ops.linear(torch.cat((embedded, given.to(embedded.dtype)), dim=1), self._weights.joined)
        x = ops.rms_norm(residual, layer.input_norm, eps) if self._weights.has_input_norm else residual
        queries = ops.rope_and_store(
            ops.linear(x, layer.qkv),
            meta,
            layer.cos_sin,
            *cache,
            heads=self._config.num_heads,
            q_norm=None,
            k_norm=None,
            eps=eps,
        )
        mixed = ops.paged_attention(
            queries, *cache, meta, scale=self._config.attention_scale, window=None, softcap=None
        )
        x, residual = ops.add_rms_norm(ops.linear(mixed, layer.output), residual.clone(), layer.mlp_norm, eps)
        return residual + apply_mlp(ops, layer.mlp, x, self._config.activation)


def head_logits(features: Tensor, weights: DecoderWeights, config: ModelConfig, ops: Ops) -> Tensor:
    """features [R, hidden] → [R, vocab], capped as the model's are."""
    assert weights.head is not None, "it is the model's"
    logits = ops.linear(features, weights.head)[:, : config.vocab_size]
    cap = config.logits_softcap
    return logits if cap is None else cap * (logits / cap).tanh()


# The drafter, and the proposer that it makes.


_LAYER = "model.layers.0"


class _RawEagle(Struct):
    """The keys of its `config.json` that matter; for what it does not say, the layer is as the model's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int = 1
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6


class EagleDrafter(Struct, frozen=True):
    """Owns an EAGLE layer's weights, see `Drafter`."""

    weights: EagleWeights
    config: ModelConfig
    target: TargetModel
    most: int

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of the one layer's keys and values."""
        return self.target.ops.kv_block_bytes(self.config.num_kv_heads, self.config.head_dim)

    def proposer(self, num_blocks: int, max_sequences: int) -> EagleProposer:
        """A proposer with the layer's KV cache of `num_blocks` blocks."""
        return EagleProposer(self, num_blocks, max_sequences)


def open_eagle(settings: SpeculationSettings, target: TargetModel, most: int) -> EagleDrafter:
    """Reads the layer. Raises ModelError where it does not fit the model."""
    folder = settings.folder()
    raw = read_settings(folder, _RawEagle)
    target.check_sizes(folder, vocab_size=raw.vocab_size, hidden_size=raw.hidden_size)
    config = _layer_config(raw, target.native_config)
    checkpoint = read_drafter(folder, target.dtype).renamed("layers.0", _LAYER).renamed("model.fc", "fc")
    norm = f"{_LAYER}.input_layernorm.weight"
    hidden = raw.hidden_size
    joined = checkpoint.read("fc.weight", (hidden, 2 * hidden)).to(target.device)
    bias = checkpoint.read("fc.bias", (hidden,)).to(target.device) if "fc.bias" in checkpoint else None
    embedding, head = target.embedding_and_head()
    layer = load_layer(
        checkpoint.with_default(norm, torch.ones(hidden)), config, target.ops, target.device, target.max_model_len
    )
    weights = EagleWeights(
        weights=DecoderWeights(embedding, (layer,), None, head),
        has_input_norm=norm in checkpoint,
        joined=target.ops.pack_linear(joined, bias),
    )
    return EagleDrafter(weights, config, target, most)


def _layer_config(raw: _RawEagle, target: ModelConfig) -> ModelConfig:
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    return msgspec.structs.replace(
        target,
        intermediate_size=raw.intermediate_size,
        num_heads=raw.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.rms_norm_eps,
        layers=(LayerConfig(None, target.layers[0].rope),),
        attention_scale=head_dim**-0.5,
        attention_softcap=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        norm_offset=False,
        mixture=None,
    )


class EagleProposer:
    """Owns the layer's keys and values, and the feature predicted for each sequence's last token."""

    drafts_ahead: Literal[True] = True

    def __init__(self, drafter: EagleDrafter, num_blocks: int, max_sequences: int) -> None:
        self._weights = drafter.weights
        self._config = drafter.config
        self._ops = drafter.target.ops
        self._device = drafter.target.device
        self._most = drafter.most
        self._run = eagle_pass(drafter.config, drafter.weights, self._ops)
        self._caches = [self._ops.allocate_kv(num_blocks, self._config.num_kv_heads, self._config.head_dim)]
        self._predicted: Tensor = self._ops.empty_rows(max_sequences, self._config.hidden_size).zero_()
        self._ready: NDArray[np.bool_] = np.zeros(max_sequences, dtype=np.bool_)
        """Whether `_predicted` is of the last token: not for sequences that decoded while no drafts were asked for."""

    def propose(self, request: DraftRequest) -> DraftTokens:
        """No drafts for sequences whose last feature is not known."""
        most = np.where(self._ready[request.seq_indices], np.minimum(request.limits, self._most), 0).astype(np.int32)
        ready = np.flatnonzero(most)
        if not len(ready):
            return DraftTokens.none(len(request.seq_indices))
        if len(ready) == len(most):
            return DraftTokens(self._draft(request.seq_indices, most, request.histories, request.rejected), most)
        there = to_device(ready, self._device)
        short = None if request.rejected is None else request.rejected.of(there)
        drafted = self._draft(request.seq_indices[ready], most[ready], request.histories, short)
        return DraftTokens(drafted.new_zeros(len(most), drafted.shape[1]).index_copy_(0, there, drafted), most)

    def _draft(
        self, seq_indices: Indices, most: Int32s, histories: SequenceHistories, rejected: RejectedDrafts | None
    ) -> Tensor:
        """[P, the greatest of most]"""
        draws = DraftSampler(seq_indices, histories, rejected, race_of(self._ops))
        features = self._predicted.index_select(0, to_device(seq_indices, self._device))
        tokens = [draws.token(head_logits(features, self._weights.weights, self._config, self._ops), [])]
        steps = int(most.max()) - 1
        if steps:
            # Those that may draft no further go on writing behind their last draft: nothing is read from there.
            ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], most - 1)
            rows = draft_chain(
                seq_indices,
                histories.lengths[seq_indices] - 1 + ahead,
                histories.block_tables,
                histories.block_size,
                self._device,
            )
            if rejected is not None:
                rows.move_back(rejected)
            if draws.greedy and isinstance(self._run, NativeDecoder):
                drafts = self._run.draft_chain(tokens[0], rows.meta(0), rows.steps, rows.stride, self._caches, features)
                return drafts.t()
            for step in range(steps):
                features, logits = self._run.predict_features(
                    tokens[-1], features, rows.meta(step), self._caches, wants_logits=True
                )
                assert logits is not None, "wanted"
                tokens.append(draws.token(logits, tokens))
        return torch.stack(tokens, dim=1)

    def observe(self, computed: ComputedStep) -> None:
        """The layer goes over every row of the step, each with the token behind it."""
        if computed.features is None:
            self._ready[computed.sampled_indices] = False
            return
        predicted, _ = self._run.predict_features(
            computed.following(), computed.features, computed.meta, self._caches, wants_logits=False
        )
        rows, seq_indices = (
            on_this_device(computed.last_rows, self._device),
            to_device(computed.sampled_indices, self._device),
        )
        self._predicted.index_copy_(0, seq_indices, predicted.index_select(0, rows))
        self._ready[computed.sampled_indices] = True

    def start_sequence(self, seq_index: int, computed: int, histories: SequenceHistories) -> None:
        """Nothing to do: its first decode follows a step that computes its last row."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """Nothing to do: what the layer made of their former contents stays, finite and wrong."""

    def clear(self) -> None:
        """No feature is known from here on."""
        self._ready[:] = False
