"""Which modules of a layer adapters may change, as the library and PEFT name them, and where what a rank has of each
lies in its matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import (
    CompressedConfig,
    ConvolutionConfig,
    DeltaConfig,
    LayerConfig,
    LightningConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    SelectiveConfig,
)
from services.worker.models.heads.rows import head_rows
from services.worker.models.hf_layers.latent import LatentConfig
from services.worker.models.hf_layers.tensor_names import GRANITE, HEAD_GATE, TensorNames, tensor_names
from services.worker.models.latent.loading import rotated_last
from services.worker.models.sharding import LayerShard, MixerShard, columns_of
from services.worker.models.states import lightning_loading
from services.worker.models.states.delta_loading import GATES, RATES, first_of_steps, input_parts
from services.worker.models.states.gated_attention import gated_outputs, head_gate_outputs
from services.worker.models.states.mamba_loading import own_outputs
from services.worker.models.states.mixer_loading import channel_outputs
from services.worker.models.states.recurrent_loading import INPUTS
from services.worker.models.weights import DenseMlp, LayerWeights, LinearMlp, MixtureMlp, Rows, SelectiveWeights
from services.worker.ops.interface import PackedLinear

KEYS_AND_VALUES = "self_attn.kv_b_proj"
"""The module that makes them of latents. It stands on the other side of attention here: see `LatentAttention`."""
_OF_DEPTH = "linear"
"""The module that what a shared block gives goes through at each depth."""
_SHARED = ("shared_experts", "shared_expert")
"""What an expert that every row goes through is called: one without a gate, and one with."""


class ModuleRows(NamedTuple):
    """What a module gives to a matrix."""

    module: str
    rows: Rows

    @property
    def outputs(self) -> int:
        """How many outputs."""
        return len(self.rows) if isinstance(self.rows, Tensor) else self.rows[1] - self.rows[0]


class ModulesOfMatrix(NamedTuple):
    """The modules whose outputs lie one below the other in a matrix."""

    packed: PackedLinear
    columns: tuple[int, int]
    """Inputs that the rank has, from and to."""
    parts: tuple[ModuleRows, ...]


def module_sizes(config: ModelConfig, number: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module of layer `number` that can have an adapter, in the whole model. Experts cannot,
    but what every row goes through beside them can."""
    layer, hidden = config.layers[number], config.hidden_size
    sizes = _sizes_within(config, layer, number) | _following_sizes(config, layer)
    if layer.part is not None:
        sizes = {f"{layer.part}.{module}": size for module, size in sizes.items()}
    return sizes if layer.depth is None else sizes | {_OF_DEPTH: (hidden, hidden)}


def _sizes_within(config: ModelConfig, layer: LayerConfig, number: int) -> dict[str, tuple[int, int]]:
    hidden = config.hidden_size
    sizes = _mixer_sizes(config) if layer.has_state else _attention_sizes(config, layer.kv_heads, number)
    names = tensor_names(config.architecture)
    if not layer.has_mlp:
        return sizes
    if not layer.mixes:
        return sizes | _mlp_sizes(names, names.mlp, hidden, config.intermediate_size)
    mixture = config.mixture
    if mixture is None or mixture.shared_size is None:
        return sizes
    block = names.mlp if config.architecture == GRANITE else f"{names.mlp}.{_SHARED[mixture.shared_gated]}"
    gate = {f"{names.mlp}.shared_expert_gate": (hidden, 1)} if mixture.shared_gated else {}
    return sizes | _mlp_sizes(names, block, hidden, mixture.shared_size) | gate


def _following_sizes(config: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, int]]:
    """Of what comes behind attention; the checkpoint's layer stands before each module's name."""
    names, hidden, sizes = tensor_names(config.architecture), config.hidden_size, dict[str, tuple[int, int]]()
    for block in layer.following:
        name = named_in(block.number, block.module)
        sizes |= {name: (hidden, hidden)} if block.columns is None else _mlp_sizes(names, name, hidden, block.columns)
    return sizes


def named_in(block: int, module: str) -> str:
    """What a module behind attention is called here, as a layer may have several of the same name."""
    return f"{block}.{module}"


def _attention_sizes(config: ModelConfig, kv_heads: int | None, number: int) -> dict[str, tuple[int, int]]:
    if config.latent is not None:
        return _latent_sizes(config, config.latent.of_layer(number), number)
    if config.compressed is not None:
        return _compressed_sizes(config, config.compressed)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = (kv_heads or config.num_kv_heads) * config.head_dim
    inputs = config.attention_inputs
    names = tensor_names(config.architecture)
    gates = {f"{names.attention}.{HEAD_GATE}": (hidden, config.num_heads)} if config.head_gates else {}
    return {
        **gates,
        **_head_sizes(names, inputs, (2 * heads if config.gated_attention else heads, kv, kv)),
        f"{names.attention}.{names.attention_output}": (heads, hidden),
    }


