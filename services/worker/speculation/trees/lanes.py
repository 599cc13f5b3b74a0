"""Where a head's keys and values lie while it looks for a tree: paths side by side, each in blocks of its own. Pure.

Level by level the best `topk` paths of each sequence go on; each is a *lane*. A lane of the next level may go on from
any of this one, so lanes of two levels in a row have different blocks: what a lane goes on from is copied to its own,
from the beginning of the block that the first draft lies in.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.batch.draft_trees import LANE_BLOCKS
from services.worker.batch.rows import Indices, Int32s
from services.worker.ops.drafts import SlotCopies
from services.worker.ops.interface import BatchMeta
from shared.blocks import blocks_for


class DraftLanes:
    """The lanes of S sequences whose first draft is of `positions` [S]; `first_block`: of their own blocks."""

    def __init__(self, tables: Int32s, positions: Int32s, topk: int, first_block: int, block_size: int) -> None:
        """`tables` [S, width] of the sequences' blocks."""
        self._positions, self._topk, self._block_size = positions, topk, block_size
        count = len(positions)
        shape = (2, count * topk, LANE_BLOCKS)
        self._blocks = (first_block + np.arange(np.prod(shape), dtype=np.int32)).reshape(shape)
        self._tables = np.repeat(tables, topk, axis=0)
        """[S * topk, width] those of the latest level."""
        self._level = 0

    def next_level(self, ahead: Int32s, lanes: Indices) -> BatchMeta:
        """The rows [S * topk] of the next level, `ahead` [S] of the first positions. `lanes` [S * topk]: which of the
        latest level's each goes on from; of the first level, its own."""
        size, first = self._block_size, np.repeat(self._positions // self._block_size, self._topk)
        positions = np.repeat(self._positions + ahead, self._topk).astype(np.int32)
        own = self._blocks[self._level % 2]
        before, tables = self._tables[lanes], self._tables.copy()
        everyone = np.arange(len(positions))
        for number in range(LANE_BLOCKS):
            inside = np.flatnonzero(first + number < tables.shape[1])
            tables[inside, first[inside] + number] = own[inside, number]
        places = first[:, None] * size + np.arange(LANE_BLOCKS * size, dtype=np.int32)
        rows, columns = np.nonzero(places < positions[:, None])
        places = places[rows, columns]
        sources = before[rows, places // size] * size + places % size
        targets = tables[rows, places // size] * size + places % size
        self._tables = tables
        self._level += 1
        longest = int(positions.max()) + 1
        ordinals = np.arange(len(positions) + 1, dtype=np.int32)
        return BatchMeta(
            query_starts=torch.from_numpy(ordinals),
            context_lens=torch.from_numpy(positions + 1),
            block_tables=torch.from_numpy(np.ascontiguousarray(tables[:, : blocks_for(longest, size)])),
            slots=torch.from_numpy(tables[everyone, positions // size] * size + positions % size),
            positions=torch.from_numpy(positions),
            logits_rows=torch.from_numpy(ordinals[:-1]),
            num_decodes=len(positions),
            prefills=(),
            max_query=1,
            max_context=longest,
            block_size=size,
            every_row=True,
            copies=SlotCopies(torch.from_numpy(sources), torch.from_numpy(targets)) if len(sources) else None,
        )
