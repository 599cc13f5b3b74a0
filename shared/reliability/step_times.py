"""How long steps of a device take, by their size, and from when on one that takes longer counts as hung.

No clock: seconds are measured by the caller.
"""

from __future__ import annotations

from collections import deque

RECENT_STEPS = 8
"""Steps of a size that are remembered."""
FACTOR = 10.0


class StepTimes:
    """Owns how long the last steps took, by their size in tokens rounded to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._shortest: dict[int, float] = {}
        """Of each size: it is asked for several times for each step."""

    def record(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = tokens.bit_length()
        recent = self._seconds.get(size)
        if recent is None:
            recent = self._seconds[size] = deque(maxlen=RECENT_STEPS)
        recent.append(seconds)
        self._shortest[size] = min(recent)

    def shortest(self, tokens: int) -> float:
        """The shortest of the last steps of this size, in seconds; 0 where there was none."""
        return self._shortest.get(tokens.bit_length(), 0.0)

    def longest(self, tokens: int) -> float | None:
        """The longest of the last steps of this size, in seconds; None where there was none."""
        seconds = self._seconds.get(tokens.bit_length())
        return max(seconds) if seconds else None

    def extrapolated(self, tokens: int) -> float | None:
        """What a step of a size that was never seen may take, in seconds: in proportion to the next smaller size that
        was, or as long as the next larger one. None before the first step."""
        size = tokens.bit_length()
        if not self._seconds:
            return None
        smaller = [seen for seen in self._seconds if seen < size]
        if smaller:
            return float(max(self._seconds[max(smaller)]) * 2 ** (size - max(smaller)))
        return max(self._seconds[min(self._seconds)])


def deadline_of(times: StepTimes, tokens: int, *, shortest: float, unseen: float, first: float) -> float:
    """The seconds after which a step of so many tokens counts as hung: FACTOR times its predicted time, and never less
    than `shortest`.

    The first step of a size may take `unseen` seconds at least, as memory is touched and kernels are compiled for it;
    the very first may take `first` seconds, as nothing is known of the device.
    """
    longest = times.longest(tokens)
    if longest is not None:
        return max(shortest, FACTOR * longest)
    extrapolated = times.extrapolated(tokens)
    return max(shortest, first if extrapolated is None else max(unseen, FACTOR * extrapolated))
