"""Families whose attention does not come from the library's attention interface: what stands in for it.

Their modules stay as they are, weights and projections too: each attention module gets a `forward`, or where that
leaves attention to a method of its own a `_attn`, that asks ours. ALiBi's biases (arXiv:2108.12409) become slopes of
heads: what the library builds for them counts positions in its batch, where ours has many sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.fallback.attention import ADAPTED_NAME, NAME, AttentionTemperature, attended

PLAIN_PRODUCTS = frozenset({"FalconLinear"})
"""Subclasses of `nn.Linear` that compute what it does."""

WEIGHT_READERS = frozenset({"LongcatFlashTopkRouter"})
"""Modules that multiply by a linear layer's weight themselves, so that it has to stay what it is."""

Forward = Callable[..., tuple[Tensor, None]]


class _Adapter(NamedTuple):
    """How one family's attention is replaced."""

    attention: str
    """The name of its class."""
    attribute: str
    """What is set on each module of that class."""
    made: Callable[[Any, Any], Forward]
    """(the module, the model's configuration) → that."""


def implementation(config: PretrainedConfig) -> str:
    """The attention by which the library is to build the model: ours, or for families that look it up in a table of
    their own one that they have."""
    return NAME if _adapter_of(config) is None else "eager"


def adapt(model: nn.Module, config: PretrainedConfig) -> None:
    """Has the attention of `model` ask ours, where its family does not by itself. Weights are there already."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None):
            _take_temperature(module)
    adapter = _adapter_of(config)
    if adapter is None:
        return
    own: Any = model
    own.config._attn_implementation = ADAPTED_NAME
    for module in model.modules():
        if type(module).__name__ == adapter.attention:
            setattr(module, adapter.attribute, adapter.made(module, config))


def keep_rotation(model: nn.Module, max_model_len: int) -> None:
    """Has LongRoPE rotate as for a sequence of `max_model_len` tokens. The library chooses by the furthest position of
    its batch, where ours has sequences of every length, whose keys stay as they were rotated: frequencies and, of
    PhiMoE, which always takes the same ones, what cosines and sines are multiplied by."""
    for module in model.modules():
        own: Any = module
        if getattr(own, "rope_type", None) != "longrope":
            continue
        chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](own.config, own.inv_freq.device, seq_len=max_model_len)
        own.inv_freq.copy_(chosen)
        own.rope_type = "kept"
        if "long_mscale" in (rope := own.config.rope_parameters):
            own.config = copy.deepcopy(own.config)  # other parts say by theirs what model it is
            long = max_model_len > rope["original_max_position_embeddings"]
            scale = rope["long_mscale" if long else "short_mscale"]
            own.config.rope_parameters |= {"long_mscale": scale, "short_mscale": scale}


def _adapter_of(config: PretrainedConfig) -> _Adapter | None:
    """None for families that ask by themselves; GPT-J and CodeGen do from transformers 5.24 on, and have no method for
    attention any more."""
    adapter = _ADAPTERS.get(config.model_type)
    if adapter is None:
        return None
    written = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return adapter if hasattr(getattr(written, adapter.attention), adapter.attribute) else None


def _take_temperature(module: Any) -> None:
    """Llama 4 counts positions in its batch, where ours has many sequences: ours is told what to multiply by."""
    if not module.use_rope:
        module.baton_temperature = AttentionTemperature(float(module.floor_scale), float(module.attn_scale))
    module.attn_temperature_tuning = False


def _of(module: nn.Module) -> Any:
    """The library's module in which the class of `module` is written."""
    return import_module(type(module).__module__)


def _heads(projected: Tensor, heads: int) -> Tensor:
    """[1, n, H * D] → [1, H, n, D]."""
    return projected.view(*projected.shape[:-1], heads, -1).transpose(1, 2)


def _merged(mixed: Tensor) -> Tensor:
    """[1, n, H, D] → [1, n, H * D]."""
    return mixed.flatten(2)


def _own_slopes(module: Any, slopes: Tensor, heads: int) -> Tensor:
    """Those of this rank's `heads`, where ranks share the heads. slopes [all heads]"""
    first = getattr(module, "baton_rank", 0) * heads
    return slopes[first : first + heads]


