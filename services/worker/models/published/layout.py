"""What a `config.json` of an architecture whose Python code comes with its checkpoints says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.worker.models.config import LayerConfig, ModelConfig

_Raw = TypeVar("_Raw")


class Published(NamedTuple):
    """What a `config.json` says."""

    base: dict[str, Any]
    """As that of the architecture which it is `like` would say it."""
    changes: dict[str, Any]
    """Fields of its `ModelConfig` that are others."""
    longest: int | None = None
    """Tokens of the longest sequence that is computed so; None: as many as `base` says."""
    arranged: Callable[[LayerConfig], tuple[LayerConfig, ...]] | None = None
    """Its layers, by one of that Llama's, which are alike; None: they are its."""
    like: str = "LlamaForCausalLM"
    revised: Callable[[ModelConfig], ModelConfig] | None = None
    """What it is, by what that one would be; None: nothing is other than `changes` say."""


def converted(raw: Mapping[str, Any], kind: type[_Raw]) -> _Raw:
    """`raw` as a `kind`; keys that are `null` have their defaults. Raises msgspec.ValidationError."""
    return msgspec.convert({key: value for key, value in raw.items() if value is not None}, kind)
