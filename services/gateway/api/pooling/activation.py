"""Vectors as numbers, and what a classifier's logits become."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import assert_never

from services.gateway.api.response import ChoiceState
from shared.messages.model_card import LogitActivation

FLOAT_BYTES = 4


def vector_of(choice: ChoiceState) -> tuple[float, ...]:
    """Returns the vector of a choice as numbers."""
    return struct.unpack(f"<{len(choice.vector) // FLOAT_BYTES}f", choice.vector)


def packed_floats(numbers: Sequence[float]) -> bytes:
    """Returns them as little-endian float32."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def activated(logits: Sequence[float], activation: LogitActivation) -> Sequence[float]:
    """Returns what PyTorch's function of that name makes of finite logits."""
    match activation:
        case "none":
            return logits
        case "sigmoid":
            return tuple(map(_sigmoid, logits))
        case "softmax":
            most = max(logits)
            parts = [math.exp(logit - most) for logit in logits]
            total = sum(parts)
            return tuple(part / total for part in parts)
        case _:
            assert_never(activation)


def _sigmoid(logit: float) -> float:
    """No overflow: the exponent is never positive."""
    part = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else part) / (1.0 + part)
