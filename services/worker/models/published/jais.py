"""Reads the `config.json` of Jais (`JAISLMHeadModel`, arXiv:2308.16149): a GPT-2 with ALiBi, gates and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from services.worker.models.config import ModelError, require_positive
from services.worker.models.published.layout import Published

JAIS = "JAISLMHeadModel"


class _RawScaling(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["linear"]
    train_seq_len: int


class _RawJais(Struct, kw_only=True):
    """By the names of the first release, too, where these differ."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: Literal["swiglu"]
    layer_norm_epsilon: float = 1e-5
    position_embedding_type: Literal["alibi"]
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True
    mup_width_scale: float = 1.0
    mup_embeddings_scale: float = 1.0
    mup_output_alpha: float = 1.0
    mup_scale_qk_dot_by_d: bool = False
    width_scale: float | None = None
    embeddings_scale: float | None = None
    scale_qk_dot_by_d: bool | None = None
    alibi_scaling: _RawScaling | None = None


def jais(raw: Mapping[str, Any]) -> Published:
    """Behind `train_seq_len` tokens ALiBi's slopes would depend on a prompt's length: so many are served. Raises
    ModelError, and msgspec.ValidationError."""
    own = msgspec.convert(raw, _RawJais)
    require_positive(n_embd=own.n_embd, n_layer=own.n_layer, n_head=own.n_head)
    logits = own.mup_output_alpha * own.mup_width_scale if own.width_scale is None else own.width_scale
    if logits <= 0:
        raise ModelError(f"mup_width_scale {logits} of logits is not positive")
    longest = None if own.alibi_scaling is None else own.alibi_scaling.train_seq_len
    if longest is not None and longest < 2:
        raise ModelError(f"alibi_scaling: train_seq_len {longest} is not supported; 2 and more are")
    base = {
        "vocab_size": own.vocab_size,
        "hidden_size": own.n_embd,
        "intermediate_size": own.n_inner or 4 * own.n_embd,
        "num_hidden_layers": own.n_layer,
        "num_attention_heads": own.n_head,
        "max_position_embeddings": own.n_positions,
        "rms_norm_eps": own.layer_norm_epsilon,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": own.tie_word_embeddings,
    }
    by_dim = own.mup_scale_qk_dot_by_d if own.scale_qk_dot_by_d is None else own.scale_qk_dot_by_d
    changes: dict[str, Any] = {
        "layer_norms": True,
        "alibi": True,
        "rotary_dim": 0,
        "embedding_scale": own.mup_embeddings_scale if own.embeddings_scale is None else own.embeddings_scale,
        "logits_divisor": 1 / logits,
    }
    if by_dim:
        changes["attention_scale"] = 1 / (own.n_embd // own.n_head)
    return Published(base, changes, longest)
