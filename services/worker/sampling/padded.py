"""Lists of different lengths, one for each slot, in one array: a batch's lists are one indexing away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Padded:
    """Rows padded by repeating their first item, so that the padding may be written where that was written: twice the
    same value. As wide as the longest list so far."""

    def __init__(self, slots: int, dtype: type[np.generic]) -> None:
        self._lengths = np.zeros(slots, dtype=np.int32)
        self._values: NDArray[Any] = np.zeros((slots, 0), dtype=dtype)

    def put(self, slot: int, items: Sequence[int] | Sequence[float] | NDArray[Any]) -> None:
        """Replaces the slot's list. One that is never asked for may be empty."""
        count = len(items)
        self._lengths[slot] = count
        if count > self._values.shape[1]:
            wider = np.zeros((len(self._values), count), dtype=self._values.dtype)
            wider[:, : self._values.shape[1]] = self._values
            fresh = wider[:, self._values.shape[1] :]
            fresh[:] = wider[:, :1] if self._values.shape[1] else 0
            self._values = wider
        if count:
            self._values[slot, :count] = items
            self._values[slot, count:] = items[0]

    def rows(self, slots: NDArray[np.intp]) -> NDArray[Any]:
        """[P, longest of theirs]"""
        return self._values[slots, : int(self._lengths[slots].max())]

    def lengths(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        return self._lengths[slots]
