"""The shape of tiny checkpoints in published layouts, and how such a layout differs from the library's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.models.tiny_models import POSITIONS, VOCABULARY

HIDDEN, COLUMNS, LAYERS, HEADS, GROUPS, DIM = 64, 128, 3, 4, 2, 16

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": COLUMNS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ALL_HEADS = {"num_key_value_heads": HEADS}
KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
"""Those of `SHAPE` that an old Llama's config has."""


class Layout(NamedTuple):
    """How a model is published, and what computes the same."""

    config: dict[str, Any]
    """The published `config.json`, but for what is alike in all."""
    names: tuple[tuple[str, str], ...] = ()
    """Parts of the library's names of tensors, and the published ones."""
    fused: Mapping[str, tuple[tuple[str, ...], int]] = MappingProxyType({})
    """By the published module of a layer, the library's that it is made of, and of how many groups."""
    reference: str = "LlamaConfig"
    shape: Mapping[str, Any] = MappingProxyType({})
    """Of the library's config, where that is another than `SHAPE`."""
    adapt: Callable[[Any], None] | None = None
    """Changes the library's model."""
    extend: Callable[[Any], None] | None = None
    """Gives the library's model more tensors, before any are written."""
    alibi: bool = False
    transposed: tuple[str, ...] = ()
    """Ends of the published names of matrices that have inputs first."""
    dropped: tuple[str, ...] = ()
    """Ends of the names of tensors that are zeros, and that no published checkpoint has."""


def plain(**more: Any) -> dict[str, Any]:
    return {key: SHAPE[key] for key in KEYS} | {"hidden_act": "silu", "rope_theta": 10_000.0} | more


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