def _head_sizes(names: TensorNames, inputs: int, outputs: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Of the modules that make queries, keys and values, of which each may make several."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, size in zip(names.qkv, outputs, strict=True):
        module = f"{names.attention}.{name}"
        sizes[module] = (inputs, size + sizes.get(module, (0, 0))[1])
    return sizes


def _latent_sizes(config: ModelConfig, latent: LatentConfig, number: int) -> dict[str, tuple[int, int]]:
    hidden, heads, names = config.hidden_size, config.num_heads, tensor_names(config.architecture)
    queries = heads * latent.query_dim
    made = {"self_attn.q_proj": (hidden, queries)}
    if latent.q_rank is not None:
        made = {"self_attn.q_a_proj": (hidden, latent.q_rank), "self_attn.q_b_proj": (latent.q_rank, queries)}
    gates = {f"self_attn.{names.head_gate}": (hidden, heads * latent.gates_of_head)} if latent.gates else {}
    own = {} if latent.borrows(number) else {"self_attn.kv_a_proj_with_mqa": (hidden, latent.cached_dim)}
    return (
        made
        | gates
        | own
        | {
            KEYS_AND_VALUES: (latent.kv_rank, heads * (latent.nope_dim + latent.value_dim)),
            "self_attn.o_proj": (heads * latent.value_dim, hidden),
        }
    )


def _compressed_sizes(config: ModelConfig, compressed: CompressedConfig) -> dict[str, tuple[int, int]]:
    """But for what makes and chooses entries, and what each group of heads is multiplied with."""
    hidden, dim, rank = config.hidden_size, config.head_dim, compressed.q_rank
    return {
        "self_attn.q_a_proj": (hidden, rank),
        "self_attn.kv_proj": (hidden, dim),
        "self_attn.q_b_proj": (rank, config.num_heads * dim),
        "self_attn.o_b_proj": (compressed.groups * compressed.output_rank, hidden),
    }


def _mixer_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, states = config.hidden_size, config.states
    assert states is not None, "a layer has states"
    names, back = tensor_names(config.architecture), (states.inner, hidden)
    name, output = names.mixer, f"{names.mixer}.{names.mixer_output}"
    if isinstance(states, LightningConfig):
        gate = f"{name}.output_gate"
        return {f"{name}.qkv_proj": (hidden, states.projected), gate: (hidden, states.inner), output: back}
    if isinstance(states, RecurrentConfig):
        return {f"{name}.{module}": (hidden, states.heads) for module in INPUTS} | {output: back}
    if not isinstance(states, DeltaConfig):
        sizes = {f"{name}.in_proj": (hidden, states.projected), output: back}
        if isinstance(states, SelectiveConfig):
            sizes |= {
                f"{name}.x_proj": (states.inner, states.made),
                f"{name}.dt_proj": (states.step_rank, states.inner),
            }
        return sizes
    inputs = input_parts(config.architecture, states, MixerShard((0, states.heads), (0, states.groups), 1))
    sizes = {f"{name}.{each.module}": (hidden, each.size) for each in inputs}
    if states.gate_rank is not None:
        made = {RATES[1]: states.keys, GATES[1]: states.inner}
        sizes |= {f"{name}.{module}": (states.gate_rank, size) for module, size in made.items()}
    return {**sizes, output: back}


def _mlp_sizes(names: TensorNames, block: str, hidden: int, size: int) -> dict[str, tuple[int, int]]:
    if not size:
        return {}
    up = dict.fromkeys((f"{block}.{part}" for part in names.ups), (hidden, size))
    if names.gate_and_up is not None:
        up = {f"{block}.{names.gate_and_up}": (hidden, 2 * size)}
    return up | {f"{block}.{names.down}": (size, hidden)}


def modules_of_layer(
    config: ModelConfig, share: LayerShard, number: int, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    """Of the rank's matrices of layer `number`, those that adapters may change."""
    part, every = config.layers[number].part, (0, config.hidden_size)
    for matrix in _modules_within(config, share, number, layer):
        named = (each if part is None else each._replace(module=f"{part}.{each.module}") for each in matrix.parts)
        yield matrix._replace(parts=tuple(named))
    if layer.depth is not None:
        yield ModulesOfMatrix(layer.depth.output, every, (ModuleRows(_OF_DEPTH, every),))


def _modules_within(
    config: ModelConfig, share: LayerShard, number: int, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    described = config.layers[number]
    if layer.mixer is not None:
        yield from _of_mixer(config, share, layer)
    elif config.compressed is not None:
        yield from _of_compressed(config, config.compressed, share, layer)
    elif config.latent is not None:
        yield from _of_latent(config, config.latent.of_layer(number), share, number, layer)
    else:
        yield from _of_attention(config, share, layer, described.kv_heads)
    yield from _of_following(config, share, described, layer)
    block = mlp = tensor_names(config.architecture).mlp
    match layer.mlp:
        case DenseMlp():
            yield from _of_mlp(config, block, layer.mlp, share.mlp, config.intermediate_size)
        case MixtureMlp() if layer.mlp.shared is not None:
            assert config.mixture is not None
            mixture, shared = config.mixture, layer.mlp.shared
            if config.architecture != GRANITE:
                block = f"{mlp}.{_SHARED[mixture.shared_gated]}"
            yield from _of_mlp(config, block, shared.mlp, share.shared_expert, mixture.shared_size or 0)
            if shared.gate is not None:
                gate = ModuleRows(f"{mlp}.shared_expert_gate", (0, 1))
                yield ModulesOfMatrix(shared.gate, (0, config.hidden_size), (gate,))
        case _:
            pass


def _of_following(
    config: ModelConfig, share: LayerShard, described: LayerConfig, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    for block, (_, mlp) in zip(described.following, layer.following, strict=True):
        name = named_in(block.number, block.module)
        if isinstance(mlp, LinearMlp):
            yield ModulesOfMatrix(mlp.matrix, mlp.columns, (ModuleRows(name, (0, config.hidden_size)),))
        else:
            size = block.columns or 0
            yield from _of_mlp(config, name, mlp, columns_of(config, share, size), size)


def _of_mixer(config: ModelConfig, share: LayerShard, layer: LayerWeights) -> Iterator[ModulesOfMatrix]:
    states, shard, every = config.states, share.mixer, (0, config.hidden_size)
    names, first = tensor_names(config.architecture), 0
    name = names.mixer
    assert states is not None
    assert shard is not None
    if isinstance(states, MambaConfig):
        inputs: tuple[ModuleRows, ...] = (ModuleRows(f"{name}.in_proj", own_outputs(states, shard)),)
    elif isinstance(states, LightningConfig):
        inputs = (ModuleRows(f"{name}.qkv_proj", lightning_loading.own_outputs(states, shard)),)
        assert layer.gate is not None
        gates = ModuleRows(f"{name}.output_gate", shard.elements(states.head_dim))
        yield ModulesOfMatrix(layer.gate, every, (gates,))
    elif isinstance(states, ConvolutionConfig):
        inputs = (ModuleRows(f"{name}.in_proj", channel_outputs(states.heads, shard, 3)),)
    elif isinstance(states, RecurrentConfig):
        inputs = tuple(ModuleRows(f"{name}.{module}", shard.heads) for module in INPUTS)
    elif isinstance(states, SelectiveConfig):
        inputs = (ModuleRows(f"{name}.in_proj", channel_outputs(states.heads, shard, 2)),)
        yield from _of_selective(name, states, shard, layer)
    else:
        parts = input_parts(config.architecture, states, shard)
        first = first_of_steps(parts)
        inputs = tuple(ModuleRows(f"{name}.{each.module}", each.outputs) for each in parts)
        yield from _of_gates(name, states, shard, layer)
    if layer.steps is None:
        yield ModulesOfMatrix(layer.qkv, every, inputs)
    else:
        yield ModulesOfMatrix(layer.qkv, every, inputs[:first])
        yield ModulesOfMatrix(layer.steps, every, inputs[first:])
    output = ModuleRows(f"{name}.{names.mixer_output}", every)
    yield ModulesOfMatrix(layer.output, shard.elements(states.head_dim), (output,))


def _of_selective(
    name: str, states: SelectiveConfig, shard: MixerShard, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    """Between the convolution and the states."""
    assert isinstance(layer.selective, SelectiveWeights)
    yield ModulesOfMatrix(layer.selective.made, shard.heads, (ModuleRows(f"{name}.x_proj", (0, states.made)),))
    steps = ModuleRows(f"{name}.dt_proj", shard.heads)
    yield ModulesOfMatrix(layer.selective.steps, (0, states.step_rank), (steps,))


def _of_gates(name: str, states: DeltaConfig, shard: MixerShard, layer: LayerWeights) -> Iterator[ModulesOfMatrix]:
    """Of Kimi Delta Attention, what makes rates and gates of few numbers."""
    if layer.gates is None:
        return
    made = (
        (layer.gates.rates, RATES[1], shard.elements(states.state_dim)),
        (layer.gates.outputs, GATES[1], shard.elements(states.head_dim)),
    )
    for packed, module, rows in made:
        yield ModulesOfMatrix(packed, (0, layer.gates.rank), (ModuleRows(f"{name}.{module}", rows),))


def _of_attention(
    config: ModelConfig, share: LayerShard, layer: LayerWeights, kv_heads: int | None
) -> Iterator[ModulesOfMatrix]:
    dim, every, names = config.head_dim, (0, config.hidden_size), tensor_names(config.architecture)
    inputs = (0, config.attention_inputs)
    if config.gated_attention and layer.gate is not None:
        own = gated_outputs(config, share)
        rows: tuple[Rows, ...] = (own.queries, own.keys, own.values)
        yield ModulesOfMatrix(layer.gate, inputs, (ModuleRows(f"{names.attention}.q_proj", own.gates),))
    else:
        rows = tuple(each.rows for each in head_rows(config, share, kv_heads))
        if layer.gate is not None:
            gates = ModuleRows(f"{names.attention}.{HEAD_GATE}", head_gate_outputs(config, share))
            yield ModulesOfMatrix(layer.gate, every, (gates,))
    parts = (ModuleRows(f"{names.attention}.{name}", each) for name, each in zip(names.qkv, rows, strict=True))
    yield ModulesOfMatrix(layer.qkv, inputs, tuple(parts))
    output = ModuleRows(f"{names.attention}.{names.attention_output}", every)
    yield ModulesOfMatrix(layer.output, (share.heads[0] * dim, share.heads[1] * dim), (output,))


def _of_latent(
    config: ModelConfig, latent: LatentConfig, share: LayerShard, number: int, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    """But for what makes keys and values of latents: see `adapted_latents`."""
    (first, end), dim, every = share.heads, latent.query_dim, (0, config.hidden_size)
    own = first * dim + rotated_last(latent, end - first, dim)
    cached = ModuleRows("self_attn.kv_a_proj_with_mqa", rotated_last(latent, 1, latent.cached_dim))
    if latent.q_rank is None:
        made = ModuleRows("self_attn.q_proj", own)
        yield ModulesOfMatrix(layer.qkv, every, (made,) if latent.borrows(number) else (made, cached))
    else:
        assert layer.latent is not None
        assert layer.latent.q_up is not None
        queries = ModuleRows("self_attn.q_a_proj", (0, latent.q_rank))
        yield ModulesOfMatrix(layer.qkv, every, (queries, cached))
        yield ModulesOfMatrix(layer.latent.q_up, (0, latent.q_rank), (ModuleRows("self_attn.q_b_proj", own),))
    if layer.gate is not None:
        gates = (first * latent.gates_of_head, end * latent.gates_of_head)
        module = f"self_attn.{tensor_names(config.architecture).head_gate}"
        yield ModulesOfMatrix(layer.gate, every, (ModuleRows(module, gates),))
    columns = (first * latent.value_dim, end * latent.value_dim)
    yield ModulesOfMatrix(layer.output, columns, (ModuleRows("self_attn.o_proj", every),))


def _of_compressed(
    config: ModelConfig, compressed: CompressedConfig, share: LayerShard, layer: LayerWeights
) -> Iterator[ModulesOfMatrix]:
    every, dim, rank = (0, config.hidden_size), config.head_dim, compressed.q_rank
    assert layer.compressed is not None
    made = (ModuleRows("self_attn.q_a_proj", (0, rank)), ModuleRows("self_attn.kv_proj", (0, dim)))
    yield ModulesOfMatrix(layer.qkv, every, made)
    own = ModuleRows("self_attn.q_b_proj", (share.heads[0] * dim, share.heads[1] * dim))
    yield ModulesOfMatrix(layer.compressed.q_up, (0, rank), (own,))
    columns = columns_of(config, share, compressed.groups * compressed.output_rank)
    yield ModulesOfMatrix(layer.output, columns, (ModuleRows("self_attn.o_b_proj", every),))


def _of_mlp(
    config: ModelConfig, block: str, mlp: DenseMlp, columns: tuple[int, int], size: int
) -> Iterator[ModulesOfMatrix]:
    """`columns`: of the `size` that the MLP has on all ranks together."""
    every, (first, end), names = (0, config.hidden_size), columns, tensor_names(config.architecture)
    up: tuple[ModuleRows, ...] = tuple(ModuleRows(f"{block}.{part}", columns) for part in names.ups)
    if names.gate_and_up is not None:
        joined = torch.cat((torch.arange(first, end), size + torch.arange(first, end)))
        up = (ModuleRows(f"{block}.{names.gate_and_up}", joined),)
    yield ModulesOfMatrix(mlp.gate_up, every, up)
    yield ModulesOfMatrix(mlp.down, columns, (ModuleRows(f"{block}.{names.down}", every),))
