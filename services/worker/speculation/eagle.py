"""EAGLE: one decoder layer that foresees the model's next hidden state from this one and the next token.

Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", arXiv:2401.15077. A row at position i
takes the feature of i and the embedding of the token at i + 1, and gives the feature of i + 1, from which the model's
own head draws the token at i + 2. The layer's keys and values lie under the same block ids as the model's; blocks that
came from the KV store have none, which costs acceptance only.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.model.config import LayerConfig, ModelConfig
from services.worker.model.decoder import Layer
from services.worker.model.loading import load_layer
from services.worker.model.mlp import apply_mlp
from services.worker.ops import BatchMeta, PackedLinear
from services.worker.rows import Units, rows_of
from services.worker.staging import staging_for
from services.worker.sampling.sampler import draw_plainly
from services.worker.speculation.drafter import Target
from services.worker.speculation.drafter_files import read_drafter, read_settings
from services.worker.speculation.proposer import Asked, Computed, Drafts, Histories, Int32s
from services.worker.speculation.settings import Speculation

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


@dataclass(frozen=True, slots=True)
class EagleWeights:
    layer: Layer
    has_input_norm: bool
    """The first EAGLE has none."""
    joined: PackedLinear
    """[token's embedding, feature] → what the layer begins with."""
    embedding: Tensor
    head: PackedLinear


class EagleDrafter(Struct, frozen=True):
    """See `drafter.Drafter`."""

    weights: EagleWeights
    config: ModelConfig
    target: Target
    most: int

    @property
    def kv_block_bytes(self) -> int:
        return self.target.ops.kv_block_bytes(self.config.num_kv_heads, self.config.head_dim)

    def proposer(self, num_blocks: int, max_sequences: int) -> EagleProposer:
        return EagleProposer(self, num_blocks, max_sequences)


def open_eagle(settings: Speculation, target: Target, most: int) -> EagleDrafter:
    """Raises ModelError."""
    folder = settings.folder()
    raw = read_settings(folder, _RawEagle)
    target.check_same(folder, vocab_size=raw.vocab_size, hidden_size=raw.hidden_size)
    config = _layer_config(raw, target.config)
    checkpoint = read_drafter(folder, target.dtype).renamed("layers.0", _LAYER).renamed("model.fc", "fc")
    norm = f"{_LAYER}.input_layernorm.weight"
    hidden = raw.hidden_size
    joined = checkpoint.read("fc.weight", (hidden, 2 * hidden)).to(target.device)
    bias = checkpoint.read("fc.bias", (hidden,)).to(target.device) if "fc.bias" in checkpoint else None
    embedding, head = target.words()
    weights = EagleWeights(
        layer=load_layer(
            checkpoint.with_default(norm, torch.ones(hidden)), config, target.ops, target.device, target.max_model_len
        ),
        has_input_norm=norm in checkpoint,
        joined=target.ops.pack_linear(joined, bias),
        embedding=embedding,
        head=head,
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
    """Owns the layer's keys and values, and the feature foreseen for each sequence's last token."""

    def __init__(self, drafter: EagleDrafter, num_blocks: int, max_sequences: int) -> None:
        self._weights = drafter.weights
        self._config = drafter.config
        self._target = drafter.target
        self._ops = drafter.target.ops
        self._device = drafter.target.device
        self._staging = staging_for(drafter.target.device)
        self._most = drafter.most
        self._cache = self._ops.allocate_kv(num_blocks, self._config.num_kv_heads, self._config.head_dim)
        self._foreseen: Tensor = self._ops.empty_rows(max_sequences, self._config.hidden_size).zero_()

    def propose(self, asked: Asked) -> Drafts:
        wanted = min(self._most, int(asked.most.max()))
        slots = torch.from_numpy(asked.slots).to(self._device)
        features = self._foreseen.index_select(0, slots)
        tokens = [self._drawn(features, asked, 0)]
        for ahead in range(1, wanted):
            # Those that may draft no further go on writing where they wrote last: nobody reads it.
            at = asked.histories.lengths[asked.slots] - 2 + np.minimum(ahead, np.maximum(asked.most, 1))
            meta = self._one_row_each(asked, at.astype(np.int32))
            features = self._forward(features, tokens[-1].to(torch.int32), meta)
            tokens.append(self._drawn(features, asked, ahead))
        drafts = torch.stack(tokens, dim=1).to(torch.int32).cpu().numpy()
        return Drafts(drafts, np.minimum(asked.most, wanted).astype(np.int32))

    def _drawn(self, features: Tensor, asked: Asked, ahead: int) -> Tensor:
        logits = self._ops.linear(features, self._weights.head)[:, : self._config.vocab_size]
        cap = self._config.logits_softcap
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        return draw_plainly(logits, asked.histories.choose(asked.slots, ahead))

    def _one_row_each(self, asked: Asked, positions: Int32s) -> BatchMeta:
        units = Units(asked.slots, asked.slots, positions, np.ones(len(asked.slots), dtype=np.int32))
        rows = rows_of(units, asked.histories.block_tables, asked.histories.tokens)
        return self._staging.place(rows, rows.last_rows)[1]

    def observe(self, computed: Computed) -> None:
        """The layer goes over every row of the step, each with the token behind it."""
        assert computed.features is not None, "asked for"
        foreseen = self._forward(computed.features, computed.following(), computed.meta)
        rows = torch.from_numpy(computed.last_rows).to(self._device)
        slots = torch.from_numpy(computed.sampled_slots).to(self._device)
        self._foreseen.index_copy_(0, slots, foreseen.index_select(0, rows))

    def _forward(self, features: Tensor, ids: Tensor, meta: BatchMeta) -> Tensor:
        """features [n, hidden] and the tokens behind them [n] → the features foreseen for those [n, hidden]."""
        ops, layer, eps = self._ops, self._weights.layer, self._config.norm_eps
        embedded = ops.embed(ids, self._weights.embedding)
        if self._config.embedding_scale is not None:
            embedded = embedded * self._config.embedding_scale
        residual = ops.linear(torch.cat((embedded, features.to(embedded.dtype)), dim=1), self._weights.joined)
        x = ops.rms_norm(residual, layer.input_norm, eps) if self._weights.has_input_norm else residual
        queries = ops.rope_and_store(
            ops.linear(x, layer.qkv),
            meta,
            layer.cos_sin,
            *self._cache,
            heads=self._config.num_heads,
            q_norm=None,
            k_norm=None,
            eps=eps,
        )
        mixed = ops.paged_attention(
            queries, *self._cache, meta, scale=self._config.attention_scale, window=None, softcap=None
        )
        x, residual = ops.add_rms_norm(ops.linear(mixed, layer.output), residual.clone(), layer.mlp_norm, eps)
        return residual + apply_mlp(ops, layer.mlp, x, self._config.activation)

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        """Its first decode follows a step that computes its last row."""

    def loaded(self, blocks: Int32s) -> None:
        """What the layer made of their former contents stays, finite and wrong."""

    def clear(self) -> None:
        pass
