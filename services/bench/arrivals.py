"""When each request starts."""

from __future__ import annotations

import math
from random import Random


def arrivals(count: int, rate: float, burstiness: float, random: Random) -> list[float]:
    """`count` start times in seconds, ascending from 0. An infinite rate starts all at once.

    Gaps are gamma-distributed with mean 1 / `rate` and shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += random.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
