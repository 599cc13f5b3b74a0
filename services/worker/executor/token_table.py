"""What a rank's sequences hold, on its device: what a step draws is written here, and read by the step behind it.

So neither step waits until the host knows the tokens. A cell is a sequence index and a position, as one number.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.batch.rows import Indices, Int32s
from services.worker.models.config import ModelError
from services.worker.ops.gpu import runs_triton
from services.worker.ops.transfer import on_this_device, to_device, to_device_together
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.random_numbers import RejectedDrafts

_MAX_CELLS = 2**31
"""Cells are numbered as everything else that a step's rows are sent with: in 32 bits."""


def table_bytes(max_sequences: int, width: int) -> int:
    """What a table of `width` tokens a sequence takes."""
    return max_sequences * width * torch.int32.itemsize


class TokenTable:
    """Owns the tokens. Everything is done in the order of the device's current stream."""

    def __init__(self, max_sequences: int, width: int, device: torch.device) -> None:
        """`width` tokens a sequence. Raises ModelError where these are too many to be numbered."""
        if max_sequences * width > _MAX_CELLS:
            raise ModelError(
                f"{max_sequences} sequences of {width} tokens each are too many: lower max_num_seqs or max_model_len"
            )
        self._device = device
        self._by_kernel = runs_triton(device)
        self._width = width
        self._cells: Tensor = torch.zeros(max_sequences * width, dtype=torch.int32, device=device)

    def cells(self, seq_indices: Indices, positions: Int32s) -> Int32s:
        """Of as many sequence indices as positions."""
        numbered: Int32s = (seq_indices * self._width + positions).astype(np.int32)
        return numbered

    def put(self, cells: Int32s, tokens: Int32s) -> None:
        """Writes what the host knows."""
        where, what = to_device_together((cells.astype(np.int64), tokens), self._device)
        self._cells.index_copy_(0, where, what)

    def put_drafts(
        self, seq_indices: Indices, places: Int32s, drafts: DraftTokens, rejected: RejectedDrafts | None
    ) -> None:
        """Writes those of P sequences, from `places` [P] of `seq_indices` [P] on, moved back by the `rejected` [P]."""
        width = drafts.tokens.shape[1]
        rows, columns = np.nonzero(np.arange(width) < drafts.counts[:, None])
        if not len(rows):
            return
        cells = self.cells(seq_indices[rows], places[rows] + columns.astype(np.int32)).astype(np.int64)
        where, whose, which = to_device_together((cells, rows, rows * width + columns), self._device)
        if rejected is not None:
            where = where - rejected.of(whose).counts
        tokens = on_this_device(drafts.tokens, self._device).reshape(-1).index_select(0, which)
        self._cells.index_copy_(0, where, tokens)

    def feed(self, cells: Tensor, rows: Tensor | None, tokens: Tensor) -> None:
        """Writes what was drawn, `tokens` [R], each behind the cell of its row. cells [n] are those of a step's rows,
        of which `rows` [R] names those that were drawn behind; None: all."""
        if self._by_kernel:
            from services.worker.ops.triton.decode_inputs import feed

            feed(self._cells, cells, rows, tokens)
            return
        drawing = cells if rows is None else cells.index_select(0, rows)
        self._cells.index_copy_(0, (drawing + 1).long(), tokens.int())

    def read(self, cells: Tensor) -> Tensor:
        """[n] the tokens at `cells` [n]."""
        return self._cells.index_select(0, cells)

    def history(self, prompt_lengths: Int32s) -> HistoryLookup:
        """What the sampler asks for, `prompt_lengths` by sequence index."""

        def held(seq_indices: Indices, positions: Int32s) -> tuple[Tensor, Int32s, Int32s]:
            prompts = prompt_lengths[seq_indices]
            lengths = prompts + positions
            longest = self._cells.view(-1, self._width)[:, : int(lengths.max())]
            return longest.index_select(0, to_device(seq_indices, self._device)), lengths, prompts

        return held
