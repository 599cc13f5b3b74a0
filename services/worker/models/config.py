"""What a model is, as far as running it goes. Knows no file format: `hf_config` reads Hugging Face's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from services.worker.models.hf_layers.compressed import CompressedConfig as CompressedConfig
from services.worker.models.hf_layers.compressed import Compression as Compression
from services.worker.models.hf_layers.compressed import GramConfig as GramConfig
from services.worker.models.hf_layers.compressed import HyperConnections as HyperConnections
from services.worker.models.hf_layers.convolution import ConvolutionConfig as ConvolutionConfig
from services.worker.models.hf_layers.delta import DeltaConfig as DeltaConfig
from services.worker.models.hf_layers.latent import BlockIndexConfig as BlockIndexConfig
from services.worker.models.hf_layers.latent import LatentConfig as LatentConfig
from services.worker.models.hf_layers.lightning import LightningConfig as LightningConfig
from services.worker.models.hf_layers.mamba import MambaConfig as MambaConfig
from services.worker.models.hf_layers.mamba import Multipliers as Multipliers
from services.worker.models.hf_layers.mixture import Mixture as Mixture
from services.worker.models.hf_layers.selective import RecurrentConfig as RecurrentConfig
from services.worker.models.hf_layers.selective import SelectiveConfig as SelectiveConfig
from services.worker.models.hf_layers.shared import SharedBlocks as SharedBlocks
from services.worker.models.rope import Rope
from services.worker.ops.activation import Activation, ActivationName, LimitedActivation, limit_of

Dtype = Literal["float32", "bfloat16", "float16"]

StateConfig = MambaConfig | DeltaConfig | ConvolutionConfig | SelectiveConfig | LightningConfig | RecurrentConfig
"""The mixers that keep a state of a sequence."""


_Name = TypeVar("_Name", str, int)
_Kind = TypeVar("_Kind")


class ModelError(Exception):
    """The model cannot be served as it is; the message says what to change, and names file, key and value."""


def layer_kinds(key: str, names: Sequence[_Name], known: Mapping[_Name, _Kind], count: int) -> list[_Kind]:
    """What `known` has of each layer's name, which the config's `key` lists; `count` is the config's. Raises ModelError
    for a name that is not known, and where there are not so many."""
    for name in names:
        if name not in known:
            raise ModelError(f"{key} {name!r} is not supported; supported: {', '.join(map(str, known))}")
    if len(names) != count:
        raise ModelError(f"{key} names {len(names)} layers, num_hidden_layers {count}")
    return [known[name] for name in names]


def require_positive(**values: int) -> None:
    """Raises ModelError for a key of a config whose value is not."""
    for key, value in values.items():
        if value < 1:
            raise ModelError(f"{key} {value} is not positive")


def dtype_named(name: str | None) -> Dtype:
    """The one that a config names; None: float32, as configs omit it. Raises ModelError."""
    match (name or "float32").removeprefix("torch."):
        case "float32" | "bfloat16" | "float16" as known:
            return known
        case other:
            raise ModelError(f"dtype {other!r} is not supported; supported: float32, bfloat16, float16")


def plain_json(text: bytes) -> bytes:
    """A `config.json` as JSON. Python writes a limit without an end as `Infinity`, which is none: `null` stands there
    then. Raises msgspec.DecodeError where it is malformed."""
    if b"Infinity" not in text:
        return text
    try:
        return msgspec.json.encode(json.loads(text))
    except ValueError as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from None


class ModelDescription(Protocol):
    """What is known of every model, whoever computes it."""

    @property
    def architecture(self) -> str:
        """The name of its class in `transformers`."""

    @property
    def dtype(self) -> Dtype:
        """That of its checkpoint."""

    @property
    def vocab_size(self) -> int:
        """Tokens that there are logits for."""

    @property
    def hidden_size(self) -> int:
        """Elements of a row between layers."""

    @property
    def num_layers(self) -> int:
        """Layers of all stages together."""

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Those that end a text."""

    @property
    def parameters(self) -> int:
        """Its weights."""


def limited_activation(name: ActivationName, limit: float) -> Activation:
    """The activation with the `swiglu_limit` of a `config.json`. Raises ModelError where that is none."""
    if not 0 < limit < math.inf:
        raise ModelError(f"swiglu_limit {limit} is not supported; positive numbers are")
    return name if limit_of(name).limit == limit else LimitedActivation(name, limit)


