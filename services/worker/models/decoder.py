"""One forward pass of a decoder or a stage of it. Knows tensors and `Ops`; no sequences, no sampling, no files."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial

import torch
from torch import Tensor

from services.worker.distributed.communicator import Communicator, Pipeline, SingleStage
from services.worker.distributed.residual_rows import ResidualRows
from services.worker.distributed.row_exchange import RowExchange
from services.worker.kv.copier import RankKvCache
from services.worker.kv.layer_groups import LayerGroups, allocate_caches, distinct
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.expert_parallel.rearrangement import ExpertRearranger
from services.worker.models.latent.attention import LatentAttention
from services.worker.models.native_decoder import NativeDecoder, native_decoder
from services.worker.models.residual.stream import FeatureTaps, ResidualStream
from services.worker.models.rope import query_scales, rotations
from services.worker.models.sharding import LayerShard
from services.worker.models.shared_blocks.blocks import block_output, with_low_rank
from services.worker.models.states.checkpoint_pages import CheckpointPages, checkpoint_pages
from services.worker.models.states.mixing import StateMixing
from services.worker.models.states.sequence_states import empty_states
from services.worker.models.weights import (
    DecoderWeights,
    ForwardPass,
    KvCaches,
    LayerWeights,
    MixtureMlp,
    Mlp,
    apply_mlp,
    mix_shared_rows,
)
from services.worker.ops.interface import BatchMeta, InputRows, Ops, cached_head_dim
from shared.messages.kvstore import KvLayout


class Decoder:
    """Turns token ids into logits, and fills the KV caches on the way."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        share: LayerShard,
        ops: Ops,
        communicator: Communicator,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._share = share
        self._communicator = communicator
        self._pipeline = pipeline or SingleStage()
        self._embedding_scale = _round_scale(config.embedding_scale, weights)
        self._growth: Tensor | None = None
        """By `ModelConfig.query_steps`: of as many positions as are rotated."""
        if (steps := config.query_steps) is not None:
            self._growth = query_scales(steps.beta, steps.length, weights.layers[0].cos_sin)
        self._groups: LayerGroups | None = None
        self._taps: tuple[int, ...] = ()
        self.rearranger: ExpertRearranger | None = None
        """Where experts are moved while it computes."""
        self._rows = ResidualRows(communicator)
        self._routed: RowExchange | None = None
        self._compute_by(ops)

    def _compute_by(self, ops: Ops) -> None:
        """Has `ops` compute. A subclass that overrides a part of the pass does without the C++ library's, which is one
        call."""
        self._ops, config = ops, self._config
        self._latent: LatentAttention | None = None
        if config.latent is not None:
            self._latent = LatentAttention(config.latent, ops, self._share.num_heads, config.attention_scale)
        self._states = StateMixing(ops, self._communicator, config.norm_eps)
        self._stream = ResidualStream(ops, config)
        alone = self._communicator.world_size == self._pipeline.stages == 1
        self._native = native_decoder(config, self._weights, ops) if alone and type(self) is Decoder else None
        if self._native is not None and self._groups is not None:
            self._native.use_groups(self._groups.group_of)
        if self._native is not None and self._taps:
            self._native.use_taps(self._taps)

    @property
    def ops_name(self) -> str:
        """The name of its operations, for logs and reports."""
        return self._ops.name

    @property
    def ops(self) -> Ops:
        """The operations that it computes by."""
        return self._ops

    @property
    def fastest_pass(self) -> ForwardPass:
        """The C++ library's own pass, if there is one that can compute every step; else `forward`."""
        return self.forward if self._native is None or self._config.states is not None else self._native.forward

    @property
    def capturable(self) -> bool:
        """Whether graphs can capture the pass: attention is not latent, as computing that asks the device how long
        contexts are; and all experts have gates, as experts without are multiplied one after the other."""
        return self._latent is None and not (self._config.activation == "relu2" and self._config.mixture is not None)

    @property
    def native(self) -> NativeDecoder | None:
        """The whole pass as one call of the C++ library, if that has one for this rank, which computes alone."""
        return self._native

    def on(self, ops: Ops) -> Decoder:
        """The same model with the same weights and groups of layers, on other operations. These must be able to use the
        weights as they are packed."""
        decoder = copy(self)
        decoder._compute_by(ops)
        return decoder

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._weights.layers[0].cos_sin.device

    @property
    def share(self) -> LayerShard:
        """Which heads, columns and words are this rank's."""
        return self._share

    @property
    def weights(self) -> DecoderWeights:
        """This rank's weights. Never written to."""
        return self._weights

    @property
    def wire(self) -> str:
        """How rows pass between ranks; all ranks must say the same."""
        rows = f"rows of {self._ops.empty_rows(1, 1).dtype}{self._rows}"
        return f"{rows}, experts {self._share.experts_digest}" if self._share.placements else rows

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `CausalLm.windows`."""
        return tuple(layer.window for layer in self._config.layers)

    def use_groups(self, groups: LayerGroups) -> None:
        """See `CausalLm.use_groups`."""
        self._groups = groups
        if self._native is not None:
            self._native.use_groups(groups.group_of)

    def share_rows(self, rows: ResidualRows, routed: RowExchange | None) -> None:
        """From here on this rank has its share of a step's rows between products, by sequence parallelism. `routed`: of
        the stage's ranks, by which rows reach whole experts; None: ranks have shares of all experts."""
        self._rows, self._routed = rows, routed

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """From here on features are what goes into the layers of these numbers, side by side in their order; the number
        of layers stands for what comes out of the last one. Whole models only. Raises ModelError for a package's model
        that has a pass of its own."""
        if type(self).forward is not Decoder.forward and self._config.plugin is not None:
            raise ModelError(f"the package of this model, {self._config.plugin}, computes its hidden states by itself")
        if self._config.residual_normed:
            raise ModelError("layers of this model pass normed rows on: what goes into a layer is not kept")
        if any(layer.following or layer.loop is not None for layer in self._config.layers):
            raise ModelError("layers of this model are several blocks each or loops: a drafter's layer_ids count these")
        self._taps = layers
        if self._native is not None:
            self._native.use_taps(layers)

    @property
    def parts_of_token(self) -> tuple[int, int] | None:
        """Elements of the two parts that a layer's cache has of a token, if they belong to no head; None: they are keys
        and values of heads."""
        latent = self._config.latent
        return None if latent is None else (latent.kv_rank, latent.beside_dim)

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """See `CausalLm.allocate_kv`."""
        parts, heads, dim = self.parts_of_token, self._share.num_kv_heads, self._config.head_dim

        def allocate() -> tuple[Tensor, Tensor]:
            if parts is not None:
                return self._ops.latents.allocate(num_blocks, *parts)
            return self._ops.allocate_kv(num_blocks, heads, dim)

        if self._config.states is None:
            return allocate_caches(len(self._weights.layers), self._groups, allocate)
        mixers = [layer.mixer for layer in self._weights.layers]
        return [allocate() if each is None else empty_states(each, sequences, self.device) for each in mixers]

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """See `CausalLm.share_kv`."""
        if self._config.states is not None:
            alone = self._pipeline.stages == 1
            return self._pages_for(model).share(checkpoints, caches, self._ops) if checkpoints and alone else None
        first, last = self._share.kv_heads
        parts, keys = self.parts_of_token, caches[0][0]
        different, layers, first_layer = caches, self._config.num_layers, self._weights.first_layer
        if self._groups is not None:  # a record is a block of one group
            different, model = distinct(caches), self._groups.digest(model)
            layers, first_layer = sum(self._groups.stages), self._groups.first_cache
        dim = cached_head_dim(keys.dtype, self._config.head_dim)
        copier = self._ops.kv_copier(different, dim) if parts is None else self._ops.latents.copier(different)
        return RankKvCache(
            layout=KvLayout(
                model=model,
                dtype=str(keys.dtype).removeprefix("torch."),
                layers=layers,
                kv_heads=self._config.num_kv_heads,
                head_dim=dim if parts is None else parts[0],
                block_size=self._ops.block_size,
                value_dim=None if parts is None else parts[1],
            ),
            first_head=first,
            num_heads=last - first,
            writes=self._share.first_of_kv_heads,
            num_blocks=len(keys),
            copier=copier,
            first_layer=first_layer,
            num_layers=len(different),
            caches=caches,
            operations=self._ops.name,
            device=keys.device.type,
        )

    @property
    def checkpoint_pages(self) -> CheckpointPages | None:
        """See `CausalLm.checkpoint_pages`."""
        return self._pages_for("") if self.state_bytes else None

    def _pages_for(self, model: str) -> CheckpointPages:
        how = (self._config, self._share, self._ops, self._communicator, self.state_bytes)
        return checkpoint_pages(*how, self._blocks_digest(model), self._layers_behind)

    def _blocks_digest(self, model: str) -> str:
        """A digest that distinguishes blocks of these layers, and of the layers after them, from blocks of others."""
        return model

    @property
    def _layers_behind(self) -> int:
        """Caches of blocks behind those of the layers."""
        return 0

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        if (parts := self.parts_of_token) is not None:
            per_layer = self._ops.latents.block_bytes(*parts)
        else:
            per_layer = self._ops.kv_block_bytes(self._share.num_kv_heads, self._config.head_dim)
        attending = sum(layer.mixer is None for layer in self._weights.layers)
        return per_layer * (attending if self._groups is None else self._groups.caches)

    @property
    def state_bytes(self) -> int:
        """See `CausalLm.state_bytes`."""
        states, shard = self._config.states, self._share.mixer
        if states is None or shard is None:
            return 0
        mixers = sum(layer.mixer is not None for layer in self._weights.layers)
        return mixers * shard.own(states).state_elements * torch.float32.itemsize

    def empty_features(self, rows: int) -> Tensor:
        """[rows, hidden] of memory that `forward` fills with features; [rows, taps * hidden] where there are taps."""
        return self._ops.empty_rows(rows, self._config.hidden_size * max(1, len(self._taps)))

    def check_inputs(self, *, of_clients: bool) -> None:
        """See `CausalLm.check_inputs`."""
        if type(self).input_rows is not Decoder.input_rows:
            raise ModelError("enable_prompt_embeds: the package of this model has changed what its layers begin with")

    @property
    def rotations(self) -> Callable[[Tensor], Tensor] | None:
        """See `CausalLm.rotations`. All layers that attend have the same."""
        axes, tables = self._config.rope_axes, (each.cos_sin for each in self._weights.layers if each.mixer is None)
        return next((partial(rotations, table, torch.tensor(axes)) for table in tables if axes), None)

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """ids [n] int32 → logits [R, vocab] of `meta.logits_rows` on rank 0 of the last stage; None where R is 0.

        None on all other ranks; stages before the last one pass their rows on to the stage behind. Where `features`
        [n, hidden] is given, on all ranks of a stage or on none, it holds the last hidden state of every row then,
        normed; or [n, taps * hidden] what `use_taps` asks for."""
        if self.rearranger is not None:
            self.rearranger.begin_step()
        if self._native is not None and self._native.computes(meta):
            return self._native.forward(ids, meta, caches, features)
        layers, step, beside = self._weights.layers, meta, None
        self._rows.begin(len(ids))
        residual, given = self._first_rows(ids, meta)
        taps = FeatureTaps(features, self._taps, self._rows)
        taps.keep(0, residual)
        x, residual = self._stream.begin(residual, layers[0])
        for number, (layer, following, cache) in enumerate(zip(layers[:-1], layers[1:], caches[:-1], strict=True)):
            meta = step if self._groups is None else step.of_group(self._groups.group_of[number])
            queries = self.queries(layer, self._rows.gathered(x), meta, cache)
            mixed = self.attend(layer, queries, meta, cache, None, beside)
            if (beside := mixed if following.beside else None) is not None:
                continue
            x, residual = self.mlp_output(layer, mixed, residual)
            if given is not None:
                residual = given.add_level(residual, self._config.level_before(self._weights.first_layer + number + 1))
            x, residual = self._stream.passed(x, residual, layer, following)
            taps.keep(number + 1, residual)
        last, cache = layers[-1], caches[-1]
        meta = step if self._groups is None else step.of_group(self._groups.group_of[-1])
        queries = self.queries(last, self._rows.gathered(x), meta, cache)
        if self._weights.final_norm is None:
            x, residual = self.mlp_output(last, self.attend(last, queries, meta, cache, None, beside), residual)
            if given is not None:
                residual = given.add_level(residual, self._config.level_before(self._weights.first_layer + len(layers)))
            self._pipeline.send(self._stream.sent(residual.add_(x)))
            return None
        if features is not None and self.ends_every_row:
            mixed = self.attend(last, queries, meta, cache, None, beside)
            x, residual = self._mlp(last, mixed, residual, self._weights.final_norm)
            x = self._rows.gathered(x)
            if self._taps:
                taps.keep(len(layers), residual)
            else:
                features.copy_(x)
            return self.logits(x.index_select(0, meta.logits_rows)) if len(meta.logits_rows) else None
        if not len(meta.logits_rows):
            return None
        if len(meta.logits_rows) < len(ids):
            beside = None if beside is None else self._rows.select(beside, meta.logits_rows, again=True)
            residual = self._rows.select(residual, meta.logits_rows)
        x = self.attend(last, queries, meta, cache, meta.logits_rows, beside)
        x, _ = self._mlp(last, x, residual, self._weights.final_norm)
        return self.logits(self._rows.gathered(x))

    def _first_rows(self, ids: Tensor, meta: BatchMeta) -> tuple[Tensor, InputRows | None]:
        """This rank's rows that this stage's layers begin with, and those of them that a client has given."""
        given, own, residual = meta.inputs, self._rows.own, self.input_rows(ids)
        if given is not None and own is not None:
            here = (given.rows >= own.first) & (given.rows < own.end)
            given = InputRows(given.rows[here] - own.first, given.values[here])
        if given is not None and self._weights.embedding is not None:
            residual = given.put_into(residual, self._embedding_scale if self._config.scales_inputs else None)
            residual = given.add_level(residual, self._config.level_before(0))
        return residual, given

    @property
    def ends_every_row(self) -> bool:
        """Whether the last layer computes all rows where there are features."""
        return not self._taps or len(self._weights.layers) in self._taps

    def input_rows(self, ids: Tensor) -> Tensor:
        """[n, hidden] that this stage's layers begin with; of these, this rank's rows."""
        if self._weights.embedding is None:
            own = self._rows.count(len(ids))
            return self._pipeline.receive(self._ops.empty_rows(own, self._stream.width))
        x = self._embed(ids)
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _embed(self, ids: Tensor) -> Tensor:
        """Each rank has some of the words; the sum of one word's row and zeros is that row, to the last bit."""
        embedding = self._weights.embedding
        assert embedding is not None, "it is the first stage"
        if self._communicator.world_size == 1:
            return self._ops.embed(ids, embedding)
        own = ids - self._share.vocab[0]
        inside = (own >= 0) & (own < self._share.vocab[1] - self._share.vocab[0])
        x = self._ops.embed(own.clamp_(0, self._share.padded_vocab - 1), embedding)
        return self._rows.summed(x.mul_(inside.unsqueeze(1)))

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [n, hidden] → queries [n, H, D]; keys and values, or latents, are in the cache then. Where
        attention is gated [2, n, H, D], queries and gates. Of a mixer with states all that `attend` is to project,
        [n, H * P]; states are in the cache then."""
        if layer.mixer is not None:
            return self._states.mixed(layer, self._inputs(layer, x), x, meta, cache)
        if self._latent is not None:
            return self._grown(self._latent.queries(layer, x, meta, cache), meta)
        queries = self._ops.rope_and_store(
            self._inputs(layer, x),
            meta,
            layer.cos_sin,
            *cache,
            heads=self._share.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self._config.norm_eps,
        )
        if layer.gate is None:
            return self._grown(queries, meta)
        return torch.stack((queries, self._ops.linear(x, layer.gate).view(queries.shape)))

    def _grown(self, queries: Tensor, meta: BatchMeta) -> Tensor:
        """queries [n, H, D] by their positions; see `ModelConfig.query_steps`."""
        if (steps := self._config.query_steps) is None or self._growth is None:
            return queries
        scale = self._growth.index_select(0, meta.positions // steps.length)
        return queries * scale[:, None, None].to(queries.dtype)

    def _inputs(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """x [n, hidden] → what a mixer begins with."""
        inputs = self._ops.linear(x, layer.qkv)
        if layer.depth is not None:
            inputs = with_low_rank(self._ops, inputs, x, layer.depth.qkv)
        if layer.row_norms is not None:
            inputs = self._states.rows_normed(inputs, layer.row_norms)
        return inputs if layer.scales is None else inputs.mul_(layer.scales[0])

    def attend(
        self,
        layer: LayerWeights,
        queries: Tensor,
        meta: BatchMeta,
        cache: tuple[Tensor, Tensor],
        rows: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """What `queries` and the layer `beside` gave → [n, hidden], or that of `rows` only; of these, this rank's."""
        if layer.mixer is not None:
            mixed = queries
        elif self._latent is not None:
            mixed = self._latent.attend(layer, queries, meta, cache)
        elif layer.gate is not None:
            mixed = self._ops.sigmoid_gated(self._attention(layer, queries[0], meta, cache), queries[1].flatten(1))
        else:
            mixed = self._attention(layer, queries, meta, cache)
        if rows is not None and len(rows) < len(mixed):
            mixed = mixed.index_select(0, rows)
        x = self._rows.summed(self._ops.linear(mixed, layer.output))
        if layer.attention_post_norm is not None:
            x = self._ops.rms_norm(x, layer.attention_post_norm, self._config.norm_eps)
        if layer.scales is not None:
            x = x.mul_(layer.scales[1])
        return self._stream.scaled(x if beside is None else x.add_(beside), layer.residual and layer.residual[0])

    def _attention(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """queries [n, H, D] → [n, H * D]"""
        return self._ops.paged_attention(
            queries,
            *cache,
            meta,
            scale=self._config.attention_scale,
            window=layer.window,
            softcap=self._config.attention_softcap,
            sinks=layer.sinks,
            alibi_slopes=layer.slopes,
        )

    def _mlp(self, layer: LayerWeights, x: Tensor, residual: Tensor, following_norm: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's output and the residual → (the next block's normed input, the residual)."""
        x, residual = self.mlp_output(layer, x, residual)
        return self._stream.joined(x, residual, following_norm)

    def mlp_output(self, layer: LayerWeights, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's output and the residual → (the MLP's output, the residual to add it to)."""
        before, behind = layer.residual or (None, None)
        residual = self._stream.kept(residual, before)
        for each in layer.following:
            x, residual = self._stream.joined(x, residual, each.norm)
            x = self._mlp_sum(layer, each.mlp, x)
        if layer.mlp is None:
            return x, residual
        if layer.depth is not None:
            return block_output(self._ops, self._rows, layer, x, self._config.norm_eps), residual
        x, residual = self._stream.joined(x, residual, layer.mlp_norm)
        x = self._mlp_sum(layer, layer.mlp, x)
        if layer.mlp_post_norm is not None:
            x = self._ops.rms_norm(x, layer.mlp_post_norm, self._config.norm_eps)
        return self._stream.scaled(x, behind), self._stream.kept(residual, behind)

    def _mlp_sum(self, layer: LayerWeights, mlp: Mlp, x: Tensor) -> Tensor:
        """x, this rank's rows, normed → what the layer's MLP makes of them, that of all ranks."""
        activation, shares = self._config.activation, self._rows.shares
        if self._routed is None or shares is None or not isinstance(mlp, MixtureMlp):
            return self._rows.summed(apply_mlp(self._ops, mlp, self._rows.gathered(x), activation))
        counts = [share.end - share.first for share in shares]
        return mix_shared_rows(self._ops, mlp, x, self._routed, counts, activation)

    def logits(self, x: Tensor) -> Tensor | None:
        """x [R, hidden], normed → [R, vocab] on rank 0, else None."""
        assert self._weights.head is not None, "only the last stage comes here"
        parts = self._communicator.gather(self._ops.linear(x, self._weights.head))
        if not parts:
            return None
        logits = parts[0] if len(parts) == 1 else _joined(parts, self._config.vocab_size)
        if self._config.logits_divisor is not None:
            logits = logits / self._config.logits_divisor
        cap = self._config.logits_softcap
        return logits if cap is None else cap * (logits / cap).tanh()


def _round_scale(scale: float | None, weights: DecoderWeights) -> float | None:
    """Gemma was trained with the factor rounded to the weights' dtype. A number, as a tensor would have to be sent to
    the device in every step."""
    table = weights.embedding
    return float(torch.tensor(scale, dtype=table.dtype)) if scale is not None and isinstance(table, Tensor) else None


def _joined(parts: list[Tensor], vocab_size: int) -> Tensor:
    """Each rank's words side by side; the last ranks' shares are padded."""
    return torch.cat(parts, dim=1)[:, :vocab_size]
