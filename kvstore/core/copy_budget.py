"""How fast KV blocks may be copied: a token bucket as a single number, so that processes can share it.

The generic cell rate algorithm (ITU-T I.371): of a bucket is kept only when it would be full again, the theoretical
arrival time. Whoever copies moves it on by what the bytes take at the rate, and waits until it is no further ahead than
the burst. Nobody is refused, and those that come later wait for those that came before.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_BURST = 4 * 2**20
"""Bytes that may be copied at once, however low the rate: a piece of a transfer."""
BURST_SECONDS = 0.005
"""Or as many as the rate allows in this time, if that is more."""
MAX_AHEAD = 60.0
"""Seconds; a bucket that is emptied for longer was written by a broken process, and counts as full."""


class CopyBudget(NamedTuple):
    """A rate that all copies of a host keep together."""

    rate: float
    """Bytes per second; 0: no limit."""

    def take(self, full_at: float, size: int, now: float) -> tuple[float, float]:
        """Copies `size` bytes from a bucket that would be full at `full_at`. Returns when it would be now, and for how
        many seconds the copy waits."""
        if self.rate <= 0.0:
            return full_at, 0.0
        start = now if full_at - now > MAX_AHEAD else max(full_at, now)
        full_at = start + size / self.rate
        return full_at, max(0.0, full_at - self.burst / self.rate - now)

    @property
    def burst(self) -> float:
        """Bytes that may be copied at once after a pause."""
        return max(MIN_BURST, self.rate * BURST_SECONDS)
