"""Reads the `config.json` of MiniMax-M3's language model, as published or as `transformers` writes it, and knows what
its tensors are called in either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, field

from services.worker.models.config import (
    BlockIndexConfig,
    LayerConfig,
    Mixture,
    ModelError,
    layer_kinds,
    limited_activation,
    require_positive,
)
from services.worker.models.published.layout import Published, converted

MINIMAX_M3 = "MiniMaxM3VLForCausalLM"
_THETA = 5_000_000.0
_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_PART = "partial_rotary_factor"


class _RawBlocks(Struct):
    """Of a published file's `sparse_attention_config`."""

    use_sparse_attention: bool = True
    sparse_score_type: str = "max"
    sparse_init_block: int = 0
    sparse_attention_freq: list[int] | None = None
    sparse_num_index_heads: int | None = None
    sparse_index_dim: int | None = None
    sparse_block_size: int | None = None
    sparse_topk_blocks: int | None = None
    sparse_local_block: int | None = None


class _RawM3(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 200_064
    hidden_size: int = 6144
    intermediate_size: int = 3072
    """Of an expert."""
    dense_intermediate_size: int = 12_288
    shared_intermediate_size: int = 3072
    num_hidden_layers: int = 60
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 524_288
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_experts_per_tok: int = 4
    num_local_experts: int = 128
    num_experts: int | None = None
    """Another name of it, which comes first."""
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rope_theta: float = _THETA
    rope_parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    rope_scaling: dict[str, Any] = field(default_factory=dict[str, Any])
    partial_rotary_factor: float | None = None
    rotary_dim: int | None = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: list[int] | None = None
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_local_blocks: int = 1
    sparse_attention_config: _RawBlocks = field(default_factory=_RawBlocks)


_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_ONLY: dict[str, Any] = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
"""Which `transformers` does not read, and vLLM goes by."""
_KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "swiglu_alpha", "rope_theta"),
)


def minimax_m3(raw: Mapping[str, Any]) -> Published:
    """An indexer chooses blocks of keys in some layers. Raises ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawM3)
    require_positive(**{key: getattr(own, key) for key in _POSITIVE})
    if own.hidden_act not in ("silu", "swigluoai"):
        raise ModelError(f"hidden_act {own.hidden_act!r} is not supported; supported: silu, swigluoai")
    rotation, rope = _rotation(own)
    changes: dict[str, Any] = {
        "qk_norm": True,
        "norm_offset": True,
        "activation": limited_activation("swigluoai", own.swiglu_limit),
        "mixture": _mixture(own),
        **rotation,
    }
    chooses = _choosing(own)
    if any(chooses):
        changes["block_index"] = _index(own, rotation.get("rotary_dim", own.head_dim))
    base = {key: getattr(own, key) for key in _KEPT} | {"intermediate_size": own.dense_intermediate_size}
    return Published(base | rope, changes, arranged=partial(_layers, mixing=_mixing(own), chooses=chooses))


def library_name(name: str) -> str:
    """`name`, published or the library's, as it is read here."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name


_RULES = (
    (re.compile(r"\.self_attn\.index_([qk]_(?:proj|norm))\."), r".self_attn.indexer.\1."),
    (re.compile(r"\.block_sparse_moe\.e_score_correction_bias$"), ".mlp.gate.e_score_correction_bias"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
)


def _layers(layer: LayerConfig, mixing: list[bool], chooses: list[bool]) -> tuple[LayerConfig, ...]:
    return tuple(
        msgspec.structs.replace(layer, mixes=mixes, chooses=each) for mixes, each in zip(mixing, chooses, strict=True)
    )


def _mixture(own: _RawM3) -> Mixture:
    experts = own.num_local_experts if own.num_experts is None else own.num_experts
    if not 1 <= own.num_experts_per_tok <= experts:
        raise ModelError(f"num_experts_per_tok {own.num_experts_per_tok}: there are {experts} experts")
    return Mixture(
        experts=experts,
        chosen=own.num_experts_per_tok,
        intermediate_size=own.intermediate_size,
        renormalised=True,
        shared_size=own.shared_intermediate_size,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        scale=own.routed_scaling_factor,
        exact_router=True,
    )


def _rotation(own: _RawM3) -> tuple[dict[str, int], dict[str, Any]]:
    """How much of a head is rotated, and what the config says of it otherwise. The library goes by the part alone;
    where `rotary_dim` says another number, one of the two is wrong."""
    given = own.rope_parameters or own.rope_scaling
    part = given.get(_PART, own.partial_rotary_factor)
    dim, rotated = own.head_dim, int(own.head_dim * (1.0 if part is None else part))
    if not 0 < rotated <= dim or rotated % 2:
        raise ModelError(f"{_PART} {part}: {rotated} of {dim} elements of a head would be rotated")
    if own.rotary_dim is not None and min(own.rotary_dim, dim) != rotated:
        raise ModelError(f"rotary_dim {own.rotary_dim}: {_PART} {part} says {rotated} of {dim} elements")
    rope = {key: value for key, value in given.items() if key != _PART}
    named = "rope_parameters" if own.rope_parameters else "rope_scaling"
    return {} if rotated == dim else {"rotary_dim": rotated}, {named: rope} if rope else {}


def _choosing(own: _RawM3) -> list[bool]:
    """For each layer, whether it chooses."""
    blocks, kinds = own.sparse_attention_config, own.layer_types
    if kinds is None and blocks.sparse_attention_freq is not None:
        kinds = [_SPARSE if each else _FULL for each in blocks.sparse_attention_freq]
    if kinds is None:
        return [False] * own.num_hidden_layers
    return layer_kinds("layer_types", kinds, {_FULL: False, _SPARSE: True}, own.num_hidden_layers)


def _index(own: _RawM3, rotated: int) -> BlockIndexConfig:
    """`rotated`: elements of a head."""
    given = own.sparse_attention_config
    for key, only in _ONLY.items():
        if getattr(given, key) != only:
            raise ModelError(f"sparse_attention_config: {key} {getattr(given, key)!r} is not supported; {only!r} is")
    index = BlockIndexConfig(
        heads=_or(given.sparse_num_index_heads, own.index_n_heads),
        dim=_or(given.sparse_index_dim, own.index_head_dim),
        block=_or(given.sparse_block_size, own.index_block_size),
        chosen=_or(given.sparse_topk_blocks, own.index_topk_blocks),
        local=_or(given.sparse_local_block, own.index_local_blocks),
    )
    if index.block < 1 or index.chosen < 1 or index.longest < 2:
        raise ModelError(
            f"index_topk_blocks {index.chosen} of index_block_size {index.block} have to be two tokens and more"
        )
    if index.heads != own.num_key_value_heads:
        raise ModelError(f"index_n_heads {index.heads} must be num_key_value_heads {own.num_key_value_heads}")
    if index.dim < rotated:
        raise ModelError(f"index_head_dim {index.dim}: {rotated} elements of a head are rotated")
    if not 0 <= index.local <= index.chosen:
        raise ModelError(f"index_local_blocks {index.local} must be 0 to index_topk_blocks {index.chosen}")
    return index


def _or(given: int | None, other: int) -> int:
    return other if given is None else given


def _mixing(own: _RawM3) -> list[bool]:
    """For each layer, whether it has experts."""
    kinds = own.mlp_layer_types
    if kinds is None:
        kinds = ["sparse" if each else "dense" for each in own.moe_layer_freq or [1] * own.num_hidden_layers]
    return layer_kinds("mlp_layer_types", kinds, {"dense": False, "sparse": True}, own.num_hidden_layers)
