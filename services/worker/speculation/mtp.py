"""Multi-token prediction: the module that a model is published with, which goes on from its last hidden state.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Qwen3-Next. The token's embedding and the hidden state, each normed, are
projected to a row, which one layer of the model's own kind, a norm and the model's head go on from; when drafts are
chained, what that norm gives takes the place of the model's hidden state. Of several modules the first one drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from services.worker.distributed.communicator import SingleRank
from services.worker.models.checkpoint import Checkpoint, TensorSource
from services.worker.models.config import LayerConfig, ModelConfig, ModelError
from services.worker.models.loading import load_layer
from services.worker.models.quantization.quantized_checkpoint import as_configured
from services.worker.models.sharding import shard_of
from services.worker.models.weights import DecoderWeights, KvCaches
from services.worker.ops.interface import BatchMeta, Ops, PackedLinear
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.hidden_state_proposer import DraftLayer, HiddenStateDrafter, without_axes


class MtpWeights(NamedTuple):
    """A module's weights, owned by its drafter."""

    weights: DecoderWeights
    """One layer and the last norm; the model's embedding and head."""
    embedding_norm: Tensor
    hidden_norm: Tensor
    joined: PackedLinear
    """[hidden, 2 * hidden]: of the normed embedding, and the normed hidden state."""


class MtpHead:
    """See `DraftHead`. Computed operation by operation."""

    def __init__(self, config: ModelConfig, weights: MtpWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._layer = DraftLayer(config, weights.weights, shard_of(config, 0, 1), ops, SingleRank())
        self.hidden_size = config.hidden_size

    @property
    def kv_block_bytes(self) -> int:
        """See `DraftHead.kv_block_bytes`."""
        return self._layer.kv_block_bytes

    def allocate_kv(self, num_blocks: int) -> KvCaches:
        """See `DraftHead.allocate_kv`."""
        return self._layer.allocate_kv(num_blocks)

    def combine(self, features: Tensor) -> Tensor:
        """It goes on from the model's last hidden state as it is."""
        return features

    def predict(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `DraftHead.predict`."""
        ops, weights, eps = self._ops, self._weights, self._config.norm_eps
        embedded = self._layer.input_rows(ids)
        pair = (
            ops.rms_norm(embedded, weights.embedding_norm, eps),
            ops.rms_norm(given.to(embedded.dtype), weights.hidden_norm, eps),
        )
        row = ops.linear(torch.cat(pair, dim=1), weights.joined)
        norm = weights.weights.layers[0].input_norm
        x = row if norm is None else ops.rms_norm(row, norm, eps)
        normed, _ = self._layer.advance(x, row, without_axes(meta), caches[0])
        if not wants_logits:
            return normed, None
        return normed, self.logits(normed if meta.every_row else normed.index_select(0, meta.logits_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        logits = self._layer.logits(hidden)
        assert logits is not None, "there is one rank"
        return logits[:, : self._config.vocab_size]

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor
    ) -> Tensor | None:
        """No chain is made in one call."""
        return None


# How it is read.


_LAYER = "model.layers.0"


class _ModuleNames(NamedTuple):
    """What a family calls its tensors; the layer's are below `layer`."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    joined: str
    last_norm: str


_QWEN = _ModuleNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")


def _deepseek(layer: int) -> _ModuleNames:
    """The module lies behind the model's layers, and is numbered as they are."""
    name = f"model.layers.{layer}"
    return _ModuleNames(name, f"{name}.enorm", f"{name}.hnorm", f"{name}.eh_proj", f"{name}.shared_head.norm")


def open_mtp(target: TargetModel, most: int) -> HiddenStateDrafter:
    """Reads the module beside the model, whole on the rank that draws, or makes one up as the model. Raises ModelError
    where there is none, or it is of a kind that is not read."""
    if target.native_config.latent is not None and target.native_config.latent.gates is not None:
        raise ModelError(
            f"speculative method mtp: layers of {target.native_config.architecture} that predict further tokens are "
            "not read: use ngram, suffix, draft or eagle3"
        )
    config, device = _layer_config(target.native_config), target.device
    with _module(target) as (source, names):
        embedding, head = target.embedding_and_head()
        weights = MtpWeights(
            weights=DecoderWeights(
                embedding,
                (load_layer(source, config, target.ops, device, target.max_model_len),),
                _norm(source, names.last_norm, config),
                head,
            ),
            embedding_norm=_norm(source, names.embedding_norm, config),
            hidden_norm=_norm(source, names.hidden_norm, config),
            joined=target.ops.pack_linear(
                source.read(f"{names.joined}.weight", (config.hidden_size, 2 * config.hidden_size)), None
            ),
        )
    return HiddenStateDrafter(MtpHead(config, weights, target.ops), target, most)


@contextmanager
def _module(target: TargetModel) -> Iterator[tuple[TensorSource, _ModuleNames]]:
    """Its tensors, and what they are called: the layer's as a model's first. Raises ModelError."""
    if target.dummy:
        yield target.dummy_tensors(), _deepseek(0)  # whose names say which are norms
        return
    with target.open_checkpoint() as checkpoint:
        names = _names(target, checkpoint)
        renamed = {field: value.replace(names.layer, _LAYER) for field, value in names._asdict().items()}
        source = checkpoint.renamed(f"{names.layer}.", f"{_LAYER}.")
        yield as_configured(source, target.folder, target.dtype), _ModuleNames(**renamed)


def _names(target: TargetModel, checkpoint: Checkpoint) -> _ModuleNames:
    beside, behind = _QWEN, _deepseek(target.config.num_layers)
    for names in (beside, behind):
        if f"{names.joined}.weight" in checkpoint:
            return names
    raise ModelError(
        f"{target.folder}: speculative method mtp: the checkpoint has no module that predicts further tokens: neither "
        f"{beside.joined}.weight nor {behind.joined}.weight is there"
    )


def _layer_config(config: ModelConfig) -> ModelConfig:
    """Its layer attends to everything, and mixes as the model's last one does."""
    attending = next((layer for layer in config.layers if not layer.has_state), config.layers[0])
    layer = LayerConfig(None, attending.rope, config.layers[-1].mixes)
    architecture = "Qwen3NextForCausalLM" if config.states is not None else config.architecture
    return msgspec.structs.replace(config, architecture=architecture, layers=(layer,), states=None)


def _norm(source: TensorSource, name: str, config: ModelConfig) -> Tensor:
    weight = source.read(f"{name}.weight", (config.hidden_size,)).float()
    return weight + 1.0 if config.norm_offset else weight
