"""What an MLP makes of its gates and ups, by name, and how far they go. Computes nothing."""

from __future__ import annotations

from typing import Literal, NamedTuple

ActivationName = Literal["silu", "gelu_tanh", "swigluoai", "relu2", "silu_limited", "swiglustep"]
"""What is made of gates and ups: act(gate) * up; swigluoai (vLLM's name), of gpt-oss: gates up to a limit, ups
between that and its negative: gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1). relu2: there are no gates, I outputs in
place of 2 * I, and ups that are not negative are squared. silu_limited, of DeepSeek-V4: silu of gates up to a limit,
times ups between that and its negative; swiglustep (vLLM's name), of Ling 3: silu of gates, up to the limit, times
the same ups."""
SWIGLU_ALPHA, SWIGLU_LIMIT, SILU_LIMIT = 1.702, 7.0, 10.0
_LIMITS = {"swigluoai": SWIGLU_LIMIT, "swiglustep": SWIGLU_LIMIT, "silu_limited": SILU_LIMIT}


class LimitedActivation(NamedTuple):
    """An activation with a limit of its own."""

    name: ActivationName
    limit: float


Activation = ActivationName | LimitedActivation


def limit_of(kind: Activation) -> LimitedActivation:
    """The activation with its usual limit, where it has none of its own; 0: there is none."""
    return kind if isinstance(kind, LimitedActivation) else LimitedActivation(kind, _LIMITS.get(kind, 0.0))


def swiglustep(limit: float | None) -> Activation | None:
    """With this limit; None: there is none, and so no such activation."""
    return None if limit is None else LimitedActivation("swiglustep", limit)