# GPT-J, CodeGen, GPT-Neo: they rotate by positions that they are given, and leave the rest to `_attn`.


def _method(module: Any, scale: float, window: int | None = None) -> Forward:
    def _attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        # Rotated in float32 by some.
        rows = attended(module, query.to(value.dtype), key.to(value.dtype), value, scale=scale, window=window)
        return rows.transpose(1, 2), None

    return _attn


def _scaled_method(module: Any, _: Any) -> Forward:
    return _method(module, 1.0 / float(module.scale_attn))


def _gpt_neo(module: Any, config: Any) -> Forward:
    # Without a scale, as in Mesh TensorFlow.
    return _method(module, 1.0, config.window_size if module.attention_type == "local" else None)


# Falcon: rotation or ALiBi; one key head, a few, or as many as query heads.


def _falcon(module: Any, config: Any) -> Forward:
    slopes = None
    if config.alibi:
        # Its slopes are of bfloat16, as in training; a position's bias is rounded to that by the library, not here.
        one = _of(module).build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), module.num_heads, torch.float32)
        slopes = one[:, 0, 1] * module.inv_norm_factor
    return partial(_falcon_forward, module, slopes)


def _falcon_forward(
    module: Any,
    slopes: Tensor | None,
    hidden_states: Tensor,
    alibi: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    fused, heads = module.query_key_value(hidden_states), module.num_heads
    if module.new_decoder_architecture or not module.multi_query:
        # Each key head lies behind its query heads, and its value behind it.
        kv_heads = module.num_kv_heads if module.new_decoder_architecture else heads
        groups = fused.unflatten(-1, (kv_heads, heads // kv_heads + 2, module.head_dim))
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        query, key, value = fused.unflatten(-1, (-1, module.head_dim)).split((heads, 1, 1), dim=2)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if slopes is None:
        query, key = _of(module).apply_rotary_pos_emb(query, key, *(position_embeddings or ()))
    own = None if slopes is None else _own_slopes(module, slopes, heads)
    mixed = attended(module, query, key, value, scale=module.inv_norm_factor, alibi_slopes=own)
    return module.dense(_merged(mixed)), None


# Bloom and MPT: ALiBi.


def _bloom(module: Any, _: Any) -> Forward:
    slopes = _of(module)._get_alibi_slopes(module.num_heads, torch.device("cpu"))
    return partial(_bloom_forward, module, slopes)


def _bloom_forward(
    module: Any, slopes: Tensor, hidden_states: Tensor, residual: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    own = _own_slopes(module, slopes, module.num_heads)
    mixed = attended(module, query, key, value, scale=module.inv_norm_factor, alibi_slopes=own)
    return module.dense(_merged(mixed)) + residual, None


def _mpt(module: Any, _: Any) -> Forward:
    # Of two positions, the bias of the one before the last.
    slopes = -_of(module).build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0].contiguous()
    return partial(_mpt_forward, module, slopes)


def _mpt_forward(module: Any, slopes: Tensor, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (_heads(each, module.n_heads) for each in fused.chunk(3, dim=2))
    own = _own_slopes(module, slopes, module.n_heads)
    mixed = attended(module, query, key, value, scale=module.softmax_scale, alibi_slopes=own)
    return module.out_proj(_merged(mixed)), None


# XGLM: plain attention, as BART has it.


def _xglm(module: Any, _: Any) -> Forward:
    return partial(_xglm_forward, module)


def _xglm_forward(module: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (_heads(project(hidden_states), module.num_heads) for project in projections)
    mixed = attended(module, query, key, value, scale=module.scaling)
    return module.out_proj(_merged(mixed)), None


_ADAPTERS = {
    "bloom": _Adapter("BloomAttention", "forward", _bloom),
    "codegen": _Adapter("CodeGenAttention", "_attn", _scaled_method),
    "falcon": _Adapter("FalconAttention", "forward", _falcon),
    "gpt_neo": _Adapter("GPTNeoSelfAttention", "_attn", _gpt_neo),
    "gptj": _Adapter("GPTJAttention", "_attn", _scaled_method),
    "mpt": _Adapter("MptAttention", "forward", _mpt),
    "xglm": _Adapter("XGLMAttention", "forward", _xglm),
}
"""By `model_type`."""
