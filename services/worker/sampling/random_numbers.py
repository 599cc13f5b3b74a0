"""The key that each token is drawn by: a function of the request's seed and the output position alone.

Counter-based, Philox4x32-10, with no generator state to keep, copy or lose. Salmon, Moraes, Dror, Shaw: "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = NDArray[np.uint64]
"""32-bit words, each in the low half of a uint64, so that products are exact."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter under its key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_number in range(_ROUNDS):
        if round_number:
            k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
    return c0, c1, c2, c3


def race_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int64]:
    """64 random bits for each (seed, output position): what all tokens' times are made from, see `races`."""
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    counter = (positions.astype(np.uint64), zeros, zeros, zeros)
    first, second, _, _ = philox(counter, (seeds & _LOW, seeds >> _SHIFT))
    return (second << _SHIFT | first).view(np.int64)


# Where the host does not know yet how many drafts were rejected, it does not know the output position either: it sends
# the keys of all positions that may be meant, and the device chooses.


class RejectedDrafts(NamedTuple):
    """How many tokens fewer P rows or sequences have than assumed, as drafts were rejected. On the device."""

    counts: Tensor
    """int32 [P] rejected drafts of each row or sequence."""
    max_count: int
    """Upper bound of `counts`."""

    def of(self, which: Tensor) -> RejectedDrafts:
        """The entries with these numbers."""
        return RejectedDrafts(self.counts.index_select(0, which), self.max_count)

    def part(self, first: int, last: int) -> RejectedDrafts:
        """The entries from `first` up to `last`."""
        return RejectedDrafts(self.counts[first:last], self.max_count)
