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
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
"""[rounds, 2, 1] what is added to the key's words in each round."""

Words = NDArray[np.uint64]
"""32-bit words, each in the low half of a uint64, so that products are exact."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter under its key."""
    even, odd = np.stack((counter[0], counter[2])), np.stack((counter[1], counter[3]))
    # Both halves of a round, and the keys of all, at once: for a step's rows each call of NumPy's costs the same.
    for round_keys in (np.stack(key) + _WEYL) & _LOW:
        products = even * _MULTIPLIERS
        crossed = products[::-1]
        even = (crossed >> _SHIFT) ^ odd ^ round_keys
        odd = crossed & _LOW
    return even[0], odd[0], even[1], odd[1]


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
