"""EAGLE: one decoder layer that predicts the model's next hidden state from this one and the next token.

Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", arXiv:2401.15077. A row at position i
takes the feature of i and the embedding of the token at i + 1, and gives the feature of i + 1, from which the model's
own head draws the token at i + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.batch.draft_trees import TreeShape
from services.worker.models.config import LayerConfig, ModelConfig
from services.worker.models.loading import load_layer
from services.worker.models.native_decoder import EagleProjection, native_decoder
from services.worker.models.weights import DecoderWeights, KvCaches, apply_mlp
from services.worker.ops.interface import BatchMeta, Ops, PackedLinear
from services.worker.speculation.drafter import TargetModel, read_drafter, read_settings
from services.worker.speculation.hidden_state_proposer import HiddenStateDrafter
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


class EagleHead:
    """See `DraftHead`. Computed by the C++ library's whole pass where there is one."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self.hidden_size = config.hidden_size
        projection = EagleProjection(weights.joined, weights.has_input_norm)
        self._native = native_decoder(config, weights.weights, ops, projection)

    @property
    def kv_block_bytes(self) -> int:
        """See `DraftHead.kv_block_bytes`."""
        return self._ops.kv_block_bytes(self._config.num_kv_heads, self._config.head_dim)

    def allocate_kv(self, num_blocks: int) -> KvCaches:
        """See `DraftHead.allocate_kv`."""
        return [self._ops.allocate_kv(num_blocks, self._config.num_kv_heads, self._config.head_dim)]

    def combine(self, features: Tensor) -> Tensor:
        """It goes on from the model's last hidden state as it is."""
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped as the model's are."""
        head = self._weights.weights.head
        assert head is not None, "it is the model's"
        logits = self._ops.linear(hidden, head)[:, : self._config.vocab_size]
        cap = self._config.logits_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor
    ) -> Tensor | None:
        """See `DraftHead.draft_chain`."""
        return None if self._native is None else self._native.draft_chain(first, meta, steps, stride, caches, given)

    def predict(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `DraftHead.predict`."""
        if self._native is not None:
            return self._native.predict_features(ids, given, meta, caches, wants_logits=wants_logits)
        predicted = self._predicted(ids, given, meta, caches[0])
        if not wants_logits:
            return predicted, None
        return predicted, self.logits(predicted if meta.every_row else predicted.index_select(0, meta.logits_rows))

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
        norm = layer.input_norm if self._weights.has_input_norm else None
        x = residual if norm is None else ops.rms_norm(residual, norm, eps)
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


# How it is read.


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


def open_eagle(
    settings: SpeculationSettings, target: TargetModel, most: int, tree: TreeShape | None
) -> HiddenStateDrafter:
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
    return HiddenStateDrafter(EagleHead(config, weights, target.ops), target, most, tree)


def _layer_config(raw: _RawEagle, target: ModelConfig) -> ModelConfig:
    """Of a layer of Llama's, whatever the model is, by its names."""
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    return msgspec.structs.replace(
        target,
        architecture="LlamaForCausalLM",
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
        rotary_pairs=False,
        mixture=None,
    )
