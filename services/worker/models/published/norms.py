"""Reads the `config.json` of models whose Python code comes with their checkpoints and whose layers norm what they
give: Ouro, which goes through its layers several times (arXiv:2510.25741), and PLaMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import LayerConfig, ModelError
from services.worker.models.published.layout import Published, converted

_Keys = Mapping[str, Any]


class _RawOuro(Struct, kw_only=True):
    num_hidden_layers: int
    total_ut_steps: int = 4
    early_exit_threshold: float | None = None
    early_exit_step: int | None = None
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None


def ouro(raw: _Keys) -> Published:
    """Rows go through all layers `total_ut_steps` times, with keys and values of each time; a gate that would end that
    sooner is not asked, as a threshold of 1 has it. Raises ModelError, and msgspec.ValidationError."""
    own = msgspec.convert(raw, _RawOuro)
    last = own.total_ut_steps - 1
    if own.total_ut_steps < 1 or own.num_hidden_layers < 1:
        raise ModelError(f"total_ut_steps {own.total_ut_steps} of {own.num_hidden_layers} layers is not supported")
    if own.early_exit_threshold is not None and own.early_exit_threshold < 1:
        raise ModelError(
            f"early_exit_threshold {own.early_exit_threshold} is not supported; 1 is: all steps are computed"
        )
    if own.early_exit_step not in (None, last):
        raise ModelError(f"early_exit_step {own.early_exit_step} is not supported; {last} is: none is left out")
    base = {key: value for key, value in raw.items() if key not in ("attention_bias", "mlp_bias")}
    return Published(base, {"post_norms": True}, arranged=partial(_loops, own))


def _loops(own: _RawOuro, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    return tuple(
        replace(layer, blocks=(number, number), loop=loop, begins_loop=loop > 0 and number == 0)
        for loop in range(own.total_ut_steps)
        for number in range(own.num_hidden_layers)
    )


class _RawPlamo3(Struct, kw_only=True):
    """Defaults are those of the published code."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 13_312
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    window_size: int = 2048
    sliding_window: int | list[int | None] | None = None
    interleaved_sliding_window: list[int | None] | None = None
    sliding_window_pattern: int = 8
    rope_theta: float = 1_000_000.0
    rope_global_theta: float | None = None
    rope_local_theta: float = 10_000.0
    rope_scaling_factor: float = 1.0
    scale_embedding: Literal[False] = False
    attention_bias: Literal[False] = False


_KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "sliding_window_pattern"),
)


def plamo_3(raw: _Keys) -> Published:
    """A Gemma 3 but for its activation, the scale of its embeddings and what norms behind blocks differ from. Raises
    ModelError, and msgspec.ValidationError."""
    own = converted(raw, _RawPlamo3)
    for key in ("window_size", "rope_theta"):
        if raw.get(key) is None and not any(raw.get(each) for each in _OTHERS[key]):
            raise ModelError(f"{key} is missing: releases of the published code differ in what it is then")
    if own.rope_scaling_factor != 1.0:
        raise ModelError(f"rope_scaling_factor {own.rope_scaling_factor} is not supported; 1 is")
    if own.sliding_window_pattern < 1:
        raise ModelError(f"sliding_window_pattern {own.sliding_window_pattern} is not positive")
    theta = own.rope_theta if raw.get("rope_theta") or own.rope_global_theta is None else own.rope_global_theta
    base = {key: getattr(own, key) for key in _KEPT} | {
        "query_pre_attn_scalar": own.head_dim,
        "sliding_window": _window(own),
        "rope_theta": theta,
        "rope_local_base_freq": own.rope_local_theta,
    }
    changes = {"activation": "silu", "embedding_scale": None, "post_norm_offsets": (1 / 5, 1 / 5**1.5)}
    return Published(base, changes, like="Gemma3ForCausalLM")


_OTHERS = {
    "window_size": ("sliding_window", "interleaved_sliding_window"),
    "rope_theta": ("rope_global_theta",),
}
"""What older releases call it."""


def _window(own: _RawPlamo3) -> int:
    """One for all layers that have any; older configurations name it for each layer."""
    named = own.interleaved_sliding_window if own.sliding_window is None else own.sliding_window
    if named is None:
        return own.window_size
    if isinstance(named, int):
        return named
    of_pattern = [bool((number + 1) % own.sliding_window_pattern) for number in range(own.num_hidden_layers)]
    windows = {each for each in named if each is not None}
    if len(windows) > 1 or [each is not None for each in named] != of_pattern or not windows:
        raise ModelError(
            f"sliding_window {named} is not supported: each sliding_window_pattern-th layer sees all, the others have "
            "one window"
        )
    return windows.pop()
