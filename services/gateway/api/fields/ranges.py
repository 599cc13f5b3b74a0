"""Which values the numbers of a request may have. The bounds are vLLM's."""

from __future__ import annotations

import math
from typing import NamedTuple

INT64 = 2**63


class AllowedRange(NamedTuple):
    """The values that a number may have; NaN and infinity never are among them."""

    low: float | None
    high: float | None
    low_allowed: bool = True

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        if isinstance(value, float) and not math.isfinite(value):
            return False
        above = self.low is None or value > self.low or (self.low_allowed and value == self.low)
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'at least' if self.low_allowed else 'above'} {_bound(self.low)}"
        high = "" if self.high is None else f"at most {_bound(self.high)}"
        return " and ".join(part for part in (low, high) if part)


def _bound(value: float) -> str:
    """A bound in an error message: powers of two are unreadable in digits."""
    powers = {2**31 - 1: "2^31 - 1", -(2**31): "-2^31", INT64 - 1: "2^63 - 1", -INT64: "-2^63"}
    return powers.get(int(value), f"{value:g}")


RANGES = {
    "n": AllowedRange(1, 128),
    "temperature": AllowedRange(0, None),
    "top_p": AllowedRange(0, 1, low_allowed=False),
    "top_k": AllowedRange(-1, INT64 - 1),
    "min_p": AllowedRange(0, 1),
    "presence_penalty": AllowedRange(-2, 2),
    "frequency_penalty": AllowedRange(-2, 2),
    "repetition_penalty": AllowedRange(0, None, low_allowed=False),
    "max_tokens": AllowedRange(1, INT64 - 1),
    "max_completion_tokens": AllowedRange(1, INT64 - 1),
    "min_tokens": AllowedRange(0, INT64 - 1),
    "seed": AllowedRange(-INT64, INT64 - 1),
    "priority": AllowedRange(-(2**31), 2**31 - 1),
    "thinking_token_budget": AllowedRange(-1, INT64 - 1),
    "length_penalty": AllowedRange(-10, 10),
    "stream_interval": AllowedRange(1, 1024),
}
