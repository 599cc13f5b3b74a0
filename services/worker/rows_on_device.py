"""From rows as numpy has them to the tensors that a decoder reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.ops import BatchMeta
from services.worker.rows import Int32s, Rows


def on_device(rows: Rows, logits_rows: Int32s, device: torch.device) -> tuple[Tensor, BatchMeta]:
    """The rows' token ids and the rest as tensors on `device`, in one copy."""
    arrays = (
        rows.ids,
        rows.positions,
        rows.kv_slots,
        rows.query_starts,
        rows.context_lens,
        logits_rows,
        rows.block_tables.ravel(),
    )
    packed = torch.from_numpy(np.concatenate(arrays)).to(device)
    ids, positions, slots, starts, lengths, wanted, tables = torch.split(packed, [len(array) for array in arrays])
    meta = BatchMeta(
        query_starts=starts,
        context_lens=lengths,
        block_tables=tables.view(rows.block_tables.shape),
        slots=slots,
        positions=positions,
        logits_rows=wanted,
        num_decodes=rows.num_decodes,
        prefills=rows.prefills,
        max_query=rows.max_query,
        max_context=rows.max_context,
    )
    return ids, meta
