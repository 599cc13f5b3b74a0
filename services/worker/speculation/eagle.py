"""EAGLE: one decoder layer that foresees the model's next hidden state from this one and the next token.

Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", arXiv:2401.15077. A row at position i
takes the feature of i and the embedding of the token at i + 1, and gives the feature of i + 1, from which the model's
own head draws the token at i + 2. The layer's keys and values lie under the same block ids as the model's; blocks that
came from the KV store have none, which costs acceptance only.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import sent, there
from services.worker.model.config import LayerConfig, ModelConfig
from services.worker.model.decoder import Weights
from services.worker.model.loading import load_layer
from services.worker.rows import Int32s, Slots
from services.worker.shortfall import Shortfall
from services.worker.speculation.chain import DraftsOn, Draws, chain
from services.worker.speculation.drafter import Target
from services.worker.speculation.drafter_files import read_drafter, read_settings
from services.worker.speculation.eagle_layer import EagleWeights, eagle_pass, head_logits
from services.worker.speculation.proposer import Asked, Computed, Drafts, Histories
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
    layer = load_layer(
        checkpoint.with_default(norm, torch.ones(hidden)), config, target.ops, target.device, target.max_model_len
    )
    weights = EagleWeights(
        weights=Weights(embedding, (layer,), None, head),
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
    """Owns the layer's keys and values, and the feature foreseen for each sequence's last token."""

    drafts_ahead: Literal[True] = True

    def __init__(self, drafter: EagleDrafter, num_blocks: int, max_sequences: int) -> None:
        self._weights = drafter.weights
        self._config = drafter.config
        self._ops = drafter.target.ops
        self._device = drafter.target.device
        self._most = drafter.most
        self._run = eagle_pass(drafter.config, drafter.weights, self._ops)
        self._caches = [self._ops.allocate_kv(num_blocks, self._config.num_kv_heads, self._config.head_dim)]
        self._foreseen: Tensor = self._ops.empty_rows(max_sequences, self._config.hidden_size).zero_()
        self._ready: NDArray[np.bool_] = np.zeros(max_sequences, dtype=np.bool_)
        """Whether `_foreseen` is of the last token: not of who decoded while nobody drafted."""

    def propose(self, asked: Asked) -> Drafts:
        most = np.where(self._ready[asked.slots], np.minimum(asked.most, self._most), 0).astype(np.int32)
        ready = np.flatnonzero(most)
        if not len(ready):
            return Drafts.none(asked)
        if len(ready) == len(most):
            return Drafts(self._drafted(asked.slots, most, asked.histories, asked.shortfall), most)
        there = sent(ready, self._device)
        short = None if asked.shortfall is None else asked.shortfall.of(there)
        drafted = self._drafted(asked.slots[ready], most[ready], asked.histories, short)
        return Drafts(drafted.new_zeros(len(most), drafted.shape[1]).index_copy_(0, there, drafted), most)

    def _drafted(self, slots: Slots, most: Int32s, histories: Histories, shortfall: Shortfall | None) -> Tensor:
        """[P, the greatest of most]"""
        draws = Draws(slots, histories, shortfall)
        features = self._foreseen.index_select(0, sent(slots, self._device))
        tokens = [draws.token(head_logits(features, self._weights.weights, self._config, self._ops), 0)]
        steps = int(most.max()) - 1
        if steps:
            # Those that may draft no further go on writing behind their last draft: nothing is read from there.
            ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], most - 1)
            rows = chain(slots, histories.lengths[slots] - 1 + ahead, histories.block_tables, self._device)
            if shortfall is not None:
                rows.move_back(shortfall)
            if draws.greedy and isinstance(self._run, DraftsOn):
                return self._run.draft_on(tokens[0], rows, self._caches, features).t()
            for step in range(steps):
                features, logits = self._run.foresee(
                    tokens[-1], features, rows.meta(step), self._caches, wants_logits=True
                )
                assert logits is not None, "wanted"
                tokens.append(draws.token(logits, step + 1))
        return torch.stack(tokens, dim=1)

    def observe(self, computed: Computed) -> None:
        """The layer goes over every row of the step, each with the token behind it."""
        if computed.features is None:
            self._ready[computed.sampled_slots] = False
            return
        foreseen, _ = self._run.foresee(
            computed.following(), computed.features, computed.meta, self._caches, wants_logits=False
        )
        rows, slots = there(computed.last_rows, self._device), sent(computed.sampled_slots, self._device)
        self._foreseen.index_copy_(0, slots, foreseen.index_select(0, rows))
        self._ready[computed.sampled_slots] = True

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        """Its first decode follows a step that computes its last row."""

    def loaded(self, blocks: Int32s) -> None:
        """What the layer made of their former contents stays, finite and wrong."""

    def clear(self) -> None:
        self._ready[:] = False
