"""Words that are never written: the last token of each is banned behind the others, in the output, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import sent
from services.worker.sampling.held import Held

ANY = -2
"""In a beginning: matches whatever stands there, as the word begins later."""


class BadWords:
    """The words of each slot, in arrays as large as the most and longest words so far. Unused places repeat a slot's
    first word, which changes nothing."""

    def __init__(self, slots: int) -> None:
        self._beginnings = np.zeros((slots, 0, 0), dtype=np.int32)
        """[slots, words, longest - 1] all tokens of a word but its last, moved to the end."""
        self._lasts = np.zeros((slots, 0), dtype=np.int64)
        """[slots, words]"""

    def put(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        """Replaces the slot's words; there is at least one, and none is empty."""
        self._make_room(len(words), max(map(len, words)) - 1)
        room = self._beginnings.shape[2]
        beginnings = [[ANY] * (room - len(word) + 1) + list(word[:-1]) for word in words]
        lasts = [word[-1] for word in words]
        spare = self._lasts.shape[1] - len(words)
        self._beginnings[slot] = beginnings + beginnings[:1] * spare
        self._lasts[slot] = lasts + lasts[:1] * spare

    def _make_room(self, words: int, longest: int) -> None:
        slots, had_words, had_longest = self._beginnings.shape
        words, longest = max(words, had_words), max(longest, had_longest)
        if (words, longest) == (had_words, had_longest):
            return
        beginnings = np.full((slots, words, longest), ANY, dtype=np.int32)
        lasts = np.zeros((slots, words), dtype=np.int64)
        if had_words:
            beginnings[:, :had_words, longest - had_longest :] = self._beginnings
            beginnings[:, had_words:] = beginnings[:, :1]
            lasts[:, :had_words] = self._lasts
            lasts[:, had_words:] = self._lasts[:, :1]
        self._beginnings, self._lasts = beginnings, lasts

    def banned(self, logits: Tensor, slots: NDArray[np.intp], held: Held) -> Tensor:
        """logits [P, vocab] of the sequences in `slots` → -inf for what would end a word; overwrites `logits`."""
        device = logits.device
        beginnings, lasts = sent(self._beginnings[slots], device), sent(self._lasts[slots], device)
        before = held.last_output(beginnings.shape[2]).unsqueeze(1)
        due = ((beginnings == before) | (beginnings == ANY)).all(dim=2)
        # Words with the same last token meet in one place: what is added there survives, what is written would not.
        return logits.scatter_add_(1, lasts, torch.where(due, -torch.inf, 0.0).to(logits.dtype))
