"""EAGLE-3: one layer that goes on from the hidden states of three of the model's layers.

Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time test",
arXiv:2503.01840. `fc` makes one row of what comes out of a low, a middle and a high layer; the layer's queries, keys
and values read that row beside the next token's embedding, each normed. Its own head draws from a part of the model's
vocabulary. When drafts are chained, the row that it gives takes the place of `fc`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.batch.draft_trees import TreeShape
from services.worker.distributed.communicator import SingleRank
from services.worker.models.config import LayerConfig, ModelConfig, ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_layer
from services.worker.models.native_decoder import Eagle3Inputs, native_decoder
from services.worker.models.sharding import shard_of
from services.worker.models.weights import DecoderWeights, KvCaches
from services.worker.ops.interface import BatchMeta, EmbeddingTable, Ops, PackedLinear
from services.worker.speculation.drafter import DrafterCheckpoint, TargetModel, read_drafter
from services.worker.speculation.hidden_state_proposer import DraftLayer, HiddenStateDrafter, without_axes
from services.worker.speculation.settings import SpeculationSettings

_LAYER = "model.layers.0"
_LLAMA = "LlamaForCausalLM"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", _LLAMA, "Eagle3Speculator", "Eagle3DraftModel")


class Eagle3Weights(NamedTuple):
    """An EAGLE-3 head's weights, owned by its drafter."""

    weights: DecoderWeights
    """One layer, whose input norm is the embedding's; the last norm and the head of its own words."""
    given_norm: Tensor
    combined: PackedLinear
    """[hidden, taps * the model's hidden]"""
    norms_residual: bool
    tokens: Tensor | None
    """int32 [words]: the token of the model that each word of the head is; None: they are the same."""


