"""Numbers of `config.json` that no model has, wherever they stand in it."""

from __future__ import annotations

from typing import Any

MAX_LAYERS = 10_000
"""Each takes memory before a weight is read."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITIVE = (
    *("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    *("rope_theta", "rope_local_base_freq", "global_rope_theta"),
)
"""What norms add to a mean square before they divide by its root, and bases of rotations: of others logits are no
numbers, without a word of it."""


def refuse_impossible(config: Any) -> None:
    """Raises ValueError for such a number of `config`, or of a part of it, with its key."""
    if isinstance(config, list):
        for part in config:
            refuse_impossible(part)
    elif isinstance(config, dict):
        for key, value in config.items():
            _check(key, value)
            refuse_impossible(value)


def _check(key: str, value: Any) -> None:
    if not isinstance(value, int | float):
        return
    if key in _LAYERS and value > MAX_LAYERS:
        raise ValueError(f"{key} {value} is more than {MAX_LAYERS}")
    if key in _POSITIVE and value <= 0:
        raise ValueError(f"{key} {value} is not positive")
