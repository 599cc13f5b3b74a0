"""Reads one layer's gated delta net from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import StoredTensorSource, read_exactly
from services.worker.models.config import DeltaConfig, ModelConfig, ModelError
from services.worker.models.hf_layers.delta import GLM_NEXT, KIMI_LINEAR, LING_3, OLMO_HYBRID
from services.worker.models.hf_layers.tensor_names import tensor_names
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.models.weights import LowRankGates
from services.worker.ops.interface import DeltaNet, PackedLinear
from services.worker.ops.quantized import QuantizedWeight

_RATES = "forget_gate."
RATES, GATES = (f"{_RATES}f_a_proj", f"{_RATES}f_b_proj"), ("g_a_proj", "g_b_proj")
"""Of Kimi Delta Attention: what a row is multiplied with, and what that is multiplied with, as `transformers` names
them."""


class DeltaInputs(NamedTuple):
    """What a row is multiplied with; see `LayerWeights`."""

    qkv: PackedLinear
    steps: PackedLinear | None


class DeltaLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    delta: DeltaConfig
    name: str

    def inputs(self) -> DeltaInputs:
        """What a row is projected by, in the order of `StateOps.mix`: gates, values, keys, queries, time steps, and how
        much is written; of Kimi Delta Attention no gates first, and what time steps and gates are made of in the steps'
        place. What is a number of each head is a product of its own where a checkpoint has numbers of it beside codes,
        as those of fp8 have, whose blocks are wider: one product would be of numbers."""
        hidden, read, pack = self.config.hidden_size, self.matrices.read, self.matrices.pack_linear
        parts = input_parts(self.config.architecture, self.delta, self.shard)
        own = [permuted(read(self._module(each.module), (each.size, hidden)), each.outputs) for each in parts]
        first = first_of_steps(parts)
        wide, narrow = self.matrices.join(own[:first]), self.matrices.join(own[first:])
        if isinstance(wide, QuantizedWeight) and isinstance(narrow, Tensor):
            return DeltaInputs(pack(wide, None), pack(narrow, None))
        return DeltaInputs(pack(self.matrices.join([wide, narrow]), None), None)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by."""
        shape, columns = (self.config.hidden_size, self.delta.inner), self.shard.elements(self.delta.head_dim)
        name = tensor_names(self.config.architecture).mixer_output
        return self.matrices.pack_inputs(f"{self.name}.{name}", shape, columns, None)

    def gates(self) -> LowRankGates | None:
        """Of Kimi Delta Attention; None: there are none, rows are projected to all of them."""
        delta, rank = self.delta, self.delta.gate_rank
        if rank is None:
            return None
        elements, keys = self.shard.elements(delta.head_dim), self.shard.elements(delta.state_dim)
        rates = self.matrices.read(self._module(RATES[1]), (delta.keys, rank), rows=keys)
        outputs = self.matrices.read(self._module(GATES[1]), (delta.inner, rank), rows=elements)
        return LowRankGates(self.matrices.pack_linear(rates, None), self.matrices.pack_linear(outputs, None), rank)

    def _module(self, module: str) -> str:
        """The whole name of a module that `transformers` calls so."""
        within = module.removeprefix(_RATES)
        return f"{self.name}.{module if within == module else self._block_of_rates + within}"

    @property
    def _block_of_rates(self) -> str:
        """`transformers` has what makes rates in a module of their own, published files have not."""
        return "" if f"{self.name}.A_log" in self.matrices.checkpoint else _RATES

    def _rates(self) -> tuple[Tensor, Tensor]:
        """The mixer's decays and biases of time steps."""
        delta, heads, block = self.delta, slice(*self.shard.heads), self._block_of_rates
        if not delta.by_element:
            decay, bias = self._read("A_log", (delta.heads,)), self._read("dt_bias", (delta.heads,))
        else:
            shape = (1, 1, delta.heads, 1) if self.config.architecture == KIMI_LINEAR else (delta.heads,)
            decay = self._read(f"{block}A_log", shape).flatten()
            bias = self._read(f"{block}dt_bias", (delta.keys,)).view(delta.heads, delta.state_dim)
        return decay[heads].exp().neg(), bias[heads].contiguous()

    def mixer(self) -> DeltaNet:
        """All that is between them."""
        delta, (decay, step_bias) = self.delta, self._rates()
        norm = "o_norm" if self.config.architecture in (OLMO_HYBRID, KIMI_LINEAR, GLM_NEXT, *LING_3) else "norm"
        conv = self._convolution().squeeze(1)
        own = conv[_channels(delta, self.shard).to(conv.device)]
        return DeltaNet(
            heads=self.shard.num_heads,
            head_dim=delta.head_dim,
            groups=self.shard.num_groups,
            state_dim=delta.state_dim,
            conv_weight=own.t().contiguous(),
            conv_bias=conv.new_zeros(len(own)),
            decay=decay,
            step_bias=step_bias,
            norm=self._read(f"{norm}.weight", (delta.head_dim,)),
            eps=self.config.norm_eps if delta.norm_eps is None else delta.norm_eps,
            most_written=float(delta.most_written),
            lower_bound=delta.lower_bound,
            sigmoid_gated=delta.sigmoid_gated,
        )

    def _convolution(self) -> Tensor:
        """[channels, 1, kernel] of queries, keys and values; checkpoints of Olmo-Hybrid, Kimi-Linear and Ling 3 have
        it in three parts, which the library writes as thirds, whatever is in them."""
        delta, source = self.delta, self.matrices.checkpoint
        whole = (delta.conv_dim, 1, delta.kernel)
        if f"{self.name}.conv1d.weight" in source or not isinstance(source, StoredTensorSource):
            return self._read("conv1d.weight", whole)
        parts = [source.read_stored(f"{self.name}.{part}_conv1d.weight") for part in ("q", "k", "v")]
        joined = torch.cat(parts).float().to(self.device)
        if tuple(joined.shape) != whole:
            raise ModelError(
                f"tensors {self.name}.q_conv1d.weight to v_conv1d.weight have shape {list(joined.shape)} together, the "
                f"config asks for {list(whole)}"
            )
        return joined

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape).to(self.device)


