"""What the last steps have picked of a mixture's experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Snapshot(NamedTuple):
    step: int
    """Whose picks are the first that it has not."""
    picks: Tensor


class LoadWindow:
    """Owns what was counted when a window began. Used by the thread that computes.

    Only every `interval`-th step is asked for its window, so counts are copied where such a window begins."""

    def __init__(self, counts: Sequence[Tensor], window: int, interval: int) -> None:
        """`counts`: int64 [E] of each layer, which steps add to."""
        self._counts, self._window, self._interval = counts, window, interval
        self._begun: deque[_Snapshot] = deque(maxlen=-(-window // interval) + 1)

    def restart(self) -> None:
        """What was counted is forgotten."""
        self._begun.clear()

    def begin_step(self, step: int) -> None:
        """The step of this number is next."""
        if (step + self._window) % self._interval == 0:
            self._begun.append(_Snapshot(step, torch.stack(list(self._counts))))

    def load(self, step: int) -> Tensor:
        """int64 [layers, E]: picks of the `window` steps before this one, or of all where there were fewer."""
        while self._begun and self._begun[0].step < step - self._window:
            self._begun.popleft()
        picks = torch.stack(list(self._counts))
        full = self._begun and self._begun[0].step == step - self._window
        return picks - self._begun[0].picks if full else picks
