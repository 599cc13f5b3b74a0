"""The states of a rank's sequences, and the checkpoints of them that others go on from."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.models.weights import KvCaches
from services.worker.ops.interface import StateCache


class SequenceStates:
    """Where in the caches of layers with states which states lie: first those of sequences, at the index that each has
    in the rank's table; then the checkpoints. Copies are made in the order of steps, on the device."""

    def __init__(self, caches: KvCaches, sequences: int, checkpoints: int) -> None:
        """`caches`: of all layers, for so many sequences and checkpoints."""
        self.checkpoints = checkpoints
        self._caches = [cache for cache in caches if isinstance(cache, StateCache)]
        self._first = sequences

    def restore(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Before a step: sequences that begin go on from checkpoints, (index, checkpoint)."""
        for seq_index, checkpoint in pairs:
            self._copy(self._first + checkpoint, seq_index)

    def keep(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Behind a step: its sequences' states are checkpoints now, (index, checkpoint)."""
        for seq_index, checkpoint in pairs:
            self._copy(seq_index, self._first + checkpoint)

    def _copy(self, source: int, to: int) -> None:
        for windows, states in self._caches:
            windows[to].copy_(windows[source])
            states[to].copy_(states[source])
