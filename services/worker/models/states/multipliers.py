"""What a layer's products are multiplied by, as one rank has them."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.config import MambaConfig, ModelConfig
from services.worker.models.sharding import LayerShard
from services.worker.models.states.mamba_loading import own_outputs

Scales = tuple[Tensor, float] | None
"""Of each output of the first product, and of all those of the last."""


def mixer_scales(config: ModelConfig, share: LayerShard, *, has_state: bool) -> Scales:
    """Of what stands before a layer's MLP. float32, on the CPU."""
    each = config.multipliers
    if each is None:
        return None
    if has_state:
        mamba, shard = config.states, share.mixer
        assert isinstance(mamba, MambaConfig)
        assert shard is not None
        return _repeated(each.mixer_inputs, mamba.parts)[own_outputs(mamba, shard)], each.mixer_output
    heads, kv_heads = share.num_heads * config.head_dim, share.num_kv_heads * config.head_dim
    return _repeated(each.attention_inputs, (heads, kv_heads, kv_heads)), each.attention_output


def mlp_scales(config: ModelConfig, columns: int) -> Scales:
    """Of an MLP's so many `columns`. float32, on the CPU."""
    each = config.multipliers
    return None if each is None else (_repeated((each.gate, 1.0), (columns, columns)), each.down)


def _repeated(factors: tuple[float, ...], counts: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(factors), torch.tensor(counts))
