"""Positions with three axes (m-RoPE): where a prompt's images stand, and what follows them, rotates by other positions
than its place in the sequence.

An image's tokens count frames, rows and columns from where the text before it ends, those of a video count its frames
in whatever steps these are said to have, and the text behind goes on behind the greatest of all (arXiv:2409.12191, 2.1,
and `get_rope_index` of `transformers`' Qwen2-VL up to 4.57; since 5.0 it goes on behind rows and columns alone, which
is the same but for videos that are longer than wide: there text would have the positions of frames).
"""

from __future__ import annotations

import numpy as np

from services.worker.batch.rows import Indices, Int32s
from shared.messages.generation import POSITION_AXES, PromptEmbeds


def prompt_shifts(embeds: PromptEmbeds) -> Int32s:
    """[3, tokens + 1] how far each axis of each token is ahead of its place, up to the end of the last image or video;
    the last column is that of all tokens behind it."""
    parts: list[Int32s] = []
    place = position = first = 0
    offsets = embeds.offsets or (None,) * len(embeds.runs)
    for (start, count), grid, offset in zip(embeds.runs, embeds.grids, offsets, strict=True):
        if grid is None:  # as a text's
            continue
        parts.append(np.full((POSITION_AXES, start - place), position - place, dtype=np.int32))
        position += start - place
        if offset is None:
            first = position
        own = np.indices(grid, dtype=np.int32).reshape(POSITION_AXES, count) + first
        own[0] += offset or 0
        parts.append(own - np.arange(start, start + count))
        position = int(own.max()) + 1 if offset is None else max(position, int(own.max()) + 1)
        place = start + count
    parts.append(np.full((POSITION_AXES, 1), position - place, dtype=np.int32))
    return np.concatenate(parts, axis=1, dtype=np.int32)


class RopeShifts:
    """Owned by the sequence table: what rows' positions are shifted by, by sequence index."""

    def __init__(self, max_sequences: int) -> None:
        self._behind: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """Of all tokens behind a prompt's images."""
        self._shifted: set[int] = set()
        """Those whose prompts have images."""
        self._within: dict[int, Int32s] = {}
        """[3, tokens] of prompts with images that are not computed yet."""

    def clear(self) -> None:
        """Forgets every sequence."""
        self._behind[:] = 0
        self._shifted.clear()
        self._within.clear()

    def release(self, seq_index: int) -> None:
        """Forgets this one."""
        if seq_index in self._shifted:
            self._behind[seq_index] = 0
            self._shifted.remove(seq_index)
            self._within.pop(seq_index, None)

    def add(self, seq_index: int, embeds: PromptEmbeds, computed: int) -> None:
        """A sequence whose prompt has these rows, and so many computed tokens."""
        if not any(embeds.grids):
            return
        shifts = prompt_shifts(embeds)
        self._shifted.add(seq_index)
        self._behind[seq_index] = shifts[0, -1]
        if computed < shifts.shape[1] - 1:
            self._within[seq_index] = shifts[:, :-1]

    def any_of(self, seq_indices: Indices) -> bool:
        """Whether one of these sequences is shifted."""
        return bool(self._shifted) and not self._shifted.isdisjoint(seq_indices.tolist())

    def of(self, seq_indices: Indices, places: Int32s) -> Int32s | None:
        """[3, n] for rows of these sequences [n] and places [n]; None where no row is shifted."""
        if not self._shifted:
            return None
        shifts = np.repeat(self._behind[seq_indices][None], POSITION_AXES, axis=0)
        for seq_index, within in list(self._within.items()):
            rows = np.flatnonzero(seq_indices == seq_index)
            if not len(rows):
                continue
            inside = rows[places[rows] < within.shape[1]]
            shifts[:, inside] = within[:, places[inside]]
            if len(inside) < len(rows) or places[rows[-1]] + 1 == within.shape[1]:
                del self._within[seq_index]  # rows only go forward
        return shifts if shifts.any() else None
