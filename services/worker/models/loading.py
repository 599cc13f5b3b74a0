"""Builds a rank's weights from a checkpoint: names, shapes and shards of the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from services.worker.models.block_index.loading import read_block_index
from services.worker.models.checkpoint import TensorSource
from services.worker.models.compressed.loading import CompressedLoader, StreamsLoader
from services.worker.models.config import (
    CompressedConfig,
    FollowingBlock,
    LatentConfig,
    LayerConfig,
    Mixture,
    ModelConfig,
)
from services.worker.models.expert_parallel.expert_load import empty_counts
from services.worker.models.expert_parallel.local_experts import LocalExperts, RankExperts
from services.worker.models.grams.loading import GatedStreamsLoader
from services.worker.models.heads.loading import read_heads
from services.worker.models.heads.rows import alibi_slopes
from services.worker.models.hf_layers.tensor_names import GRANITE, tensor_names
from services.worker.models.latent.loading import LatentLoader, learned_frequencies
from services.worker.models.mixture.loading import read_experts, read_experts_of_tokens, read_routing
from services.worker.models.quantization.matrices import (
    Matrix,
    MatrixLoader,
    joined,
    padded,
)
from services.worker.models.residual.skips import check_skips
from services.worker.models.rope import Rope, cos_sin_table, partly_rotated, partly_rotating
from services.worker.models.sharding import LayerShard, PipelineStage, columns_of, shard_of, stage_of
from services.worker.models.shared_blocks.depths import DepthLoader, home_of, with_own_matrices
from services.worker.models.states.gated_attention import read_gated_inputs, read_head_gates
from services.worker.models.states.layer_mixers import read_state_mixer
from services.worker.models.states.multipliers import Scales, mixer_scales, mlp_scales
from services.worker.models.weights import (
    BlockIndexWeights,
    DecoderWeights,
    DenseMlp,
    FollowingWeights,
    LayerMixer,
    LayerWeights,
    LinearMlp,
    MixtureMlp,
    SharedExpert,
)
from services.worker.ops.activation import swiglustep
from services.worker.ops.interface import (
    EmbeddingTable,
    ExpertPacker,
    Ops,
    PackedExperts,
    PackedLinear,
    Routing,
)
from services.worker.ops.quantized import Scheme


def load_weights(
    checkpoint: TensorSource,
    config: ModelConfig,
    share: LayerShard,
    ops: Ops,
    device: torch.device,
    max_model_len: int,
    stage: PipelineStage | None = None,
    quantization: Scheme | None = None,
    *,
    counts_picks: bool = False,
    packer: ExpertPacker | None = None,
) -> DecoderWeights:
    """This rank's weights on `device`, packed by `ops`. Raises ModelError where a tensor is missing or misshapen.

    `stage`: None: all layers. `quantization`: what the matrices of attention, MLPs and experts are rounded to; the head
    is rounded to int8 then. Embeddings and routers are not. `counts_picks`: it is counted how often each expert is
    picked. `packer`: what packs experts; None: `ops`."""
    loader = _Loader(
        *(checkpoint, config, share, ops, device, max_model_len, quantization),
        counts_picks=counts_picks,
        packer=packer,
    )
    return loader.weights(stage or stage_of(config, 0, 1))


def load_embedding(checkpoint: TensorSource, config: ModelConfig, ops: Ops, device: torch.device) -> EmbeddingTable:
    """The whole table of words, as numbers or as codes. Raises ModelError where it is missing or misshapen."""
    return _Loader(checkpoint, config, shard_of(config, 0, 1), ops, device, 0).embedding()


def load_embedding_and_head(
    checkpoint: TensorSource, config: ModelConfig, ops: Ops, device: torch.device
) -> tuple[EmbeddingTable, PackedLinear]:
    """Both whole; a table of codes that is both is there once. Raises ModelError."""
    return _Loader(checkpoint, config, shard_of(config, 0, 1), ops, device, 0).embedding_and_head()


def load_layer(
    checkpoint: TensorSource,
    config: ModelConfig,
    ops: Ops,
    device: torch.device,
    max_model_len: int,
    attention_inputs: int | None = None,
) -> LayerWeights:
    """The whole first layer of a checkpoint. Raises ModelError where a tensor is missing or misshapen.

    `attention_inputs`: elements of the rows that queries, keys and values are made of; None: as many as of others."""
    loader = _Loader(checkpoint, config, shard_of(config, 0, 1), ops, device, max_model_len)
    loader.attention_inputs = attention_inputs or config.hidden_size
    return loader.layer(0, config.layers[0])


def load_experts(
    matrices: MatrixLoader, config: ModelConfig, packer: ExpertPacker, layer: int, experts: Sequence[int]
) -> PackedExperts:
    """Some whole experts of a layer of this number, in rising order. Raises ModelError."""
    assert config.mixture is not None, "a layer mixes"
    names = tensor_names(config.architecture)
    columns = (0, config.mixture.intermediate_size)
    number = (config.layers[layer].blocks or (layer, layer))[1]
    read = read_experts(matrices, f"{names.layers}.{number}", config.mixture, config.hidden_size, columns, experts)
    return packer.pack_experts(read.gate_up, read.down, read.biases)


class _Loader:
    def __init__(
        self,
        checkpoint: TensorSource,
        config: ModelConfig,
        share: LayerShard,
        ops: Ops,
        device: torch.device,
        max_model_len: int,
        quantization: Scheme | None = None,
        *,
        counts_picks: bool = False,
        packer: ExpertPacker | None = None,
    ) -> None:
        self._counts_picks = counts_picks
        self._packer = packer
        self._checkpoint = checkpoint
        self._config = config
        self._share = share
        self._ops = ops
        self._device = device
        self._max_model_len = max_model_len
        self._matrices = MatrixLoader(checkpoint, ops, device, quantization)
        self._tables: dict[Rope, Tensor] = {}
        self._names = tensor_names(config.architecture)
        self._blocks: dict[str, LayerWeights] = {}
        self.attention_inputs = config.attention_inputs

    def weights(self, stage: PipelineStage) -> DecoderWeights:
        tied = self._config.tied_embeddings
        table = self._words(self._names.embedding) if stage.is_first or (stage.is_last and tied) else None
        head = self._head(table) if stage.is_last else None
        check_skips(self._config.layers[stage.first_layer : stage.end_layer])
        numbers, streams = range(stage.first_layer, stage.end_layer), self._streams()
        return DecoderWeights(
            embedding=self._embedding(table, head if tied else None) if stage.is_first and table is not None else None,
            layers=tuple(self.layer(number, self._config.layers[number]) for number in numbers),
            final_norm=self._final_norm() if stage.is_last else None,
            head=head,
            first_layer=stage.first_layer,
            streams=streams.last() if streams is not None and stage.is_last else None,
        )

    def _final_norm(self) -> Tensor:
        """Ones where what is behind the last layer is normed by what makes one row of the streams."""
        if self._config.connections is not None and self._config.connections.rank:
            return torch.ones(self._config.hidden_size, device=self._device)
        return self._norm(self._names.final_norm)

    def embedding(self) -> EmbeddingTable:
        return self._embedding(self._words(self._names.embedding), None)

    def embedding_and_head(self) -> tuple[EmbeddingTable, PackedLinear]:
        table = self._words(self._names.embedding)
        head = self._head(table)
        return self._embedding(table, head if self._config.tied_embeddings else None), head

    def _head(self, table: Matrix | None) -> PackedLinear:
        words = table if self._config.tied_embeddings and table is not None else self._words(self._names.head)
        if self._config.normed_head:
            words = normalize(self._matrices.numbers(words))
        return self._matrices.pack(words, None, self._matrices.quantization and "int8")

    def _embedding(self, table: Matrix, head: PackedLinear | None) -> EmbeddingTable:
        """`head`: the same table as it was packed, of which rows of codes are read, too."""
        if isinstance(table, Tensor) or not self._ops.embeds_codes or self._config.embedding_scale is not None:
            return self._matrices.numbers(table)
        return self._matrices.pack(table, None) if head is None else head

    def _words(self, name: str) -> Matrix:
        """This rank's words of a table, padded to as many as every rank has."""
        words = self._config.vocab_size + (self._config.further_words if name == self._names.embedding else 0)
        shape = (words, self._config.hidden_size)
        table = self._matrices.read(name, shape, rows=self._share.vocab).to(self._device)
        return padded(table, self._share.padded_vocab)

    def layer(self, index: int, layer: LayerConfig) -> LayerWeights:
        config, shared = self._config, self._config.shared
        name, mlp = (f"{self._names.layers}.{number}" for number in layer.blocks or (index, index))
        if layer.loop is None and (shared is None or layer.depth is None):
            return self._whole_layer(index, layer, f"{name}.{layer.part}" if layer.part else name, mlp)
        home = name
        if shared is not None and layer.depth is not None:
            home = home_of(self._checkpoint, config, shared.block_of(layer.depth))
        if home not in self._blocks:
            self._blocks[home] = self._whole_layer(index, layer, home, home)
        if shared is None or layer.depth is None:
            entry = self._norm(self._names.final_norm) if layer.begins_loop else None
            return replace(with_own_matrices(self._blocks[home]), entry_norm=entry)
        depths = DepthLoader(self._matrices, config, self._share, shared)
        return depths.at_depth(self._blocks[home], name, home, layer.depth)

    def _whole_layer(self, index: int, layer: LayerConfig, name: str, mlp: str) -> LayerWeights:
        """Whose tensors begin with `name`, those of its MLP with `mlp`."""
        config, names = self._config, self._names
        width = None if layer.depth is None else self.attention_inputs
        behind, streams = config.post_norms or layer.norms_outputs, self._streams()
        normed = not layer.norms_outputs and not isinstance(streams, GatedStreamsLoader)
        has_mlp = layer.mixes or (layer.has_mlp and config.intermediate_size > 0)
        mixer = self._with_states(name, index) if layer.has_state else self._attention(name, index, layer)
        return LayerWeights(
            input_norm=self._norm(f"{name}.{names.input_norm}.weight", width) if normed else None,
            qkv=mixer.inputs,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            output=mixer.output,
            attention_post_norm=self._post_norm(f"{name}.{names.attention_post_norm}.weight", 0) if behind else None,
            mlp_norm=self._norm(f"{mlp}.{names.mlp_norm}.weight") if has_mlp and normed else None,
            mlp=self._mixture(mlp, index) if layer.mixes else self._mlp(self._mlp_block(mlp)) if has_mlp else None,
            mlp_post_norm=self._post_norm(f"{name}.{names.mlp_post_norm}.weight", 1) if behind else None,
            cos_sin=mixer.cos_sin,
            window=layer.window if layer.window is not None and layer.window < self._max_model_len else None,
            latent=mixer.latent,
            mixer=mixer.mixer,
            steps=mixer.steps,
            selective=mixer.selective,
            gates=mixer.gates,
            gate=mixer.gate,
            split_norm=mixer.split_norm,
            sinks=mixer.sinks,
            slopes=mixer.slopes,
            beside=layer.beside,
            row_norms=mixer.row_norms,
            scales=self._on_device(mixer_scales(config, self._share, has_state=layer.has_state)),
            residual=layer.residual,
            compressed=mixer.compressed,
            block_index=mixer.block_index,
            streams=None if streams is None else streams.of_layer(name),
            grams=streams.grams(layer.grams, name) if isinstance(streams, GatedStreamsLoader) else None,
            skips=layer.skips,
            following=tuple(map(self._following, layer.following)),
        )

    def _following(self, block: FollowingBlock) -> FollowingWeights:
        config = self._config
        layer = f"{self._names.layers}.{block.number}"
        norm, name = self._norm(f"{layer}.{block.norm}.weight"), f"{layer}.{block.module}"
        columns = columns_of(config, self._share, block.columns or config.hidden_size)
        if block.columns is not None:
            return FollowingWeights(norm, self._columns_of(name, block.columns, columns, config.mlp_bias))
        return FollowingWeights(norm, LinearMlp(self._row_parallel(name, config.hidden_size, columns, False), columns))

    def _on_device(self, scales: Scales) -> Scales:
        return None if scales is None else (scales[0].to(self._device), scales[1])

    def _attention(self, name: str, index: int, layer: LayerConfig) -> LayerMixer:
        if self._config.gated_attention:
            return self._gated_attention(f"{name}.{self._names.attention}", layer)
        if self._config.compressed is not None:
            loader = self._compressed(self._config.compressed)
            return loader.mixer(f"{name}.{self._names.attention}", layer.compression, self._table(layer.rope))
        config, dim, names = self._config, self._config.head_dim, self._names
        name = f"{name}.{names.attention}"
        latent = None if config.latent is None else self._latent(config.latent, name, index)
        value_dim = dim if config.latent is None else config.latent.value_dim
        return LayerMixer(
            inputs=latent.inputs()
            if latent is not None
            else read_heads(
                *(self._matrices, self._checkpoint, config, self._share, name), self.attention_inputs, layer.kv_heads
            ),
            q_norm=self._head_norm(f"{name}.{names.query_norm}.weight") if config.qk_norm else None,
            k_norm=self._head_norm(f"{name}.{names.key_norm}.weight") if config.qk_norm else None,
            output=self._row_parallel(
                f"{name}.{names.attention_output}",
                config.num_heads * value_dim,
                _columns_of_heads(self._share.heads, value_dim),
                config.output_bias,
            ),
            cos_sin=self._table(layer.rope),
            latent=None if latent is None else latent.weights(),
            sinks=self._sinks(f"{name}.sinks") if config.attention_sinks else None,
            slopes=alibi_slopes(config.num_heads)[slice(*self._share.heads)].to(self._device) if config.alibi else None,
            row_norms=self._row_norms(name) if config.norms_all_heads else None,
            gate=self._head_gates(name) if latent is None else latent.gate(),
            block_index=self._block_index(f"{name}.indexer") if layer.chooses else None,
        )

    def _block_index(self, name: str) -> BlockIndexWeights | None:
        index = self._config.block_index
        if index is None or self._max_model_len <= index.longest:
            return None
        return read_block_index(self._matrices, self._config, index, self._share, name, self._norm)

    def _head_gates(self, name: str) -> PackedLinear | None:
        config = self._config
        return read_head_gates(self._matrices, config, self._share, name) if config.head_gates else None

    def _streams(self) -> StreamsLoader | GatedStreamsLoader | None:
        config = self._config
        if config.connections is None:
            return None
        if config.connections.rank:
            return GatedStreamsLoader(self._matrices, self._device, config, config.connections, self._norm)
        return StreamsLoader(self._matrices, self._ops, self._device, config.hidden_size, config.connections)

    def _head_norm(self, name: str) -> Tensor:
        """Of elements of heads, in the order that these are in."""
        config, weight = self._config, self._norm(name, self._config.head_dim)
        if not config.reorders_heads:
            return weight
        return weight[partly_rotated(config.head_dim, config.rotated_dim, pairs=config.rotary_pairs).to(self._device)]

    def _row_norms(self, name: str) -> tuple[Tensor, Tensor]:
        """Of this rank's heads' queries and keys."""
        config, share, names = self._config, self._share, self._names
        parts = (
            (names.query_norm, config.num_heads, share.heads),
            (names.key_norm, config.num_kv_heads, share.kv_heads),
        )
        queries, keys = (
            self._checkpoint.read(
                f"{name}.{norm}.weight", (heads * config.head_dim,), rows=_columns_of_heads(own, config.head_dim)
            )
            for norm, heads, own in parts
        )
        return queries.float().to(self._device), keys.float().to(self._device)

    def _sinks(self, name: str) -> Tensor:
        read = self._checkpoint.read(name, (self._config.num_heads,), rows=self._share.heads)
        return read.float().to(self._device)

    def _gated_attention(self, name: str, layer: LayerConfig) -> LayerMixer:
        config, inner = self._config, self._config.num_heads * self._config.head_dim
        inputs = read_gated_inputs(self._matrices, config, self._share, name)
        return LayerMixer(
            inputs=inputs.qkv,
            q_norm=self._head_norm(f"{name}.q_norm.weight"),
            k_norm=self._head_norm(f"{name}.k_norm.weight"),
            output=self._row_parallel(
                f"{name}.o_proj", inner, _columns_of_heads(self._share.heads, config.head_dim), config.output_bias
            ),
            cos_sin=self._table(layer.rope),
            gate=inputs.gate,
            block_index=self._block_index(f"{name}.indexer") if layer.chooses else None,
        )

    def _with_states(self, name: str, index: int) -> LayerMixer:
        assert self._share.mixer is not None, "a layer has states"
        how = (self._matrices, self._device, self._config, self._share.mixer)
        return read_state_mixer(*how, f"{name}.{self._names.mixer}", index)

    def _compressed(self, compressed: CompressedConfig) -> CompressedLoader:
        return CompressedLoader(self._matrices, self._ops, self._device, self._config, compressed, self._share)

    def _latent(self, latent: LatentConfig, name: str, index: int) -> LatentLoader:
        how = (self._matrices, self._ops, self._device, self._config, latent.of_layer(index))
        return LatentLoader(*how, self._share.heads, name, index)

    def _mlp_block(self, layer: str) -> str:
        """What the names of a layer's MLP, or of its mixture, begin with."""
        names, own = self._names, f"{layer}.{self._names.mlp}"
        if names.other_mlp is None:
            return own
        other = f"{layer}.{names.other_mlp}"
        return (
            other if f"{other}.gate.weight" in self._checkpoint or self._matrices.has(f"{other}.{names.down}") else own
        )

    def _mlp(self, name: str) -> DenseMlp:
        return self._columns_of(name, self._config.intermediate_size, self._share.mlp, self._config.mlp_bias)

    def _columns_of(self, name: str, size: int, columns: tuple[int, int], bias: bool) -> DenseMlp:
        """This rank's columns of an MLP of `size`."""
        names = self._names
        down = self._row_parallel(f"{name}.{names.down}", size, columns, bias or self._config.down_bias)
        together = None if names.gate_and_up is None else f"{name}.{names.gate_and_up}"
        if together is not None and (self._matrices.has(together) or not self._matrices.has(f"{name}.{names.ups[0]}")):
            return DenseMlp(self._gates_and_ups(together, size, columns), down)
        parts = [(f"{name}.{part}", size, columns) for part in names.ups]
        scales = self._on_device(mlp_scales(self._config, columns[1] - columns[0]))
        return DenseMlp(self._column_parallel(parts, bias), down, scales)

    def _gates_and_ups(self, name: str, size: int, columns: tuple[int, int]) -> PackedLinear:
        """Of one matrix."""
        first, end = columns
        parts = [
            self._matrices.read(name, (2 * size, self._config.hidden_size), rows=rows)
            for rows in ((first, end), (size + first, size + end))
        ]
        return self._matrices.pack_linear(self._matrices.join(parts), None)

    def _mixture(self, name: str, index: int) -> MixtureMlp:
        mixture, hidden, share = self._config.mixture, self._config.hidden_size, self._share
        assert mixture is not None, "a layer mixes"
        placement = share.placements[index] if share.placements else None
        hashed, limits = self._config.layers[index].hashed, self._config.layers[index].limits
        own = None if placement is None else placement.experts_of(share.rank)
        read = read_experts(self._matrices, name, mixture, hidden, share.experts, own)
        local = None if placement is None else LocalExperts.of(placement, share.rank, self._device)
        return MixtureMlp(
            router=self._ops.pack_exactly(read.router, normed=True)
            if mixture.exact_router
            else self._matrices.pack(read.router, read.router_bias),
            experts=RankExperts((self._packer or self._ops).pack_experts(read.gate_up, read.down, read.biases), local),
            routing=self._routing(None if hashed else name, mixture),
            shared=None if mixture.shared_size is None else self._shared_expert(name, mixture, limits.shared),
            counts=empty_counts(mixture.experts, self._device) if self._counts_picks else None,
            activation=mixture.activation or swiglustep(limits.routed),
            by_token=read_experts_of_tokens(self._matrices, name, self._config.vocab_size, mixture) if hashed else None,
        )

    def _routing(self, layer: str | None, mixture: Mixture) -> Routing:
        """`layer`: whose experts are not those of tokens."""
        correction = None if layer is None else f"{self._mlp_block(layer)}.{self._names.expert_correction}"
        return read_routing(self._checkpoint, correction, mixture, self._device)

    def _shared_expert(self, layer: str, mixture: Mixture, limit: float | None) -> SharedExpert:
        """By Granite's names, by DeepSeek's, or, with a gate, by Qwen's."""
        size = mixture.shared_size
        assert size is not None, "there is one"
        if self._config.architecture == GRANITE:
            mlp = self._columns_of(f"{layer}.{self._names.mlp}", size, self._share.shared_expert, bias=False)
            return SharedExpert(mlp, gate=None)
        block = f"{self._mlp_block(layer)}.shared_expert"
        if not mixture.shared_gated:
            mlp = self._columns_of(f"{block}s", size, self._share.shared_expert, bias=False)
            return SharedExpert(mlp, gate=None, activation=swiglustep(limit))
        mlp = self._columns_of(block, size, self._share.shared_expert, bias=False)
        gate = self._checkpoint.read(f"{block}_gate.weight", (1, self._config.hidden_size))
        return SharedExpert(mlp, self._matrices.pack(gate, None))

    def _column_parallel(
        self, parts: list[tuple[str, int, tuple[int, int]]], bias: bool, inputs: int | None = None
    ) -> PackedLinear:
        """One matrix of this rank's rows of several (name, output size, rows): one product instead of many."""
        read, inputs = self._checkpoint.read, inputs or self._config.hidden_size
        weight = self._matrices.join(
            [self._matrices.read(name, (size, inputs), rows=rows) for name, size, rows in parts]
        )
        biases = [read(f"{name}.bias", (size,), rows=rows) for name, size, rows in parts] if bias else []
        return self._matrices.pack_linear(weight, joined(biases) if bias else None)

    def _row_parallel(self, name: str, size: int, columns: tuple[int, int], bias: bool) -> PackedLinear:
        """This rank's columns; rank 0 alone adds the bias, as the products are summed over the ranks."""
        hidden = self._config.hidden_size
        adds_bias = bias and columns[0] == 0
        own_bias = self._checkpoint.read(f"{name}.bias", (hidden,)) if adds_bias else None
        return self._matrices.pack_inputs(name, (hidden, size), columns, own_bias)

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        others = () if name in self._checkpoint else (name.replace(*pair) for pair in self._names.renamed)
        stored = next((other for other in others if other in self._checkpoint), name)
        weight = self._checkpoint.read(stored, (size or self._config.hidden_size,)).float()
        if self._config.layer_norms:
            bias = self._checkpoint.read(f"{stored.removesuffix('weight')}bias", (self._config.hidden_size,))
            weight = torch.stack((weight, bias.float()))
        return (weight + 1.0 if self._config.norm_offset else weight).to(self._device)

    def _post_norm(self, name: str, place: int) -> Tensor:
        """Behind attention (0), or behind an MLP (1)."""
        weight, offsets = self._norm(name), self._config.post_norm_offsets
        return weight if offsets is None else weight + (offsets[place] - 1.0)

    def _table(self, rope: Rope) -> Tensor:
        if rope not in self._tables:
            config = self._config
            learned = learned_frequencies(self._checkpoint, config.latent)
            table = cos_sin_table(rope, config.rotated_dim, self._max_model_len, learned)
            whole = config.head_dim if config.latent is None else config.latent.rope_dim
            if config.rotary_dim not in (None, whole):
                table = partly_rotating(table, whole)
            self._tables[rope] = table.to(self._device)
        return self._tables[rope]


def _columns_of_heads(heads: tuple[int, int], head_dim: int) -> tuple[int, int]:
    return heads[0] * head_dim, heads[1] * head_dim
