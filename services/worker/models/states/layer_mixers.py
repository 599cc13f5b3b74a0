"""Reads a layer's mixer with states from a checkpoint, whatever its kind."""

from __future__ import annotations

import torch

from services.worker.models.config import (
    ConvolutionConfig,
    DeltaConfig,
    LightningConfig,
    ModelConfig,
    RecurrentConfig,
    SelectiveConfig,
)
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import MixerShard
from services.worker.models.states.convolution_loading import ConvolutionLoader
from services.worker.models.states.delta_loading import DeltaLoader
from services.worker.models.states.lightning_loading import LightningLoader
from services.worker.models.states.mamba_loading import MambaLoader
from services.worker.models.states.recurrent_loading import RecurrentLoader
from services.worker.models.states.selective_loading import SelectiveLoader
from services.worker.models.weights import LayerMixer


def read_state_mixer(
    matrices: MatrixLoader, device: torch.device, config: ModelConfig, shard: MixerShard, name: str, index: int
) -> LayerMixer:
    """That of the layer of number `index`, whose tensors begin with `name`. Raises ModelError."""
    states, nothing = config.states, torch.empty(0, device=device)
    assert states is not None, "a layer has states"
    how = (matrices, device, config, shard)
    if isinstance(states, DeltaConfig):
        delta = DeltaLoader(*how, states, name)
        inputs, steps = delta.inputs()
        net, gates = delta.mixer(), delta.gates()
        return LayerMixer(inputs, delta.output(), cos_sin=nothing, mixer=net, steps=steps, gates=gates)
    if isinstance(states, ConvolutionConfig):
        short = ConvolutionLoader(*how, states, name)
        return LayerMixer(short.inputs(), short.output(), cos_sin=nothing, mixer=short.mixer())
    if isinstance(states, SelectiveConfig):
        space = SelectiveLoader(*how, states, name)
        own, between = space.mixer(), space.between()
        return LayerMixer(space.inputs(), space.output(), cos_sin=nothing, mixer=own, selective=between)
    if isinstance(states, LightningConfig):
        light = LightningLoader(*how, states, name)
        mixer, gate, norm = light.mixer(index), light.gate(), light.norm()
        return LayerMixer(light.inputs(), light.output(), cos_sin=nothing, mixer=mixer, gate=gate, split_norm=norm)
    if isinstance(states, RecurrentConfig):
        unit = RecurrentLoader(*how, states, name)
        return LayerMixer(unit.inputs(), unit.output(), cos_sin=nothing, mixer=unit.mixer(), selective=unit.between())
    mamba = MambaLoader(*how, states, name)
    return LayerMixer(
        inputs=mamba.inputs(),
        output=mamba.output(),
        cos_sin=nothing,
        mixer=mamba.mixer(),
        split_norm=mamba.split_norm(),
    )