class InputPart(NamedTuple):
    """What one module gives to the product that a row is projected by."""

    module: str
    size: int
    """Outputs of the module."""
    outputs: Tensor
    """Which of them a rank has, in the order in which it has them."""
    of_heads: bool = False
    """Whether these are numbers of each head: time steps, or how much is written."""


def input_parts(architecture: str, delta: DeltaConfig, shard: MixerShard) -> tuple[InputPart, ...]:
    """In the order of `DeltaLoader.inputs`."""
    if architecture == OLMO_HYBRID:
        return _each_alone(delta, shard)
    if delta.gate_rank is not None:
        return _with_low_rank_gates(delta, delta.gate_rank, shard)
    if delta.element_rates:
        return _with_element_rates(delta, shard)
    return _by_key_head(delta, shard) if architecture == "Qwen3NextForCausalLM" else _by_kind(delta, shard)


def first_of_steps(parts: tuple[InputPart, ...]) -> int:
    """The first of `parts` that is in `DeltaInputs.steps` where there are such."""
    return next(number for number, part in enumerate(parts) if part.of_heads)


def _by_key_head(delta: DeltaConfig, shard: MixerShard) -> tuple[InputPart, ...]:
    """Qwen3-Next: two matrices, in each what belongs to a head of keys together."""
    each, values = delta.heads // delta.groups, delta.inner // delta.groups
    groups, wide = slice(*shard.groups), delta.conv_dim + delta.inner
    rows = torch.arange(wide).view(delta.groups, -1)[groups]
    queries, keys, own, gates = torch.split(rows, [delta.state_dim, delta.state_dim, values, values], dim=1)
    written, steps = torch.split(torch.arange(2 * delta.heads).view(delta.groups, -1)[groups], each, dim=1)
    order = torch.cat([part.flatten() for part in (gates, own, keys, queries)])
    narrow = torch.cat((steps.flatten(), written.flatten()))
    return InputPart("in_proj_qkvz", wide, order), InputPart("in_proj_ba", 2 * delta.heads, narrow, True)


def _by_kind(delta: DeltaConfig, shard: MixerShard) -> tuple[InputPart, ...]:
    """Qwen3.5: a matrix of each kind."""
    elements, heads = torch.arange(*shard.elements(delta.head_dim)), torch.arange(*shard.heads)
    return (
        InputPart("in_proj_z", delta.inner, elements),
        InputPart("in_proj_qkv", delta.conv_dim, _channels(delta, shard)),
        InputPart("in_proj_a", delta.heads, heads, True),
        InputPart("in_proj_b", delta.heads, heads, True),
    )


def _each_alone(delta: DeltaConfig, shard: MixerShard) -> tuple[InputPart, ...]:
    """Olmo-Hybrid: a matrix of each."""
    elements, heads = torch.arange(*shard.elements(delta.head_dim)), torch.arange(*shard.heads)
    keys = torch.arange(shard.groups[0] * delta.state_dim, shard.groups[1] * delta.state_dim)
    return (
        InputPart("g_proj", delta.inner, elements),
        InputPart("v_proj", delta.inner, elements),
        InputPart("k_proj", delta.keys, keys),
        InputPart("q_proj", delta.keys, keys),
        InputPart("a_proj", delta.heads, heads, True),
        InputPart("b_proj", delta.heads, heads, True),
    )


def _with_low_rank_gates(delta: DeltaConfig, rank: int, shard: MixerShard) -> tuple[InputPart, ...]:
    """Kimi Delta Attention: a matrix of each; every rank has what rates and gates are made of."""
    elements, keys = (torch.arange(*shard.elements(each)) for each in (delta.head_dim, delta.state_dim))
    return (
        InputPart("v_proj", delta.inner, elements),
        InputPart("k_proj", delta.keys, keys),
        InputPart("q_proj", delta.keys, keys),
        InputPart(RATES[0], rank, torch.arange(rank)),
        InputPart(GATES[0], rank, torch.arange(rank)),
        InputPart("b_proj", delta.heads, torch.arange(*shard.heads), True),
    )


def _with_element_rates(delta: DeltaConfig, shard: MixerShard) -> tuple[InputPart, ...]:
    """Ling 3: a matrix of each."""
    elements, keys = (torch.arange(*shard.elements(each)) for each in (delta.head_dim, delta.state_dim))
    return (
        InputPart("g_proj", delta.inner, elements),
        InputPart("v_proj", delta.inner, elements),
        InputPart("k_proj", delta.keys, keys),
        InputPart("q_proj", delta.keys, keys),
        InputPart("f_proj", delta.keys, keys),
        InputPart("b_proj", delta.heads, torch.arange(*shard.heads), True),
    )


def _channels(delta: DeltaConfig, shard: MixerShard) -> Tensor:
    """A rank's values, keys and queries, of queries, keys and values."""
    queries, keys, values = torch.split(torch.arange(delta.conv_dim), [delta.keys, delta.keys, delta.inner])
    first, end = (group * delta.state_dim for group in shard.groups)
    own = slice(*shard.elements(delta.head_dim))
    return torch.cat((values[own], keys[first:end], queries[first:end]))
