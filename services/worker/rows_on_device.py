"""From rows as numpy has them to the tensors that a decoder reads: one buffer, and where in it each array lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.ops import BatchMeta
from services.worker.rows import Int32s, Rows

_ALIGNED = 16
"""An array's start is a multiple of so many numbers, 64 bytes. Kernels read whole vectors then; and Triton compiles a
kernel anew where a pointer is aligned otherwise than before."""


class PackedRows(NamedTuple):
    """A step's arrays one behind the other."""

    rows: Rows
    arrays: tuple[Int32s, ...]
    starts: tuple[int, ...]
    length: int
    """Numbers that a buffer must have room for."""

    def write(self, buffer: Int32s) -> None:
        for array, start in zip(self.arrays, self.starts, strict=True):
            buffer[start : start + len(array)] = array

    def tensors(self, buffer: Tensor) -> tuple[Tensor, BatchMeta]:
        """The token ids and the rest, as views of `buffer`."""
        parts = zip(self.arrays, self.starts, strict=True)
        views = [buffer[start : start + len(array)] for array, start in parts]
        ids, positions, slots, query_starts, context_lens, logits_rows, tables = views
        meta = BatchMeta(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables.view(self.rows.block_tables.shape),
            slots=slots,
            positions=positions,
            logits_rows=logits_rows,
            num_decodes=self.rows.num_decodes,
            prefills=self.rows.prefills,
            max_query=self.rows.max_query,
            max_context=self.rows.max_context,
            every_row=_counts_up(self.arrays[5], len(ids)),
        )
        return ids, meta


def packed(rows: Rows, logits_rows: Int32s) -> PackedRows:
    """Where everything goes. `write` is still to be called."""
    arrays = (
        rows.ids,
        rows.positions,
        rows.kv_slots,
        rows.query_starts,
        rows.context_lens,
        logits_rows,
        rows.block_tables.ravel(),
    )
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-len(array) // _ALIGNED) * _ALIGNED
    return PackedRows(rows, arrays, tuple(starts), end)


def on_device(rows: Rows, logits_rows: Int32s, device: torch.device) -> tuple[Tensor, BatchMeta]:
    """The rows' token ids and the rest as tensors on `device`, in one copy that the host waits for."""
    together = packed(rows, logits_rows)
    buffer = np.empty(together.length, dtype=np.int32)
    together.write(buffer)
    return together.tensors(torch.from_numpy(buffer).to(device))


def where_they_are(rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
    """The rows' token ids and the rest as tensors in main memory, which are the arrays themselves."""
    meta = BatchMeta(
        query_starts=torch.from_numpy(rows.query_starts),
        context_lens=torch.from_numpy(rows.context_lens),
        block_tables=torch.from_numpy(rows.block_tables),
        slots=torch.from_numpy(rows.kv_slots),
        positions=torch.from_numpy(rows.positions),
        logits_rows=torch.from_numpy(logits_rows),
        num_decodes=rows.num_decodes,
        prefills=rows.prefills,
        max_query=rows.max_query,
        max_context=rows.max_context,
        every_row=_counts_up(logits_rows, len(rows.ids)),
    )
    return torch.from_numpy(rows.ids), meta


def _counts_up(rows: Int32s, count: int) -> bool:
    return len(rows) == count and bool((rows == np.arange(count, dtype=np.int32)).all())