class PositionSteps(Struct, frozen=True):
    """What queries are multiplied by at a position p: 1 + beta · ln(1 + ⌊p / length⌋)."""

    beta: float
    length: int


class ResidualScales(Struct, frozen=True, omit_defaults=True):
    """What the residual, and an output that joins it, are multiplied by before they are added up (MiniMax)."""

    kept: float = 1.0
    added: float = 1.0


class SkipConnections(Struct, frozen=True, omit_defaults=True):
    """What happens to the rows before a layer reads them (Solar Pro): they are kept in some places, and joined by what
    was kept in others by layers before."""

    kept: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    weight: float = 0.0
    """Of what was kept; the rows' own is 1 less that."""


class FollowingBlock(Struct, frozen=True, omit_defaults=True):
    """An MLP, or a matrix in the place of one or of attention, which follows a layer's attention."""

    number: int
    """The checkpoint's layer that it is in."""
    norm: str
    """What its norm is called there."""
    module: str
    """What it is called there."""
    columns: int | None = None
    """Of the MLP; None: it is a matrix of hidden_size to hidden_size."""

    def parameters(self, hidden: int) -> int:
        """Weights of its matrices."""
        return hidden * (hidden if self.columns is None else 3 * self.columns)


class ExpertLimits(Struct, frozen=True, omit_defaults=True):
    """How far gates and ups of a layer's experts go, as `swiglustep` has it; None: they are not limited."""

    routed: float | None = None
    shared: float | None = None


class LayerConfig(Struct, frozen=True, omit_defaults=True):
    """What may differ between the layers of one model."""

    window: int | None
    """Positions that a token sees, itself included; None: all."""
    rope: Rope
    mixes: bool = False
    """The model's mixture takes the place of its MLP."""
    has_state: bool = False
    """The model's mixer with states takes the place of attention."""
    beside: bool = False
    """Its mixer reads what the one of the layer before it reads, and what both give is added up (Falcon-H1)."""
    has_mlp: bool = True
    """Where the model's layers have one, or a mixture."""
    norms_outputs: bool = False
    """What attention and MLP give is normed, and not what they read (Olmo 2 and later)."""
    blocks: tuple[int, int] | None = None
    """The numbers of its mixer and of its MLP in the checkpoint where these are layers of their own there (Nemotron-H),
    or of the first and the last that it is (Nemotron-NAS); None: both have the layer's."""
    part: str | None = None
    """Which part of a layer of the checkpoint it is, as its tensors are called there; None: all of it."""
    depth: int | None = None
    """Its number among those that have one of the model's shared blocks; None: it has weights of its own."""
    residual: tuple[ResidualScales, ResidualScales] | None = None
    """Where what attention, or a mixer, gives joins it, and where what the MLP gives does; None: nothing is scaled."""
    compression: Compression | None = None
    """How entries are made of its tokens that attention sees beside its window (DeepSeek-V4); None: there are none."""
    hashed: bool = False
    """A token's experts are those that a table has for it, whatever its row is."""
    following: tuple[FollowingBlock, ...] = ()
    """What comes behind attention in the place of an MLP, in this order (Nemotron-NAS)."""
    skips: SkipConnections | None = None
    loop: int | None = None
    """How often rows have gone through the checkpoint's layers before, where they do so several times (Ouro)."""
    begins_loop: bool = False
    """What comes in is normed first, by the norm behind all layers, and goes on so."""
    kv_heads: int | None = None
    """Key/value heads of the checkpoint, where each is cached several times; None: as many as the model's."""
    grams: int | None = None
    """Its number among those that add embeddings of n-grams to the streams; None: it does not."""
    chooses: bool = False
    """The model's indexer chooses which blocks of keys its tokens attend to."""
    limits: ExpertLimits = ExpertLimits()


class ModelConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decoder of the Llama kind and its near relations. Defaults are left out of the model's digest."""

    architecture: str
    dtype: Dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Columns of a dense layer's MLP; 0: layers have none."""
    num_heads: int
    num_kv_heads: int
    """Heads whose keys and values are cached; 1 where that is a latent."""
    head_dim: int
    """Elements of a cached head's key; of a latent and its rotated key together."""
    layers: tuple[LayerConfig, ...]
    max_positions: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Heads of queries and keys are RMS-normed before rotation (Qwen3, Gemma 3)."""
    post_norms: bool
    """Attention and MLP outputs are normed before they join the residual (Gemma)."""
    norm_offset: bool
    """Norm weights are stored as their difference from 1 (Gemma)."""
    post_norm_offsets: tuple[float, float] | None = None
    """What those behind attention, and behind MLPs, are stored as their difference from (PLaMo 3); None: as others."""
    embedding_scale: float | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    mixture: Mixture | None = None
    latent: LatentConfig | None = None
    """Attention is of this kind; None: of the usual one."""
    block_index: BlockIndexConfig | None = None
    """The indexer of layers that choose; None: there are none."""
    states: StateConfig | None = None
    """The mixer of layers that have one with states in place of attention; None: there are none."""
    gated_attention: bool = False
    """How much of each element that attention gives is taken is computed, beside its query (Qwen3-Next)."""
    head_gates: bool = False
    """How much of what each head gives is taken is computed of the row that attention reads (LFM3)."""
    rotary_dim: int | None = None
    """So many elements of a head are rotated, the first ones; None: all of them."""
    rotary_pairs: bool = False
    """What is rotated together are neighbours (GLM-4.1V); else an element and one half of all that is rotated behind
    it."""
    rope_axes: tuple[int, ...] = ()
    """Of each frequency of the rotation, head_dim / 2: which of a token's three positions it goes by (m-RoPE). None:
    tokens have one position."""
    query_steps: PositionSteps | None = None
    """By what queries grow with the position, once they are rotated (Ministral 3, Mistral Small 4)."""
    input_levels: int = 0
    """Rows of images have so many parts behind the one that stands for the embedding: the first is added to the row
    behind the first layer, the second behind the second (Qwen3-VL's DeepStack, arXiv:2406.04334)."""
    level_layers: tuple[int, ...] = ()
    """In front of which layer each of these parts is added instead (Granite 4 Vision)."""
    attention_sinks: bool = False
    """Each head has a score of its own that takes part in the softmax (gpt-oss)."""
    residual_scale: float | None = None
    """What a layer's outputs are multiplied by before they join the residual (Granite)."""
    logits_divisor: float | None = None
    scales_inputs: bool = False
    """Rows that clients give in place of the embedding's are multiplied by `embedding_scale`, too (Granite); Gemma's is
    a part of its embedding."""
    residual_normed: bool = False
    """What attention and MLP give joins the normed rows that they read (MiniMax), and not these before their norm."""
    norms_all_heads: bool = False
    """Queries, and keys, are RMS-normed over all heads together before rotation (Olmo 2 and later)."""
    alibi: bool = False
    """A score falls with the distance, by a slope of each head's (arXiv:2108.12409)."""
    further_words: int = 0
    """Rows of the embedding behind those of the vocabulary, of tokens that only stand for images (Mllama)."""
    normed_head: bool = False
    """Rows of the head are taken with length 1 (Baichuan 2)."""
    layer_norms: bool = False
    """Norms of rows take their mean away, too, and have a bias (Orion)."""
    down_bias: bool = False
    """What MLPs give has a bias, whatever `mlp_bias` says of all their products (TeleChat2)."""
    multipliers: Multipliers | None = None
    shared: SharedBlocks | None = None
    compressed: CompressedConfig | None = None
    """Attention is over compressed keys; None: it is not."""
    connections: HyperConnections | None = None
    """The residual is several streams; None: it is one."""
    grams: GramConfig | None = None
    """Of layers that add embeddings of n-grams; None: there are none."""
    plugin: str | None = None
    """The package that brings the architecture, with its version; None: it is ours."""

    @property
    def attention_inputs(self) -> int:
        """Elements of a row that queries, keys and values are made of."""
        return self.hidden_size * (1 if self.shared is None else 2)

    @property
    def image_row_size(self) -> int:
        """Elements of a row that stands for a part of an image."""
        return self.hidden_size * (1 + self.input_levels)

    def level_before(self, layer: int) -> int | None:
        """Which part of rows of images, from 0, is added in front of a layer; None: none."""
        if self.level_layers:
            return self.level_layers.index(layer) if layer in self.level_layers else None
        return layer - 1 if 0 < layer <= self.input_levels else None

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that are rotated."""
        if self.rotary_dim is not None:
            return self.rotary_dim
        if self.compressed is not None:
            return self.compressed.rope_dim
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def reorders_heads(self) -> bool:
        """Whether elements of queries and keys lie in another order than in checkpoints; see `rope.partly_rotated`."""
        return self.rotary_pairs or self.rotary_dim not in (None, 0, self.head_dim)

    @property
    def state_elements(self) -> int:
        """Numbers that all layers together keep of a sequence, however long that is."""
        return 0 if self.states is None else self.states.state_elements * sum(layer.has_state for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Layers of all stages together."""
        return len(self.layers)

    @property
    def parameters(self) -> int:
        """Weights of the matrices (norms and biases are too few to count)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layer_parameters(self.layers) + embeddings

    def layer_parameters(self, layers: Sequence[LayerConfig]) -> int:
        """Weights of the matrices of some of the model's layers; what several loops go through counts once."""
        own = [each.blocks for each in layers]
        layers = [each for at, each in enumerate(layers) if each.loop is None or each.blocks not in own[:at]]
        return self._in_layers(layers)

    @property
    def expert_share(self) -> float:
        """How much of `parameters` are weights of the experts that a router chooses from."""
        if self.mixture is None:
            return 0.0
        mixing = sum(layer.mixes for layer in self.layers)
        experts = mixing * self.mixture.experts * self.mixture.intermediate_size * self.hidden_size
        return self._matrices_of_mlp * experts / self.parameters

    @property
    def _matrices_of_mlp(self) -> int:
        """Gates, ups and downs."""
        return 2 if self.activation == "relu2" else 3

    @property
    def num_blocks(self) -> int:
        """Layers as the checkpoint counts them; see `LayerConfig.blocks`."""
        last = self.layers[-1].blocks
        return self.num_layers if last is None else last[1] + 1

    def layers_of_block(self, block: int) -> tuple[int, ...]:
        """Those that a checkpoint's layer of this number is, or is a part of; none: it has no such layer."""
        numbers = (each.blocks or (number, number) for number, each in enumerate(self.layers))
        return tuple(number for number, (first, last) in enumerate(numbers) if first <= block <= last)

    def _in_layers(self, layers: Sequence[LayerConfig]) -> int:
        depths = [layer.depth for layer in layers if layer.depth is not None]
        if self.shared is not None and depths:
            sizes = (self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
            shared = self.shared.parameters(depths, *sizes, self.intermediate_size)
            return shared + self._in_layers([layer for layer in layers if layer.depth is None])
        states = sum(layer.has_state for layer in layers)
        mixers = 0 if self.states is None else states * self.states.parameters(self.hidden_size)
        attention = self._attending_parameters(layers, len(layers) - states) + mixers
        attention += sum(each.parameters(self.hidden_size) for layer in layers for each in layer.following)
        attention -= sum(self._repeated_parameters(layer) for layer in layers)
        if self.block_index is not None:
            attention += sum(layer.chooses for layer in layers) * self.block_index.parameters(self.hidden_size)
        mixing = sum(layer.mixes for layer in layers)
        columns = sum(layer.has_mlp and not layer.mixes for layer in layers) * self.intermediate_size
        outputs = 0
        if (mixture := self.mixture) is not None:
            columns += mixing * (mixture.experts * mixture.intermediate_size + (mixture.shared_size or 0))
            outputs = mixing * (mixture.experts + (mixture.shared_size is not None and mixture.shared_gated))
        return attention + self.hidden_size * (self._matrices_of_mlp * columns + outputs)

    def _attending_parameters(self, layers: Sequence[LayerConfig], attending: int) -> int:
        """Of the layers that attend, so many of these."""
        of_streams = 0 if self.connections is None else self.connections.parameters(self.hidden_size, len(layers))
        if self.grams is not None and self.connections is not None:
            width = self.connections.streams * self.hidden_size
            with_grams = sum(layer.grams is not None for layer in layers)
            of_streams += with_grams * self.grams.parameters(width, self.hidden_size)
        if self.compressed is None:
            return of_streams + attending * self._attention_parameters()
        sizes = (self.hidden_size, self.num_heads, self.head_dim)
        return of_streams + sum(self.compressed.parameters(*sizes, layer.compression) for layer in layers)

    def _attention_parameters(self) -> int:
        """Of one layer."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        elements = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        gates = self.num_heads * self.head_dim if self.gated_attention else self.num_heads if self.head_gates else 0
        return self.hidden_size * (elements + gates)

    def _repeated_parameters(self, layer: LayerConfig) -> int:
        """What makes keys and values that are others of the same layer."""
        repeated = 0 if layer.kv_heads is None else self.num_kv_heads - layer.kv_heads
        return 2 * self.hidden_size * self.head_dim * repeated
