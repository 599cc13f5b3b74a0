"""Drafting token by token: rows of many steps, one for each sequence, prepared at once; and how drafts are drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.crossing import sent
from services.worker.ops import BatchMeta
from services.worker.rows import Int32s, Slots
from services.worker.sampling.parameters import Feature
from services.worker.sampling.sampler import draw_plainly
from services.worker.speculation.proposer import Histories
from shared.blocks import BLOCK_SIZE, blocks_for

_ALIGNED = 16
"""Numbers that each array's start is a multiple of, as in `rows_on_device`."""


def chain(slots: Slots, positions: Int32s, block_tables: Int32s, device: torch.device) -> list[BatchMeta]:
    """positions [K, P]: of each of P sequences the one that each of K steps computes. All in one copy."""
    steps, count = positions.shape
    longest = positions.max(axis=1) + 1
    width = blocks_for(int(longest.max()))
    row, table = _aligned(count + 1), _aligned(count * width)
    numbers = np.empty(3 * steps * row + row + table, dtype=np.int32)
    by_step = numbers[: 3 * steps * row].reshape(3, steps, row)
    block, offset = np.divmod(positions, BLOCK_SIZE)
    by_step[0, :, :count] = positions
    by_step[1, :, :count] = block_tables[slots, block] * BLOCK_SIZE + offset
    by_step[2, :, :count] = positions + 1
    numbers[3 * steps * row : -table] = np.arange(row)
    numbers[len(numbers) - table :][: count * width] = block_tables[slots, :width].ravel()
    return _metas(sent(numbers, device), steps, count, longest.tolist())


def _metas(numbers: Tensor, steps: int, count: int, longest: list[int]) -> list[BatchMeta]:
    row = _aligned(count + 1)
    places, slots, lengths = numbers[: 3 * steps * row].view(3, steps, row)[:, :, :count].unbind()
    ordinals = numbers[3 * steps * row :]
    tables = numbers[(3 * steps + 1) * row :][: count * blocks_for(max(longest))].view(count, -1)
    return [
        BatchMeta(
            query_starts=ordinals[: count + 1],
            context_lens=lengths[step],
            block_tables=tables,
            slots=slots[step],
            positions=places[step],
            logits_rows=ordinals[:count],
            num_decodes=count,
            prefills=(),
            max_query=1,
            max_context=longest[step],
            every_row=True,
        )
        for step in range(steps)
    ]


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


class Draws:
    """How the drafts of some sequences are drawn: by the random numbers of their positions, see `proposer.Drafts`."""

    def __init__(self, slots: Slots, histories: Histories) -> None:
        self._slots = slots
        self._histories = histories
        self._first = histories.choose(slots, 0)
        self._greedy = not self._first.features & Feature.RANDOM
        """Then every position is drawn in the same way."""

    def token(self, logits: Tensor, ahead: int) -> Tensor:
        """logits [P, vocab] of the draft with `ahead` before it → [P] int32."""
        choices = self._first if self._greedy else self._histories.choose(self._slots, ahead)
        return draw_plainly(logits, choices).to(torch.int32)

    def tokens(self, logits: list[Tensor]) -> Tensor:
        """Of all drafts at once, the first's logits first → [P, K] int32."""
        if self._greedy:
            choices = self._first
        else:
            ahead = np.repeat(np.arange(len(logits), dtype=np.int32), len(self._slots))
            choices = self._histories.choose(np.tile(self._slots, len(logits)), ahead)
        drawn = draw_plainly(logits[0] if len(logits) == 1 else torch.cat(logits), choices)
        return drawn.view(len(logits), -1).t().to(torch.int32)
