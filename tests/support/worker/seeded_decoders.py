"""Decoders of any configuration with small random weights, which are the same every time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from services.worker.distributed.communicator import SingleRank
from services.worker.models.config import (
    ConvolutionConfig,
    DeltaConfig,
    ExpertLimits,
    LatentConfig,
    LayerConfig,
    LightningConfig,
    Mixture,
    ModelConfig,
    SelectiveConfig,
    StateConfig,
)
from services.worker.models.decoder import Decoder
from services.worker.models.expert_parallel.expert_load import empty_counts
from services.worker.models.expert_parallel.local_experts import RankExperts
from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.models.sharding import shard_of
from services.worker.models.states.multipliers import mixer_scales, mlp_scales
from services.worker.models.weights import (
    DecoderWeights,
    DenseMlp,
    LatentWeights,
    LayerWeights,
    LowRankGates,
    MixtureMlp,
    Mlp,
    SelectiveWeights,
    SharedExpert,
)
from services.worker.ops.activation import swiglustep
from services.worker.ops.interface import DeltaNet, Routing, SelectiveSpace, ShortConvolution, StateMixer, StateSpace
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import ExpertBiases, QuantizedStack, Scheme, WeightStack, quantize, stack_outputs
from tests.support.worker.native_batches import random
from tests.support.worker.state_spaces import lightning


class SeededWeights:
    """Small random tensors, each another."""

    def __init__(self, ops: NativeOps, dtype: torch.dtype) -> None:
        self.ops, self.dtype, self.seed = ops, dtype, 0

    def tensor(self, *shape: int) -> Tensor:
        self.seed += 1
        return random(*shape, seed=self.seed)

    def norm(self, size: int) -> Tensor:
        return self.tensor(size) * 0.1 + 1

    def linear(self, out: int, inputs: int, biased: bool) -> object:
        weight = (self.tensor(out, inputs) * inputs**-0.5).to(self.dtype)
        return self.ops.pack_linear(weight, self.tensor(out).to(self.dtype) if biased else None)

    def mlp(self, config: ModelConfig, size: int, biased: bool) -> DenseMlp:
        hidden, ups = config.hidden_size, size if config.activation == "relu2" else 2 * size
        scales = mlp_scales(config, size)
        return DenseMlp(self.linear(ups, hidden, biased), self.linear(hidden, size, biased), scales)

    def latents(self, latent: LatentConfig, heads: int) -> LatentWeights:
        def stack(out: int, inputs: int) -> object:
            return self.ops.latents.pack_heads((self.tensor(heads, out, inputs) * inputs**-0.5).to(self.dtype))

        rank, queries = latent.q_rank, heads * latent.query_dim
        return LatentWeights(
            q_norm=None if rank is None else self.norm(rank),
            q_up=None if rank is None else self.linear(queries, rank, False),
            kv_norm=self.norm(latent.kv_rank),
            keys_up=stack(latent.kv_rank, latent.nope_dim),
            values_up=stack(latent.value_dim, latent.kv_rank),
        )

    def selective(self, sizes: SelectiveConfig) -> SelectiveWeights:
        parts = (sizes.step_rank, sizes.state_dim, sizes.state_dim)
        norms = None if sizes.norm_eps is None else tuple(map(self.norm, parts))
        made, steps = self.linear(sizes.made, sizes.heads, False), self.linear(sizes.heads, sizes.step_rank, False)
        return SelectiveWeights(made, steps, parts, norms, sizes.norm_eps or 0.0)

    def gates(self, sizes: DeltaConfig, rank: int) -> LowRankGates:
        return LowRankGates(self.linear(sizes.keys, rank, False), self.linear(sizes.inner, rank, False), rank)

    def mixer(self, states: StateConfig) -> StateMixer:
        heads = states.heads
        if isinstance(states, ConvolutionConfig):
            return ShortConvolution(self.tensor(states.kernel, heads), self.tensor(heads) * 0.1)
        if isinstance(states, SelectiveConfig):
            return SelectiveSpace(
                conv_weight=self.tensor(states.kernel, heads) * 0.5,
                conv_bias=self.tensor(heads) * 0.1,
                decay=-self.tensor(heads, states.state_dim).abs(),
                skip=self.tensor(heads),
                step_bias=self.tensor(heads) - 1,
            )
        if isinstance(states, LightningConfig):
            return lightning(heads, states.head_dim)
        channels = states.conv_dim
        net = DeltaNet(
            *(heads, states.head_dim, states.groups, states.state_dim),
            conv_weight=self.tensor(states.kernel, channels) * 0.5,
            conv_bias=self.tensor(channels) * 0.1,
            decay=-self.tensor(heads).abs(),
            step_bias=self.tensor(heads) - 1,
            norm=self.norm(states.head_dim),
            eps=1e-6,
        )
        if isinstance(states, DeltaConfig):
            if not states.by_element:
                return net
            return net._replace(step_bias=self.tensor(heads, states.state_dim) - 1, lower_bound=states.lower_bound)
        shared = {name: value for name, value in net._asdict().items() if name in StateSpace._fields}
        return StateSpace(**shared | {"skip": self.tensor(heads), "norm": self.norm(states.inner)})

    def mixture(self, config: ModelConfig, mixture: Mixture, limits: ExpertLimits, scheme: Scheme | None) -> MixtureMlp:
        def stack(out: int, inputs: int) -> WeightStack:
            whole = (self.tensor(mixture.experts, out, inputs) * inputs**-0.5).to(self.dtype)
            if scheme is None:
                return whole
            return QuantizedStack(stack_outputs([quantize(each, scheme) for each in whole]), mixture.experts)

        hidden, size, shared = config.hidden_size, mixture.intermediate_size, None
        ups = size if config.activation == "relu2" else 2 * size
        if mixture.shared_size is not None:
            gate = self.linear(1, hidden, False) if mixture.shared_gated else None
            shared = SharedExpert(self.mlp(config, mixture.shared_size, False), gate, swiglustep(limits.shared))
        biases = None
        if mixture.biased:
            biases = ExpertBiases(self.tensor(mixture.experts, 2 * size), self.tensor(mixture.experts, hidden))
        return MixtureMlp(
            router=self.ops.pack_exactly(self.tensor(mixture.experts, hidden) * hidden**-0.5, normed=True)
            if mixture.exact_router
            else self.linear(mixture.experts, hidden, mixture.biased),
            experts=RankExperts(self.ops.pack_experts(stack(ups, hidden), stack(hidden, size), biases)),
            routing=Routing(
                chosen=mixture.chosen,
                renormalised=mixture.renormalised,
                scoring=mixture.scoring,
                bias=self.tensor(mixture.experts) if mixture.corrected else None,
                scale=mixture.scale,
            ),
            shared=shared,
            counts=empty_counts(mixture.experts, torch.device("cpu")),
            activation=swiglustep(limits.routed),
        )


def seeded_decoder(config: ModelConfig, ops: NativeOps, dtype: torch.dtype, scheme: Scheme | None = None) -> Decoder:
    """`scheme`: in how many bits experts are."""
    made, share = SeededWeights(ops, dtype), shard_of(config, 0, 1)
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim

    def mlp(at: LayerConfig) -> Mlp | None:
        if at.mixes and config.mixture is not None:
            return made.mixture(config, config.mixture, at.limits, scheme)
        return made.mlp(config, config.intermediate_size, config.mlp_bias) if has_mlp(at) else None

    def has_mlp(at: LayerConfig) -> bool:
        return at.has_mlp and (at.mixes or config.intermediate_size > 0)

    def layer(at: LayerConfig) -> LayerWeights:
        return LayerWeights(
            input_norm=made.norm(hidden),
            qkv=made.linear((heads + 2 * config.num_kv_heads) * dim, hidden, config.qkv_bias),
            q_norm=made.norm(dim) if config.qk_norm else None,
            k_norm=made.norm(dim) if config.qk_norm else None,
            output=made.linear(hidden, heads * dim, False),
            attention_post_norm=made.norm(hidden) if config.post_norms else None,
            mlp_norm=made.norm(hidden) if has_mlp(at) else None,
            mlp=mlp(at),
            mlp_post_norm=made.norm(hidden) if config.post_norms else None,
            cos_sin=cos_sin_table(PlainRope(10000.0), dim, config.max_positions),
            window=at.window,
            sinks=made.tensor(heads) if config.attention_sinks else None,
            gate=made.linear(heads * dim, hidden, False) if config.gated_attention else None,
            beside=at.beside,
            scales=mixer_scales(config, share, has_state=at.has_state),
            residual=at.residual,
        )

    def with_states(number: int, layer: LayerWeights) -> LayerWeights:
        states = config.states
        if states is None or not config.layers[number].has_state:
            return layer
        light = isinstance(states, LightningConfig)
        split = 2 * states.heads if number == 1 and isinstance(states, DeltaConfig) else 0
        rank = states.gate_rank if isinstance(states, DeltaConfig) else None
        if isinstance(states, DeltaConfig) and states.by_element:
            split //= 2
        return replace(
            layer,
            qkv=made.linear(states.projected - split, hidden, False),
            steps=made.linear(split, hidden, False) if split else None,
            output=made.linear(hidden, states.inner, False),
            mixer=made.mixer(states),
            selective=made.selective(states) if isinstance(states, SelectiveConfig) else None,
            gates=made.gates(states, rank) if isinstance(states, DeltaConfig) and rank is not None else None,
            gate=made.linear(states.inner, hidden, False) if light else None,
            split_norm=made.norm(states.inner) if light else None,
        )

    def over_latents(layer: LayerWeights) -> LayerWeights:
        latent = config.latent
        if latent is None or layer.mixer is not None:
            return layer
        queries = heads * latent.query_dim if latent.q_rank is None else latent.q_rank
        return replace(
            layer,
            qkv=made.linear(queries + latent.cached_dim, hidden, False),
            output=made.linear(hidden, heads * latent.value_dim, False),
            cos_sin=cos_sin_table(PlainRope(10000.0), latent.rope_dim, config.max_positions),
            latent=made.latents(latent, heads),
            gate=made.linear(heads * latent.gates_of_head, hidden, False) if latent.gates else None,
        )

    weights = DecoderWeights(
        embedding=made.tensor(config.vocab_size, hidden).to(dtype),
        layers=tuple(over_latents(with_states(number, layer(each))) for number, each in enumerate(config.layers)),
        final_norm=made.norm(hidden),
        head=made.linear(config.vocab_size, hidden, False),
    )
    return Decoder(config, weights, share, ops, SingleRank())