class Eagle3Head:
    """See `DraftHead`. Computed by the C++ library's whole pass where there is one."""

    def __init__(self, config: ModelConfig, weights: Eagle3Weights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self.hidden_size = config.hidden_size
        whole, layer = weights.weights, weights.weights.layers[0]
        self._layer = DraftLayer(config, whole, shard_of(config, 0, 1), ops, SingleRank())
        assert layer.input_norm is not None, "heads norm the embedding"
        inputs = Eagle3Inputs(layer.input_norm, weights.given_norm, weights.norms_residual, weights.tokens)
        self._native = native_decoder(config, whole, ops, inputs)
        self._columns = None if weights.tokens is None else weights.tokens.long()

    @property
    def kv_block_bytes(self) -> int:
        """See `DraftHead.kv_block_bytes`."""
        return self._layer.kv_block_bytes

    def allocate_kv(self, num_blocks: int) -> KvCaches:
        """See `DraftHead.allocate_kv`."""
        return self._layer.allocate_kv(num_blocks)

    def combine(self, features: Tensor) -> Tensor:
        """features [n, taps * the model's hidden] → [n, hidden]"""
        return self._ops.linear(features, self._weights.combined)

    def predict(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `DraftHead.predict`."""
        meta = without_axes(meta)
        if self._native is not None:
            hidden, words = self._native.predict_features(ids, given, meta, caches, wants_logits=wants_logits)
            return hidden, None if words is None else self._scattered(words)
        normed, hidden = self._layer.advance(*self._inputs(ids, given), meta, caches[0])
        if not wants_logits:
            return hidden, None
        return hidden, self._draws(normed if meta.every_row else normed.index_select(0, meta.logits_rows))

    def _inputs(self, ids: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """([n, 2 * hidden] what the layer reads, [n, hidden] its residual)."""
        ops, weights, eps = self._ops, self._weights, self._config.norm_eps
        embedding, norm = weights.weights.embedding, weights.weights.layers[0].input_norm
        assert embedding is not None, "it has one"
        assert norm is not None, "it has one"
        embedded = ops.embed(ids, embedding)
        given = given.to(embedded.dtype)
        normed = ops.rms_norm(given, weights.given_norm, eps)
        x = torch.cat((ops.rms_norm(embedded, norm, eps), normed), dim=1)
        # The residual is written to.
        return x, normed.to(given.dtype, copy=True) if weights.norms_residual else given.clone()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        last_norm = self._weights.weights.final_norm
        assert last_norm is not None, "it has one"
        return self._draws(self._ops.rms_norm(hidden, last_norm, self._config.norm_eps))

    def _draws(self, normed: Tensor) -> Tensor:
        head = self._weights.weights.head
        assert head is not None, "it has one"
        tokens = self._weights.tokens
        words = self._ops.linear(normed, head)
        return self._scattered(words[:, : self._config.vocab_size if tokens is None else len(tokens)])

    def _scattered(self, words: Tensor) -> Tensor:
        """words [R, words] → [R, vocab]"""
        if self._columns is None:
            return words
        logits = words.new_full((len(words), self._config.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._columns, words)

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor
    ) -> Tensor | None:
        """See `DraftHead.draft_chain`."""
        return None if self._native is None else self._native.draft_chain(first, meta, steps, stride, caches, given)


# How it is read.


class _RawEagleConfig(Struct):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: bool = True


class _RawEagle3(Struct):
    """The keys of its `config.json` that a Llama has not."""

    architectures: list[str]
    vocab_size: int
    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    eagle_config: _RawEagleConfig | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


def read_taps(folder: Path, num_layers: int) -> tuple[int, ...]:
    """The layers of a model of `num_layers` in front of which the head in `folder` reads hidden states; `num_layers`:
    behind the last one. Raises ModelError.

    Where the config names none: 2, half and all but 3, as SGLang and vLLM do. SGLang and SpecForge name the layers that
    they come out of, in `eagle_config`; vLLM and speculators, at the top, those that they go into."""
    raw = _read_raw(folder)[0]
    within = None if raw.eagle_config is None else raw.eagle_config.eagle_aux_hidden_state_layer_ids
    if raw.eagle_aux_hidden_state_layer_ids:
        taps = tuple(raw.eagle_aux_hidden_state_layer_ids)
    elif within:
        taps = tuple(layer + 1 for layer in within)
    else:
        taps = (2, num_layers // 2, num_layers - 3)
    if not all(0 <= tap <= num_layers for tap in taps):
        raise ModelError(
            f"{folder}: eagle_aux_hidden_state_layer_ids: the head reads hidden states in front of the layers "
            f"{', '.join(map(str, taps))}, counted from 0; the model has {num_layers}"
        )
    return taps


def open_eagle3(
    settings: SpeculationSettings, target: TargetModel, most: int, tree: TreeShape | None
) -> HiddenStateDrafter:
    """Reads the head. Raises ModelError where it does not fit the model."""
    folder = settings.folder()
    raw, described = _read_raw(folder)
    target.check_sizes(folder, vocab_size=raw.vocab_size)
    config = _layer_config(folder, described)
    if raw.target_hidden_size not in (None, target.config.hidden_size):
        raise ModelError(
            f"{folder}: target_hidden_size is {raw.target_hidden_size}, the model's hidden_size is "
            f"{target.config.hidden_size}"
        )
    checkpoint = read_drafter(folder, target.dtype).renamed("model.", "")
    checkpoint = checkpoint.renamed("midlayer.", f"{_LAYER}.").renamed("layers.0.", f"{_LAYER}.")
    hidden, read = config.hidden_size, checkpoint.read
    taps = len(read_taps(folder, target.config.num_layers))
    joined = read("fc.weight", (hidden, taps * target.config.hidden_size)).to(target.device)
    bias = read("fc.bias", (hidden,)).to(target.device) if "fc.bias" in checkpoint else None
    layer = load_layer(checkpoint, config, target.ops, target.device, target.max_model_len, 2 * hidden)
    embedding = _embedding(checkpoint, config, target)
    tokens = _tokens(checkpoint, raw)
    words = raw.vocab_size if tokens is None else len(tokens)
    weights = Eagle3Weights(
        weights=DecoderWeights(
            embedding,
            (layer,),
            read("norm.weight", (hidden,)).float().to(target.device),
            _head(checkpoint, config, target, embedding, words),
        ),
        given_norm=read(f"{_LAYER}.hidden_norm.weight", (hidden,)).float().to(target.device),
        combined=target.ops.pack_linear(joined, bias),
        norms_residual=raw.norm_before_residual,
        tokens=None if tokens is None else tokens.to(target.device),
    )
    return HiddenStateDrafter(Eagle3Head(config, weights, target.ops), target, most, tree)


def _read_raw(folder: Path) -> tuple[_RawEagle3, dict[str, Any]]:
    """What `config.json` says, and all of it with speculators' nested description of the layer in its place. Raises
    ModelError."""
    path = folder / "config.json"
    try:
        described = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        described |= described.get("transformer_layer_config") or {}
        raw = msgspec.convert(described, _RawEagle3)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None
    if not any(each in ARCHITECTURES for each in raw.architectures):
        raise ModelError(f"{path}: architectures {raw.architectures!r} is no EAGLE-3 head: {', '.join(ARCHITECTURES)}")
    if raw.num_hidden_layers != 1:
        raise ModelError(f"{path}: num_hidden_layers is {raw.num_hidden_layers}: an EAGLE-3 head of one layer is read")
    if raw.eagle_config is not None and not raw.eagle_config.use_aux_hidden_state:
        raise ModelError(f"{path}: eagle_config.use_aux_hidden_state false is not supported")
    return raw, described


def _layer_config(folder: Path, described: dict[str, Any]) -> ModelConfig:
    """Of a Llama; its layer sees everything. Raises ModelError."""
    text = msgspec.json.encode(described | {"architectures": [_LLAMA]})
    config = read_model_config(folder, described=text)
    return msgspec.structs.replace(config, layers=(LayerConfig(None, config.layers[0].rope),))


def _embedding(checkpoint: DrafterCheckpoint, config: ModelConfig, target: TargetModel) -> EmbeddingTable:
    """Its own, or the model's. Raises ModelError."""
    name = "embed_tokens.weight"
    if name not in checkpoint and config.hidden_size == target.config.hidden_size:
        return target.embedding()
    return checkpoint.read(name, (config.vocab_size, config.hidden_size)).to(target.device)


def _head(
    checkpoint: DrafterCheckpoint, config: ModelConfig, target: TargetModel, embedding: EmbeddingTable, words: int
) -> PackedLinear:
    """Its own; its embedding where the two are tied; or, of all the model's words, the model's. Raises ModelError."""
    name, hidden = "lm_head.weight", config.hidden_size
    if name not in checkpoint and words == config.vocab_size:
        if config.tied_embeddings:
            return target.ops.pack_linear(embedding, None) if isinstance(embedding, Tensor) else embedding
        if hidden == target.config.hidden_size:
            return target.embedding_and_head()[1]
    return target.ops.pack_linear(checkpoint.read(name, (words, hidden)).to(target.device), None)


def _tokens(checkpoint: DrafterCheckpoint, raw: _RawEagle3) -> Tensor | None:
    """Which token each of the head's words is: `d2t` says how much greater its number is than the word's. Raises
    ModelError."""
    words = raw.draft_vocab_size or raw.vocab_size
    if words == raw.vocab_size and "d2t" not in checkpoint:
        return None
    tokens = checkpoint.read("d2t", (words,)).long() + torch.arange(words)
    if len(set(tokens.tolist())) < words or not 0 <= int(tokens.min()) <= int(tokens.max()) < raw.vocab_size:
        raise ModelError(
            f"{checkpoint.folder}: tensor d2t: every word of the head must be another of {raw.vocab_size} tokens"
        )
    return tokens.int()
