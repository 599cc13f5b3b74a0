"""Steps of sequences that keep states, as operations are given them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.worker.ops.interface import BatchMeta, StateRows


class Share(NamedTuple):
    """Rows of one sequence in a step."""

    slot: int
    first: int
    """Position of the first of them."""
    count: int


def meta_of(shares: list[Share]) -> BatchMeta:
    """Those of one row first, as every step has them."""
    counts = torch.tensor([share.count for share in shares])
    ends = torch.tensor([share.first + share.count for share in shares])
    decodes = sum(share.count == 1 for share in shares)
    assert all(share.count == 1 for share in shares[:decodes])
    begins = torch.tensor([share.first == 0 for share in shares[:decodes]], dtype=torch.bool)
    starts = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).int()
    rows = torch.zeros(int(counts.sum()), dtype=torch.int32)
    return BatchMeta(
        query_starts=starts,
        context_lens=ends.int(),
        block_tables=torch.zeros(len(shares), 1, dtype=torch.int32),
        slots=rows,
        positions=rows,
        logits_rows=rows[:0],
        num_decodes=decodes,
        prefills=tuple(zip(counts[decodes:].tolist(), ends[decodes:].tolist(), strict=True)),
        max_query=int(counts.max()),
        max_context=int(ends.max()),
        block_size=16,
        states=StateRows(torch.tensor([share.slot for share in shares]), begins if begins.any() else None),
    )
